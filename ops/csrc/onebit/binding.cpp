// torch.ops.dsjob.onebit_* on the host. `ops/onebit.py` has the schemas, and the same in PyTorch's operators.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "kernels.h"

namespace {

using at::Tensor;

constexpr int64_t kStretch = 1 << 11;  // bytes of signs that a thread takes at a time: 64 KiB of numbers

// A part of a row with one scale. Both positions count bytes of signs.
struct Piece {
    int64_t row, begin, count;
    float scale;
};

std::vector<Piece> split(const Tensor& scales, at::IntArrayRef widths, int64_t rows, int64_t bytes) {
    TORCH_CHECK_TYPE(scales.scalar_type() == at::kFloat, "scales must be fp32, not ", scales.dtype());
    TORCH_CHECK_VALUE(scales.dim() == 2 && scales.size(0) == rows && scales.size(1) == int64_t(widths.size()),
                      "scales must be [", rows, ", ", widths.size(), "], not ", scales.sizes());
    const auto values = scales.accessor<float, 2>();
    std::vector<Piece> pieces;
    for (int64_t row = 0; row < rows; ++row) {
        int64_t begin = 0;
        for (size_t span = 0; span < widths.size(); ++span) {
            TORCH_CHECK_VALUE(widths[span] >= 0 && widths[span] % 8 == 0, "width ", widths[span], " is not whole bytes");
            const int64_t end = begin + widths[span] / 8;
            for (; begin < end; begin += std::min(kStretch, end - begin))
                pieces.push_back({row, begin, std::min(kStretch, end - begin), values[row][int64_t(span)]});
        }
        TORCH_CHECK_VALUE(begin == bytes, "the widths cover ", 8 * begin, " elements of ", 8 * bytes);
    }
    return pieces;
}

template <class Body>
void for_each(const std::vector<Piece>& pieces, Body body) {
    at::parallel_for(0, int64_t(pieces.size()), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) body(pieces[size_t(i)]);
    });
}

std::tuple<Tensor, Tensor> compress(const Tensor& rows, const Tensor& alive, const Tensor& scales,
                                    at::IntArrayRef widths) {
    TORCH_CHECK_TYPE(rows.scalar_type() == at::kFloat, "rows must be fp32, not ", rows.dtype());
    TORCH_CHECK_TYPE(alive.scalar_type() == at::kBool, "alive must be bool, not ", alive.dtype());
    TORCH_CHECK_VALUE(rows.dim() == 2 && rows.size(1) % 8 == 0, "rows must be [rows, whole bytes], not ", rows.sizes());
    TORCH_CHECK_VALUE(alive.sizes() == rows.sizes(), "alive must be ", rows.sizes(), ", not ", alive.sizes());
    const int64_t count = rows.size(0), bytes = rows.size(1) / 8;
    const auto pieces = split(scales, widths, count, bytes);
    const Tensor values = rows.contiguous(), flags = alive.contiguous();
    const Tensor packed = at::empty({count, bytes}, rows.options().dtype(at::kByte));
    const Tensor errors = at::empty({count, 8 * bytes}, rows.options());
    const auto& kernels = dsjob::choose_sign_kernels();
    const float* from = values.const_data_ptr<float>();
    const auto* flag = reinterpret_cast<const uint8_t*>(flags.const_data_ptr<bool>());
    auto* to = packed.data_ptr<uint8_t>();
    float* left = errors.data_ptr<float>();
    for_each(pieces, [&](const Piece& piece) {
        const int64_t at = piece.row * bytes + piece.begin;
        kernels.compress(from + 8 * at, flag + 8 * at, piece.scale, to + at, left + 8 * at, size_t(piece.count));
    });
    return {packed, errors};
}

Tensor expand(const Tensor& packed, const Tensor& scales, at::IntArrayRef widths) {
    TORCH_CHECK_TYPE(packed.scalar_type() == at::kByte, "packed signs must be uint8, not ", packed.dtype());
    TORCH_CHECK_VALUE(packed.dim() == 2, "packed signs must be [rows, bytes], not ", packed.sizes());
    const int64_t count = packed.size(0), bytes = packed.size(1);
    const auto pieces = split(scales, widths, count, bytes);
    // Rows of a message are followed by scales, so only the elements of a row must be adjacent.
    const Tensor signs = packed.stride(1) == 1 ? packed : packed.contiguous();
    const Tensor values = at::empty({count, 8 * bytes}, scales.options());
    const auto& kernels = dsjob::choose_sign_kernels();
    const uint8_t* from = signs.const_data_ptr<uint8_t>();
    float* to = values.data_ptr<float>();
    for_each(pieces, [&](const Piece& piece) {
        kernels.expand(from + piece.row * signs.stride(0) + piece.begin, piece.scale,
                       to + 8 * (piece.row * bytes + piece.begin), size_t(piece.count));
    });
    return values;
}

}  // namespace

TORCH_LIBRARY_IMPL(dsjob, CPU, library) {
    library.impl("onebit_compress", compress);
    library.impl("onebit_expand", expand);
}

TORCH_LIBRARY_FRAGMENT(dsjob, library) {
    library.def("onebit_instruction_set() -> str", [] { return std::string(dsjob::choose_sign_kernels().name); });
}
