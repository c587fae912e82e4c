// Starts the kernels of Lamb on a CPU.
#include "../cuda_on_host.h"
#include "kernels.cuh"
#include "launch.h"

namespace dsjob {

cudaError_t lamb_average(const Table& table, const LambStep& step, float* sums, float* totals, cudaStream_t) {
    launch(unsigned(table.ends[table.tensors - 1]), {64, 1, 1}, [=] { lamb_average(table, step, sums); });
    launch(unsigned(table.tensors), {64, 1, 1}, [=] { lamb_total(table, sums, totals); });
    return cudaSuccess;
}

cudaError_t lamb_apply(const Table& table, const LambStep& step, const float* ratios, cudaStream_t) {
    launch(unsigned(table.ends[table.tensors - 1]), {64, 1, 1}, [=] { lamb_apply(table, step, ratios); });
    return cudaSuccess;
}

}  // namespace dsjob
