// Runs CUDA kernels on a CPU: a thread of the host for each thread of a block, one block after the other.
#pragma once

#include <barrier>
#include <cmath>
#include <memory>
#include <thread>
#include <vector>

struct Index {
    unsigned x, y, z;
};
inline thread_local Index threadIdx;
inline Index blockIdx, blockDim, gridDim;
inline std::unique_ptr<std::barrier<>> turnstile;
inline float exchanged[1024];

#define __global__ inline
#define __shared__ static

inline void __syncthreads() { turnstile->arrive_and_wait(); }

// Stricter than a GPU: all threads of the block have to call it.
inline float __shfl_xor_sync(unsigned, float value, int step) {
    exchanged[threadIdx.x] = value;
    __syncthreads();
    const float other = exchanged[threadIdx.x ^ step];
    __syncthreads();
    return other;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

template <typename Kernel>
void launch(unsigned blocks, Index block, Kernel kernel) {
    gridDim = {blocks, 1, 1};
    blockDim = block;
    for (blockIdx = {0, 0, 0}; blockIdx.x < blocks; ++blockIdx.x) {
        turnstile = std::make_unique<std::barrier<>>(block.x * block.y);
        std::vector<std::thread> threads;
        for (unsigned y = 0; y < block.y; ++y)
            for (unsigned x = 0; x < block.x; ++x)
                threads.emplace_back([=] {
                    threadIdx = {x, y, 0};
                    kernel();
                    turnstile->arrive_and_drop();  // a thread that returns early holds up no other
                });
        for (auto& thread : threads) thread.join();
    }
}
