// Compression of fp32 numbers to signs. Nothing here knows torch.
//
// Numbers are [rows, width], contiguous; a width is a multiple of 8. blockIdx.y is the row. A row consists of spans;
// `ends` has the end of each, and `scales`, [rows, spans], the scale of each.
#pragma once

#include <cstdint>

#define DSJOB_DEVICE __device__ __forceinline__

namespace dsjob {

struct Spans {
    const float* scales;
    const std::int64_t* ends;
    int count;
};

// The scale of a column, which is before the last end.
DSJOB_DEVICE float find_scale(const Spans& spans, std::int64_t row, std::int64_t column) {
    int first = 0, last = spans.count - 1;
    while (first < last) {
        const int middle = (first + last) / 2;
        if (column < spans.ends[middle])
            last = middle;
        else
            first = middle + 1;
    }
    return spans.scales[row * spans.count + first];
}

// packed: bits of [values >= 0], the first element lowest. errors = values - what their bits stand for, or 0 where not
// alive. Blocks are of whole warps; all threads of a block run its loop equally often, since a warp votes together.
__global__ void compress_signs(
    const float* values, const bool* alive, Spans spans, std::uint8_t* packed, float* errors, std::int64_t width
) {
    const std::int64_t row = blockIdx.y, start = row * width, step = std::int64_t(gridDim.x) * blockDim.x;
    for (std::int64_t first = std::int64_t(blockIdx.x) * blockDim.x; first < width; first += step) {
        const std::int64_t column = first + threadIdx.x;
        const bool inside = column < width;
        const float value = inside ? values[start + column] : 0.0f;
        const bool positive = value >= 0.0f;
        const unsigned bits = __ballot_sync(~0u, positive);
        if (!inside) continue;
        const unsigned lane = threadIdx.x % 32;
        if (lane % 8 == 0) packed[(start + column) / 8] = std::uint8_t(bits >> lane);
        const float scale = find_scale(spans, row, column);
        errors[start + column] = alive[start + column] ? value - (positive ? scale : -scale) : 0.0f;
    }
}

// values: what the bits stand for. stride: bytes from one packed row to the next.
__global__ void expand_signs(
    const std::uint8_t* packed, std::int64_t stride, Spans spans, float* values, std::int64_t width
) {
    const std::int64_t row = blockIdx.y, step = std::int64_t(gridDim.x) * blockDim.x;
    for (std::int64_t column = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x; column < width; column += step) {
        const float scale = find_scale(spans, row, column);
        values[row * width + column] = packed[row * stride + column / 8] >> (column % 8) & 1 ? scale : -scale;
    }
}

}  // namespace dsjob
