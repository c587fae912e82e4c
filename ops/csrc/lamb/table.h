// A list of parameters as the argument of a kernel. Nothing here knows torch.
#pragma once

#include <cstdint>

namespace dsjob {

constexpr int kTensors = 64;       // in a table, which must fit into the 4 KB of a kernel's arguments
constexpr int kChunk = 1 << 14;    // elements of a block: its sums do not depend on the other blocks

// fp32 parameters, each divided into chunks. `ends` counts the chunks up to the end of each parameter; a parameter
// without elements has none. `rates`: only to apply updates.
struct Table {
    int tensors;
    int ends[kTensors];
    float rates[kTensors];
    std::int64_t counts[kTensors];
    float* weights[kTensors];
    const float* gradients[kTensors];
    float* averages[kTensors];
    float* squares[kTensors];
};
static_assert(sizeof(Table) <= 4000, "a table and the other arguments must fit into 4 KB");

struct LambStep {
    float beta1, beta2, eps, decay;
    bool eps_inside_root;
};

}  // namespace dsjob
