// Lamb over a list of parameters. Nothing here knows torch.
//
// A block for each chunk of a table. Sums have a fixed order, so results are the same from run to run.
#pragma once

#include <cmath>

#include "table.h"

#define DSJOB_DEVICE __device__ __forceinline__

namespace dsjob {

constexpr int kWarp = 32, kThreads = 256, kLanes = 4;  // kLanes: elements that a thread loads before it stores any

struct Place {
    int tensor;
    std::int64_t first, end;  // elements
};

DSJOB_DEVICE Place find_place(const Table& table, int chunk) {
    int first = 0, last = table.tensors - 1;
    while (first < last) {
        const int middle = (first + last) / 2;
        if (chunk < table.ends[middle])
            last = middle;
        else
            first = middle + 1;
    }
    const std::int64_t start = std::int64_t(chunk - (first ? table.ends[first - 1] : 0)) * kChunk;
    const std::int64_t count = table.counts[first];
    return {first, start, start + kChunk < count ? start + kChunk : count};
}

DSJOB_DEVICE float find_update(float weight, float average, float square, const LambStep& step) {
    const float root = step.eps_inside_root ? sqrtf(square + step.eps) : sqrtf(square) + step.eps;
    return fmaf(step.decay, weight, average / root);
}

// The sum over the threads of a block of whole warps, for its first thread. partial: shared, one per warp.
DSJOB_DEVICE float sum_block(float value, float* partial) {
    for (int step = kWarp / 2; step; step /= 2) value += __shfl_xor_sync(~0u, value, step);
    __syncthreads();  // the last call's readers are done
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
    __syncthreads();
    float total = 0;
    for (int warp = 0; warp < int(blockDim.x) / kWarp; ++warp) total += partial[warp];
    return total;
}

// Moves the averages. sums: [chunks, 2], of the squares of the weights and of their updates.
__global__ void lamb_average(Table table, LambStep step, float* sums) {
    __shared__ float partial[kWarp];
    const Place place = find_place(table, blockIdx.x);
    const float* weights = table.weights[place.tensor];
    const float* gradients = table.gradients[place.tensor];
    float* averages = table.averages[place.tensor];
    float* squares = table.squares[place.tensor];
    float of_weights = 0, of_updates = 0;
    for (std::int64_t base = place.first + threadIdx.x; base < place.end; base += kLanes * blockDim.x) {
        float weight[kLanes], gradient[kLanes], average[kLanes], square[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
            const std::int64_t i = base + lane * blockDim.x;
            const bool inside = i < place.end;
            weight[lane] = inside ? weights[i] : 0.0f;
            gradient[lane] = inside ? gradients[i] : 0.0f;
            average[lane] = inside ? averages[i] : 0.0f;
            square[lane] = inside ? squares[i] : 0.0f;
        }
        for (int lane = 0; lane < kLanes; ++lane) {
            const std::int64_t i = base + lane * blockDim.x;
            if (i >= place.end) break;
            average[lane] = fmaf(1.0f - step.beta1, gradient[lane] - average[lane], average[lane]);
            square[lane] = fmaf((1.0f - step.beta2) * gradient[lane], gradient[lane], step.beta2 * square[lane]);
            const float update = find_update(weight[lane], average[lane], square[lane], step);
            of_weights = fmaf(weight[lane], weight[lane], of_weights);
            of_updates = fmaf(update, update, of_updates);
            averages[i] = average[lane];
            squares[i] = square[lane];
        }
    }
    of_weights = sum_block(of_weights, partial);
    of_updates = sum_block(of_updates, partial);
    if (threadIdx.x == 0) {
        sums[2 * blockIdx.x] = of_weights;
        sums[2 * blockIdx.x + 1] = of_updates;
    }
}

// Adds up the sums of the chunks. totals: [parameters, 2]. A block of at most kThreads for each parameter.
__global__ void lamb_total(Table table, const float* sums, float* totals) {
    __shared__ double partial[2][kThreads];
    const int first = blockIdx.x ? table.ends[blockIdx.x - 1] : 0;
    for (int column = 0; column < 2; ++column) {
        double total = 0;
        for (int chunk = first + int(threadIdx.x); chunk < table.ends[blockIdx.x]; chunk += int(blockDim.x))
            total += sums[2 * std::int64_t(chunk) + column];
        partial[column][threadIdx.x] = total;
    }
    __syncthreads();
    if (threadIdx.x >= 2) return;
    double total = 0;
    for (int thread = 0; thread < int(blockDim.x); ++thread) total += partial[threadIdx.x][thread];
    totals[2 * blockIdx.x + threadIdx.x] = float(total);
}

// Subtracts the updates, each times the rate and the ratio of its parameter. ratios: [parameters].
__global__ void lamb_apply(Table table, LambStep step, const float* ratios) {
    const Place place = find_place(table, blockIdx.x);
    float* weights = table.weights[place.tensor];
    const float* averages = table.averages[place.tensor];
    const float* squares = table.squares[place.tensor];
    const float rate = table.rates[place.tensor] * ratios[place.tensor];
    for (std::int64_t base = place.first + threadIdx.x; base < place.end; base += kLanes * blockDim.x) {
        float weight[kLanes], average[kLanes], square[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
            const std::int64_t i = base + lane * blockDim.x;
            const bool inside = i < place.end;
            weight[lane] = inside ? weights[i] : 0.0f;
            average[lane] = inside ? averages[i] : 0.0f;
            square[lane] = inside ? squares[i] : 1.0f;
        }
        for (int lane = 0; lane < kLanes; ++lane) {
            const std::int64_t i = base + lane * blockDim.x;
            if (i < place.end)
                weights[i] = fmaf(-rate, find_update(weight[lane], average[lane], square[lane], step), weight[lane]);
        }
    }
}

}  // namespace dsjob
