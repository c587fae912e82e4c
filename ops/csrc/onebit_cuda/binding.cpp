// torch.ops.dsjob.onebit_* on GPUs. `ops/onebit.py` has the schemas, and the same in PyTorch's operators.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <tuple>

#include "launch.h"

namespace {

using at::Tensor;

void check(const Tensor& tensor, const Tensor& first, at::ScalarType type, const char* role) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == type, role, " must be ", type, ", not ", tensor.dtype());
    TORCH_CHECK_VALUE(tensor.device() == first.device(), role, " must be on ", first.device(), ", not ", tensor.device());
    TORCH_CHECK_VALUE(tensor.dim() == 2, role, " must have two dimensions, not ", tensor.dim());
}

// The end of each span, on the GPU.
Tensor find_ends(const Tensor& scales, at::IntArrayRef widths, int64_t rows, int64_t width) {
    TORCH_CHECK_VALUE(scales.size(0) == rows && scales.size(1) == int64_t(widths.size()), "scales must be [", rows, ", ",
                      widths.size(), "], not ", scales.sizes());
    const Tensor ends = at::empty({int64_t(widths.size())}, at::kLong);
    int64_t end = 0;
    for (size_t span = 0; span < widths.size(); ++span) {
        TORCH_CHECK_VALUE(widths[span] >= 0 && widths[span] % 8 == 0, "width ", widths[span], " is not whole bytes");
        ends.data_ptr<int64_t>()[span] = end += widths[span];
    }
    TORCH_CHECK_VALUE(end == width, "the widths cover ", end, " elements of ", width);
    // Not blocking: the host does not wait for the GPU. CUDA has read pageable memory when the call returns.
    return ends.to(scales.device(), at::kLong, /*non_blocking=*/true);
}

std::tuple<Tensor, Tensor> compress(const Tensor& rows, const Tensor& alive, const Tensor& scales,
                                    at::IntArrayRef widths) {
    check(rows, rows, at::kFloat, "rows");
    check(alive, rows, at::kBool, "alive");
    check(scales, rows, at::kFloat, "scales");
    TORCH_CHECK_VALUE(rows.size(1) % 8 == 0, "rows must be [rows, whole bytes], not ", rows.sizes());
    TORCH_CHECK_VALUE(alive.sizes() == rows.sizes(), "alive must be ", rows.sizes(), ", not ", alive.sizes());
    const c10::cuda::CUDAGuard guard(rows.device());
    const int64_t count = rows.size(0), width = rows.size(1);
    const Tensor ends = find_ends(scales, widths, count, width);
    const Tensor values = rows.contiguous(), flags = alive.contiguous(), factors = scales.contiguous();
    const Tensor packed = at::empty({count, width / 8}, rows.options().dtype(at::kByte));
    const Tensor errors = at::empty({count, width}, rows.options());
    C10_CUDA_CHECK(dsjob::compress_signs(
        values.const_data_ptr<float>(), flags.const_data_ptr<bool>(), factors.const_data_ptr<float>(),
        ends.const_data_ptr<int64_t>(), int(widths.size()), packed.data_ptr<uint8_t>(), errors.data_ptr<float>(), count,
        width, c10::cuda::getCurrentCUDAStream()));
    return {packed, errors};
}

Tensor expand(const Tensor& packed, const Tensor& scales, at::IntArrayRef widths) {
    check(packed, packed, at::kByte, "packed signs");
    check(scales, packed, at::kFloat, "scales");
    const c10::cuda::CUDAGuard guard(packed.device());
    const int64_t count = packed.size(0), width = 8 * packed.size(1);
    const Tensor ends = find_ends(scales, widths, count, width);
    // Rows of a message are followed by scales, so only the elements of a row must be adjacent.
    const Tensor signs = packed.stride(1) == 1 ? packed : packed.contiguous(), factors = scales.contiguous();
    const Tensor values = at::empty({count, width}, scales.options());
    C10_CUDA_CHECK(dsjob::expand_signs(
        signs.const_data_ptr<uint8_t>(), signs.stride(0), factors.const_data_ptr<float>(),
        ends.const_data_ptr<int64_t>(), int(widths.size()), values.data_ptr<float>(), count, width,
        c10::cuda::getCurrentCUDAStream()));
    return values;
}

}  // namespace

TORCH_LIBRARY_IMPL(dsjob, CUDA, library) {
    library.impl("onebit_compress", compress);
    library.impl("onebit_expand", expand);
}
