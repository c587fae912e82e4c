// Starts the kernels on a stream, by raw pointers to memory of the GPU. Nothing here knows torch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace dsjob {

// What the pointers are is described beside the kernels. Each returns what the launch reported, or cudaErrorInvalidValue
// for more than 65,535 rows.
cudaError_t compress_signs(
    const float* values, const bool* alive, const float* scales, const std::int64_t* ends, int spans,
    std::uint8_t* packed, float* errors, std::int64_t rows, std::int64_t width, cudaStream_t
);
cudaError_t expand_signs(
    const std::uint8_t* packed, std::int64_t stride, const float* scales, const std::int64_t* ends, int spans,
    float* values, std::int64_t rows, std::int64_t width, cudaStream_t
);

}  // namespace dsjob
