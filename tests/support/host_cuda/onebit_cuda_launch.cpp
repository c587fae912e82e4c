// Starts the kernels of onebit_cuda on a CPU.
#include "../cuda_on_host.h"
#include "kernels.cuh"
#include "launch.h"

namespace dsjob {

cudaError_t compress_signs(const float* values, const bool* alive, const float* scales, const std::int64_t* ends,
                           int count, std::uint8_t* packed, float* errors, std::int64_t rows, std::int64_t width,
                           cudaStream_t) {
    const Spans spans = {scales, ends, count};
    launch({2, unsigned(rows), 1}, {64, 1, 1}, [=] { compress_signs(values, alive, spans, packed, errors, width); });
    return cudaSuccess;
}

cudaError_t expand_signs(const std::uint8_t* packed, std::int64_t stride, const float* scales, const std::int64_t* ends,
                         int count, float* values, std::int64_t rows, std::int64_t width, cudaStream_t) {
    const Spans spans = {scales, ends, count};
    launch({2, unsigned(rows), 1}, {64, 1, 1}, [=] { expand_signs(packed, stride, spans, values, width); });
    return cudaSuccess;
}

}  // namespace dsjob
