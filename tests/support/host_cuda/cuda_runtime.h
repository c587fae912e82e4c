// Stands in for CUDA's header, for bindings and kernels that tests run on a CPU.
#pragma once

#include "../cuda_on_host.h"
