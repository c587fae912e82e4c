// The kernels for processors with AVX2 and FMA.
#if defined(__x86_64__)
#include "kernels.h"  // before the options below: what it includes is for any processor

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define DSJOB_ISA avx2
#include "kernels.inc"
#pragma GCC pop_options
#endif
