// Draws a seed from torch's generator of the CPU.
#pragma once

#include <ATen/CPUGeneratorImpl.h>

namespace at {

struct PhiloxCudaState {
    struct {
        uint64_t val;
    } seed_, offset_;
    bool captured_;
};

struct CUDAGeneratorImpl : CPUGeneratorImpl {
    PhiloxCudaState philox_cuda_state(uint64_t) { return {{random64()}, {0}, false}; }
};

namespace cuda::detail {

inline const Generator& getDefaultCUDAGenerator(int) { return at::detail::getDefaultCPUGenerator(); }

}  // namespace cuda::detail
}  // namespace at
