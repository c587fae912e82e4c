// The kernels for any processor, and the choice among all of them.
#include "kernels.h"

#include "../instruction_set.h"

#define DSJOB_ISA plain
#include "kernels.inc"

namespace dsjob {

const Kernels& choose_kernels() {
#if defined(__x86_64__)
    const InstructionSet found = find_instruction_set();
    if (found != InstructionSet::plain) return found == InstructionSet::avx512 ? avx512 : avx2;
#endif
    return plain;
}

}  // namespace dsjob
