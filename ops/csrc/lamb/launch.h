// Starts the kernels on a stream, by raw pointers to memory of the GPU. Nothing here knows torch.
#pragma once

#include <cuda_runtime.h>

#include "table.h"

namespace dsjob {

// What the pointers are is described beside the kernels. Each returns what the launch reported.
cudaError_t lamb_average(const Table& table, const LambStep& step, float* sums, float* totals, cudaStream_t);
cudaError_t lamb_apply(const Table& table, const LambStep& step, const float* ratios, cudaStream_t);

}  // namespace dsjob
