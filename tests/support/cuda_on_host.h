// Runs CUDA kernels on a CPU: a thread of the host for each thread of a block, one block after the other.
//
// It refuses the launches that a GPU refuses. Warps step by themselves, as on a GPU. Shared memory of a launch has
// exactly the size that the launch asks for, and begins as NaN.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <thread>
#include <vector>

#define __global__ inline
#define __device__ inline
#define __forceinline__
#define __shared__ static

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorInvalidConfiguration };
using cudaStream_t = void*;

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace on_host {

constexpr unsigned kLanes = 32, kThreads = 1024;
constexpr std::size_t kShared = 48 << 10;

struct Warp {
    std::barrier<> turnstile{kLanes};
    std::atomic<bool> incomplete{false};  // a lane has returned
    float values[kLanes];
};
struct Shape {
    dim3 grid, block;
    std::size_t shared;
    Shape(dim3 grid, dim3 block, std::size_t shared = 0, cudaStream_t = nullptr)
        : grid(grid), block(block), shared(shared) {}
};

inline std::unique_ptr<std::barrier<>> turnstile;
inline std::vector<std::unique_ptr<Warp>> warps;
inline std::unique_ptr<float[]> shared;
inline cudaError_t last = cudaSuccess;
inline thread_local Warp* warp;
inline thread_local unsigned lane;

// Hands a value of each lane to all lanes of its warp: `read` may look at `warp->values`.
template <typename Read>
auto exchange(float value, Read read) {
    warp->values[lane] = value;
    warp->turnstile.arrive_and_wait();
    if (warp->incomplete) {  // no lane can return from the kernel between the two waits
        std::fputs("a lane has returned before an exchange of its warp\n", stderr);
        std::abort();
    }
    const auto found = read();
    warp->turnstile.arrive_and_wait();
    return found;
}

}  // namespace on_host

inline thread_local dim3 threadIdx;
inline dim3 blockIdx, blockDim, gridDim;

inline void __syncthreads() { on_host::turnstile->arrive_and_wait(); }

inline float __shfl_xor_sync(unsigned, float value, int step) {
    return on_host::exchange(value, [=] { return on_host::warp->values[on_host::lane ^ step]; });
}

inline unsigned __ballot_sync(unsigned, bool vote) {
    return on_host::exchange(vote, [] {
        unsigned bits = 0;
        for (unsigned lane = 0; lane < on_host::kLanes; ++lane) bits |= unsigned(on_host::warp->values[lane]) << lane;
        return bits;
    });
}

inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

inline cudaError_t cudaGetLastError() {
    const cudaError_t found = on_host::last;
    on_host::last = cudaSuccess;
    return found;
}

namespace on_host {

inline bool is_valid(const Shape& shape) {
    const auto [grid, block, shared] = shape;
    const std::uint64_t threads = std::uint64_t(block.x) * block.y * block.z;
    return threads && threads <= kThreads && threads % kLanes == 0 && block.z == 1 && shared <= kShared && grid.x &&
           grid.y && grid.z == 1 && grid.x <= INT32_MAX && grid.y <= 65535;
}

template <typename Kernel, typename... Arguments>
void launch(const Shape& shape, Kernel kernel, Arguments... arguments) {
    if (!is_valid(shape)) {
        last = cudaErrorInvalidConfiguration;
        return;
    }
    gridDim = shape.grid;
    blockDim = shape.block;
    const unsigned blocks = gridDim.x * gridDim.y, count = blockDim.x * blockDim.y;
    const auto start_block = [&, number = 0u]() mutable noexcept {
        blockIdx = {number % gridDim.x, number / gridDim.x};
        ++number;
        turnstile = std::make_unique<std::barrier<>>(count);
        warps.clear();
        for (unsigned i = 0; i < count / kLanes; ++i) warps.push_back(std::make_unique<Warp>());
        shared.reset(new float[shape.shared / sizeof(float)]);
        std::fill_n(shared.get(), shape.shared / sizeof(float), std::numeric_limits<float>::quiet_NaN());
    };
    std::barrier gate(count, start_block);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < count; ++i)
        threads.emplace_back([&, i] {
            threadIdx = {i % blockDim.x, i / blockDim.x};
            lane = i % kLanes;
            for (unsigned block = 0; block < blocks; ++block) {
                gate.arrive_and_wait();
                warp = warps[i / kLanes].get();
                kernel(arguments...);
                warp->incomplete = true;
                warp->turnstile.arrive_and_drop();
                turnstile->arrive_and_drop();  // a thread that returns early holds up no other
            }
        });
    for (auto& thread : threads) thread.join();
}

}  // namespace on_host
