// torch.ops.dsjob.bias_gelu, drop_add_norm, softmax_drop and their gradients on GPUs. `ops/fused.py` has the schemas.
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
using dsjob::Mask;
using dsjob::Scores;
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

// Whether a tensor begins at a multiple of four elements, which the kernels load at once.
bool is_aligned(const Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % (4 * tensor.element_size()) == 0;
}

Tensor align(const Tensor& given) {
    const Tensor tensor = given.contiguous();
    return is_aligned(tensor) ? tensor : tensor.clone();
}

// A tensor like x, or with `row`, like one of its rows.
Tensor take(const Tensor& tensor, const Tensor& x, const char* role, bool row = false) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == x.scalar_type(), role, " must be ", x.dtype(), ", not ", tensor.dtype());
    TORCH_CHECK_VALUE(tensor.device() == x.device(), role, " must be on ", x.device(), ", not ", tensor.device());
    TORCH_CHECK_VALUE(row ? tensor.dim() == 1 && tensor.size(0) == x.size(1) : tensor.sizes() == x.sizes(), role,
                      " does not fit to x ", x.sizes(), ": ", tensor.sizes());
    return align(tensor);
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
    TORCH_CHECK(!state.captured_, "dropout cannot be captured in a CUDA graph");
    return {float(ratio), state.seed_.val, state.offset_.val};
}

Tensor bias_gelu(const Tensor& given, const Tensor& bias) {
    const Tensor x = align(given), row = take(bias, x, "bias", true);
    const Shape shape = shape_of(x);
    const c10::cuda::CUDAGuard guard(x.device());
    const Tensor out = at::empty(x.sizes(), x.options());
    C10_CUDA_CHECK(dsjob::bias_gelu(kind_of(x), shape, x.const_data_ptr(), row.const_data_ptr(), out.data_ptr(),
                                    c10::cuda::getCurrentCUDAStream()));
    return out;
}

std::tuple<Tensor, Tensor> bias_gelu_backward(const Tensor& gradient, const Tensor& given, const Tensor& bias) {
    const Tensor x = align(given), slope = take(gradient, x, "gradient"), row = take(bias, x, "bias", true);
    const Shape shape = shape_of(x);
    const c10::cuda::CUDAGuard guard(x.device());
    const Tensor to_x = at::empty(x.sizes(), x.options()), to_bias = at::zeros({x.size(1)}, x.options());
    const Tensor slices = like(x, {dsjob::count_slices(shape), x.size(1)}, at::kFloat);
    C10_CUDA_CHECK(dsjob::bias_gelu_backward(kind_of(x), shape, slope.const_data_ptr(), x.const_data_ptr(),
                                             row.const_data_ptr(), to_x.data_ptr(), to_bias.data_ptr(),
                                             slices.data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
    return {to_x, to_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> drop_add_norm(const Tensor& given, const Tensor& bias,
                                                                 const Tensor& residual, const Tensor& weight,
                                                                 const Tensor& norm_bias, double ratio, double eps,
                                                                 bool invertible, bool with_sum) {
    TORCH_CHECK_VALUE(ratio >= 0 && ratio < 1, "ratio must be at least 0 and below 1, not ", ratio);
    const Tensor x = align(given), row = take(bias, x, "bias", true), rest = take(residual, x, "residual");
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
    const Tensor source = align(z_or_y), from = take(gradient, source, "gradient");
    const Tensor scale = take(weight, source, "weight", true), shift = take(norm_bias, source, "norm_bias", true);
    const Tensor more = added ? take(*added, source, "added") : Tensor();
    const Shape shape = shape_of(source);
    const c10::cuda::CUDAGuard guard(source.device());
    const Tensor to_residual = at::empty(source.sizes(), source.options());
    const Tensor to_x = ratio > 0 ? at::empty(source.sizes(), source.options()) : at::empty({0}, source.options());
    const Tensor sums = at::zeros({3, source.size(1)}, source.options());
    const Tensor slices = like(source, {3, dsjob::count_slices(shape), source.size(1)}, at::kFloat);
    C10_CUDA_CHECK(dsjob::drop_add_norm_backward(
        kind_of(source), shape, {float(ratio), 0, 0}, from.const_data_ptr(), added ? more.const_data_ptr() : nullptr,
        source.const_data_ptr(), scale.const_data_ptr(), shift.const_data_ptr(), pointer_or_null<float>(mean),
        slope.const_data_ptr<float>(), pointer_or_null<uint8_t>(kept), to_residual.data_ptr(),
        ratio > 0 ? to_x.data_ptr() : nullptr, sums.data_ptr(), slices.data_ptr<float>(),
        c10::cuda::getCurrentCUDAStream()));
    // A function of torch.library must not return views of one tensor.
    return {to_residual, to_x, sums[0].clone(), sums[1].clone(), sums[2].clone()};
}

Scores scores_of(const Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.dim() == 4 && tensor.size(3) > 0 && tensor.size(3) <= dsjob::kWidest,
                      "scores must be [batch, heads, queries, keys], with up to ", dsjob::kWidest, " keys, not ",
                      tensor.sizes());
    return {tensor.size(0), tensor.size(1), tensor.size(2), int(tensor.size(3))};
}

// What the kernels can add to rows of scores: adjacent numbers for adjacent keys, and in multiples of four, if rows are.
Tensor fit_mask(const Tensor& mask, const Tensor& scores) {
    TORCH_CHECK_TYPE(mask.scalar_type() == scores.scalar_type(), "the mask must be ", scores.dtype(), ", not ",
                     mask.dtype());
    TORCH_CHECK_VALUE(mask.device() == scores.device(), "the mask must be on ", scores.device(), ", not ",
                      mask.device());
    TORCH_CHECK_VALUE(mask.dim() == 4, "the mask must have four dimensions, not ", mask.dim());
    const Tensor rows = mask.expand({mask.size(0), mask.size(1), mask.size(2), scores.size(3)});
    const bool by_fours = (rows.stride(0) | rows.stride(1) | rows.stride(2)) % 4 == 0 && is_aligned(rows);
    const bool fits = rows.stride(3) == 1 && (by_fours || scores.size(3) % 4);
    return (fits ? rows : align(rows)).expand(scores.sizes());
}

std::tuple<Tensor, Tensor, Tensor> softmax_drop(const Tensor& given, const std::optional<Tensor>& mask, double scale,
                                                double ratio) {
    TORCH_CHECK_VALUE(ratio > 0 && ratio < 1, "ratio must be above 0 and below 1, not ", ratio);
    const Tensor scores = align(given);
    const Scores shape = scores_of(scores);
    const c10::cuda::CUDAGuard guard(scores.device());
    const Tensor added = mask ? fit_mask(*mask, scores) : Tensor();
    const Mask numbers = mask ? Mask{added.const_data_ptr(), added.stride(0), added.stride(1), added.stride(2)} : Mask{};
    const Tensor dropped = at::empty(scores.sizes(), scores.options());
    const Tensor probabilities = at::empty(scores.sizes(), scores.options());
    const Tensor kept = like(scores, scores.sizes(), at::kByte);
    C10_CUDA_CHECK(dsjob::softmax_drop(kind_of(scores), shape, draw(ratio, scores), scores.const_data_ptr(), numbers,
                                       float(scale), dropped.data_ptr(), probabilities.data_ptr(),
                                       kept.data_ptr<uint8_t>(), c10::cuda::getCurrentCUDAStream()));
    return {dropped, probabilities, kept};
}

std::tuple<Tensor, Tensor> softmax_drop_backward(const Tensor& gradient, const Tensor& probabilities,
                                                 const Tensor& kept, double scale, double ratio, bool with_dropped) {
    const Tensor chances = align(probabilities), slopes = take(gradient, chances, "gradient"), flags = align(kept);
    const Scores shape = scores_of(chances);
    TORCH_CHECK_TYPE(flags.scalar_type() == at::kByte, "kept must be uint8, not ", flags.dtype());
    TORCH_CHECK_VALUE(flags.sizes() == chances.sizes(), "kept must be ", chances.sizes(), ", not ", flags.sizes());
    const c10::cuda::CUDAGuard guard(chances.device());
    const Tensor to_scores = at::empty(chances.sizes(), chances.options());
    const Tensor dropped = with_dropped ? at::empty(chances.sizes(), chances.options()) : at::empty({0}, chances.options());
    C10_CUDA_CHECK(dsjob::softmax_drop_backward(
        kind_of(chances), shape, {float(ratio), 0, 0}, slopes.const_data_ptr(), chances.const_data_ptr(),
        flags.const_data_ptr<uint8_t>(), float(scale), to_scores.data_ptr(),
        with_dropped ? dropped.data_ptr() : nullptr, c10::cuda::getCurrentCUDAStream()));
    return {to_scores, dropped};
}

}  // namespace

TORCH_LIBRARY_IMPL(dsjob, CUDA, library) {
    library.impl("bias_gelu", bias_gelu);
    library.impl("bias_gelu_backward", bias_gelu_backward);
    library.impl("drop_add_norm", drop_add_norm);
    library.impl("drop_add_norm_backward", drop_add_norm_backward);
    library.impl("softmax_drop", softmax_drop);
    library.impl("softmax_drop_backward", softmax_drop_backward);
}
