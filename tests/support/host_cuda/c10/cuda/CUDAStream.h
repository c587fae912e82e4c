// Bindings include this, and register their functions for CUDA below: here, for the CPU.
#pragma once

#include <torch/library.h>

namespace c10::cuda {

inline void* getCurrentCUDAStream() { return nullptr; }

}  // namespace c10::cuda

#define CUDA CPU
