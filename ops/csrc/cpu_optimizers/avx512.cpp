// The kernels for processors with AVX-512.
#if defined(__x86_64__)
#include "kernels.h"  // before the options below: what it includes is for any processor

#pragma GCC push_options
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#define DSJOB_ISA avx512
#include "kernels.inc"
#pragma GCC pop_options
#endif
