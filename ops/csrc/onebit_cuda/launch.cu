#include "launch.h"

#include "kernels.cuh"

namespace dsjob {
namespace {

constexpr int kThreads = 256;
constexpr std::int64_t kRows = 65535, kBlocks = 4096;  // the kernels loop over the rest of a row

dim3 make_grid(std::int64_t rows, std::int64_t width) {
    const std::int64_t blocks = (width + kThreads - 1) / kThreads;
    return dim3(unsigned(blocks < kBlocks ? blocks : kBlocks), unsigned(rows));
}

}  // namespace

cudaError_t compress_signs(
    const float* values, const bool* alive, const float* scales, const std::int64_t* ends, int spans,
    std::uint8_t* packed, float* errors, std::int64_t rows, std::int64_t width, cudaStream_t stream
) {
    if (rows > kRows) return cudaErrorInvalidValue;
    if (!rows || !width) return cudaSuccess;  // a grid of no blocks is an error
    compress_signs<<<make_grid(rows, width), kThreads, 0, stream>>>(
        values, alive, Spans{scales, ends, spans}, packed, errors, width
    );
    return cudaGetLastError();
}

cudaError_t expand_signs(
    const std::uint8_t* packed, std::int64_t stride, const float* scales, const std::int64_t* ends, int spans,
    float* values, std::int64_t rows, std::int64_t width, cudaStream_t stream
) {
    if (rows > kRows) return cudaErrorInvalidValue;
    if (!rows || !width) return cudaSuccess;
    expand_signs<<<make_grid(rows, width), kThreads, 0, stream>>>(
        packed, stride, Spans{scales, ends, spans}, values, width
    );
    return cudaGetLastError();
}

}  // namespace dsjob
