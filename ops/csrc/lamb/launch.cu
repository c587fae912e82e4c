#include "launch.h"

#include "kernels.cuh"

namespace dsjob {

cudaError_t lamb_average(
    const Table& table, const LambStep& step, float* sums, float* totals, cudaStream_t stream
) {
    if (!table.tensors) return cudaSuccess;  // a grid of no blocks is an error
    const int chunks = table.ends[table.tensors - 1];
    if (chunks) lamb_average<<<chunks, kThreads, 0, stream>>>(table, step, sums);
    lamb_total<<<table.tensors, kThreads, 0, stream>>>(table, sums, totals);
    return cudaGetLastError();
}

cudaError_t lamb_apply(const Table& table, const LambStep& step, const float* ratios, cudaStream_t stream) {
    const int chunks = table.tensors ? table.ends[table.tensors - 1] : 0;
    if (chunks) lamb_apply<<<chunks, kThreads, 0, stream>>>(table, step, ratios);
    return cudaGetLastError();
}

}  // namespace dsjob
