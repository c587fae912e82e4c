// The kernels for any processor, which also chooses among all of them.
#include "kernels.h"

#include <cstdlib>
#include <cstring>

#define DSJOB_ISA plain
#include "kernels.inc"

namespace dsjob {

const Kernels& choose_kernels() {
#if defined(__x86_64__)
    const char* limit = std::getenv("DSJOB_CPU_ISA");
    const bool only_plain = limit && !std::strcmp(limit, "plain"), at_most_avx2 = limit && !std::strcmp(limit, "avx2");
    __builtin_cpu_init();
    if (!only_plain && !at_most_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return avx512;
    if (!only_plain && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2;
#endif
    return plain;
}

}  // namespace dsjob
