// Stands in for CUDA's header, for bindings and kernels that tests run on a CPU.
#pragma once

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
using cudaStream_t = void*;
