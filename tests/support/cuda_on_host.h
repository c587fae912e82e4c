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
inline bool votes[1024];

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

inline unsigned __ballot_sync(unsigned, bool vote) {
    votes[threadIdx.x] = vote;
    __syncthreads();
    unsigned bits = 0;
    for (unsigned lane = 0; lane < 32; ++lane) bits |= unsigned(votes[threadIdx.x / 32 * 32 + lane]) << lane;
    __syncthreads();
    return bits;
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

template <typename Kernel>
void launch(Index grid, Index block, Kernel kernel) {
    gridDim = grid;
    blockDim = block;
    for (unsigned number = 0; number < grid.x * grid.y; ++number) {
        blockIdx = {number % grid.x, number / grid.x, 0};
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

template <typename Kernel>
void launch(unsigned blocks, Index block, Kernel kernel) {
    launch(Index{blocks, 1, 1}, block, kernel);
}
