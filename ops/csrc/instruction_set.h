// Which vector instructions the kernels for the host may use. Shared by the ops, so that one setting limits all.
#pragma once

#include <cstdlib>
#include <cstring>

namespace dsjob {

enum class InstructionSet { plain, avx2, avx512 };

// The best of this processor. DSJOB_CPU_ISA=plain|avx2|avx512 sets an upper limit.
inline InstructionSet find_instruction_set() {
#if defined(__x86_64__)
    const char* limit = std::getenv("DSJOB_CPU_ISA");
    const bool only_plain = limit && !std::strcmp(limit, "plain"), at_most_avx2 = limit && !std::strcmp(limit, "avx2");
    __builtin_cpu_init();
    if (!only_plain && !at_most_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return InstructionSet::avx512;
    if (!only_plain && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return InstructionSet::avx2;
#endif
    return InstructionSet::plain;
}

}  // namespace dsjob
