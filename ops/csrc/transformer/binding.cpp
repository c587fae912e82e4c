// torch.ops.dsjob.bias_gelu, drop_add_norm and their gradients on GPUs. `ops/fused.py` has the schemas.
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <mutex>
#include <optional>
#include <tuple>

#include "launch.h"

namespace {

using at::Tensor;
using dsjob::Dropout;
using dsjob::Kind;
using dsjob::Shape;

constexpr uint64_t kNumbers = 4;  // that a thread draws for a position; the generator advances by a multiple of it

Kind kind_of(const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case at::kFloat: return Kind::fp32;
        case at::kHalf: return Kind::fp16;
        case at::kBFloat16: return Kind::bf16;
        default: TORCH_CHECK_TYPE(false, "the kernels take fp32, fp16 and bf16, not ", tensor.dtype());
    }
}

Shape shape_of(const Tensor& x) {
    TORCH_CHECK_VALUE(x.dim() == 2 && x.size(1) > 0 && x.size(1) % 4 == 0 && x.size(1) <= dsjob::kWidest,
                      "x must be [rows, width], with a width that is a multiple of 4 up to ", dsjob::kWidest, ", not ",
                      x.sizes());
    return {x.size(0), int(x.size(1))};
}

// A tensor like x, or with `row`, like one of its rows.
Tensor take(const Tensor& tensor, const Tensor& x, const char* role, bool row = false) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == x.scalar_type(), role, " must be ", x.dtype(), ", not ", tensor.dtype());
    TORCH_CHECK_VALUE(tensor.device() == x.device(), role, " must be on ", x.device(), ", not ", tensor.device());
    TORCH_CHECK_VALUE(row ? tensor.dim() == 1 && tensor.size(0) == x.size(1) : tensor.sizes() == x.sizes(), role,
                      " does not fit to x ", x.sizes(), ": ", tensor.sizes());
    return tensor.contiguous();
}

Tensor like(const Tensor& x, at::IntArrayRef sizes, at::ScalarType type) {
    return at::empty(sizes, x.options().dtype(type));
}

template <class T>
T* pointer_or_null(const Tensor& tensor) {
    return tensor.numel() ? tensor.data_ptr<T>() : nullptr;
}

// Advances the generator of the device: what it draws follows torch.manual_seed, checkpoints and recomputation.
Dropout draw(double ratio, const Tensor& x) {
    if (ratio == 0) return {0, 0, 0};
    at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(x.device().index());
    const std::lock_guard<std::mutex> lock(generator.mutex());
    const at::PhiloxCudaState state = generator.get<at::CUDAGeneratorImpl>()->philox_cuda_state(kNumbers);
    TORCH_CHECK(!state.captured_, "drop_add_norm with dropout cannot be captured in a CUDA graph");
    return {float(ratio), state.seed_.val, state.offset_.val};
}

Tensor bias_gelu(const Tensor& given, const Tensor& bias) {
    const Tensor x = given.contiguous(), row = take(bias, x, "bias", true);
    const Shape shape = shape_of(x);
    const c10::cuda::CUDAGuard guard(x.device());
    const Tensor out = at::empty(x.sizes(), x.options());
    C10_CUDA_CHECK(dsjob::bias_gelu(kind_of(x), shape, x.const_data_ptr(), row.const_data_ptr(), out.data_ptr(),
                                    c10::cuda::getCurrentCUDAStream()));
    return out;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& gradient, const Tensor& given, const Tensor& bias) {
    const Tensor x = given.contiguous(), slope = take(gradient, x, "gradient"), row = take(bias, x, "bias", true);
    const Shape shape = shape_of(x);
    const c10::cuda::CUDAGuard guard(x.device());
    const auto stream = c10::cuda::getCurrentCUDAStream();
    const Tensor to_x = at::empty(x.sizes(), x.options()), to_bias = at::zeros({x.size(1)}, x.options().dtype(at::kFloat));
    C10_CUDA_CHECK(dsjob::bias_gelu_backward(kind_of(x), shape, slope.const_data_ptr(), x.const_data_ptr(),
                                             row.const_data_ptr(), to_x.data_ptr(), stream));
    C10_CUDA_CHECK(dsjob::sum_columns(kind_of(x), shape, to_x.const_data_ptr(), nullptr, nullptr, nullptr, nullptr,
                                      nullptr, nullptr, to_bias.data_ptr<float>(), stream));
    return {to_x, to_bias.to(bias.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> drop_add_norm(const Tensor& given, const Tensor& bias,
                                                                 const Tensor& residual, const Tensor& weight,
                                                                 const Tensor& norm_bias, double ratio, double eps,
                                                                 bool invertible, bool with_sum) {
    TORCH_CHECK_VALUE(ratio >= 0 && ratio < 1, "ratio must be at least 0 and below 1, not ", ratio);
    const Tensor x = given.contiguous(), row = take(bias, x, "bias", true), rest = take(residual, x, "residual");
    const Tensor scale = take(weight, x, "weight", true), shift = take(norm_bias, x, "norm_bias", true);
    const Shape shape = shape_of(x);
    const c10::cuda::CUDAGuard guard(x.device());
    const int64_t rows = x.size(0), width = x.size(1);
    const bool writes_z = with_sum || !invertible;
    const Tensor y = at::empty(x.sizes(), x.options());
    const Tensor z = writes_z ? at::empty(x.sizes(), x.options()) : at::empty({0}, x.options());
    const Tensor kept = ratio > 0 ? like(x, {rows, width}, at::kByte) : like(x, {0}, at::kByte);
    const Tensor mean = invertible ? like(x, {0}, at::kFloat) : like(x, {rows}, at::kFloat);
    const Tensor slope = like(x, {rows}, at::kFloat);
    C10_CUDA_CHECK(dsjob::drop_add_norm(
        kind_of(x), shape, draw(ratio, x), float(eps), x.const_data_ptr(), row.const_data_ptr(), rest.const_data_ptr(),
        scale.const_data_ptr(), shift.const_data_ptr(), z.numel() ? z.data_ptr() : nullptr, y.data_ptr(),
        pointer_or_null<uint8_t>(kept), pointer_or_null<float>(mean), slope.data_ptr<float>(),
        c10::cuda::getCurrentCUDAStream()));
    return {y, z, kept, mean, slope};
}

// z_or_y: the sum z, or where `mean` is empty, the output y of an invertible norm.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> drop_add_norm_backward(
    const Tensor& gradient, const std::optional<Tensor>& added, const Tensor& z_or_y, const Tensor& weight,
    const Tensor& norm_bias, const Tensor& mean, const Tensor& slope, const Tensor& kept, double ratio) {
    const Tensor source = z_or_y.contiguous(), from = take(gradient, source, "gradient");
    const Tensor scale = take(weight, source, "weight", true), shift = take(norm_bias, source, "norm_bias", true);
    const Tensor more = added ? take(*added, source, "added") : Tensor();
    const Shape shape = shape_of(source);
    const auto kind = kind_of(source);
    const c10::cuda::CUDAGuard guard(source.device());
    const auto stream = c10::cuda::getCurrentCUDAStream();
    const Tensor to_residual = at::empty(source.sizes(), source.options());
    const Tensor to_x = ratio > 0 ? at::empty(source.sizes(), source.options()) : at::empty({0}, source.options());
    const Tensor sums = at::zeros({3, source.size(1)}, source.options().dtype(at::kFloat));
    float* const to_weight = sums.data_ptr<float>();
    const float* const means = pointer_or_null<float>(mean);
    C10_CUDA_CHECK(dsjob::drop_add_norm_backward(
        kind, shape, {float(ratio), 0, 0}, from.const_data_ptr(), added ? more.const_data_ptr() : nullptr,
        source.const_data_ptr(), scale.const_data_ptr(), shift.const_data_ptr(), means, slope.const_data_ptr<float>(),
        pointer_or_null<uint8_t>(kept), to_residual.data_ptr(), ratio > 0 ? to_x.data_ptr() : nullptr, stream));
    C10_CUDA_CHECK(dsjob::sum_columns(kind, shape, from.const_data_ptr(), source.const_data_ptr(),
                                      scale.const_data_ptr(), shift.const_data_ptr(), means,
                                      slope.const_data_ptr<float>(), to_weight, to_weight + shape.width, stream));
    const Tensor& summed = ratio > 0 ? to_x : to_residual;
    C10_CUDA_CHECK(dsjob::sum_columns(kind, shape, summed.const_data_ptr(), nullptr, nullptr, nullptr, nullptr, nullptr,
                                      nullptr, to_weight + 2 * shape.width, stream));
    const auto type = source.scalar_type();
    return {to_residual, to_x, sums[0].to(type, false, true), sums[1].to(type, false, true), sums[2].to(type, false, true)};
}

}  // namespace

TORCH_LIBRARY_IMPL(dsjob, CUDA, library) {
    library.impl("bias_gelu", bias_gelu);
    library.impl("bias_gelu_backward", bias_gelu_backward);
    library.impl("drop_add_norm", drop_add_norm);
    library.impl("drop_add_norm_backward", drop_add_norm_backward);
}
