// Compression of fp32 numbers to signs on the host, by raw pointers. Nothing here knows torch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dsjob {

// A stretch of 8 * `bytes` elements with one scale. An element's bit is 1 where the value is >= 0, so 0 and -0 have 1
// and NaN has 0; the first element is the lowest bit. A bit stands for scale or -scale.
struct SignKernels {
    const char* name;
    // errors = values - what the bits stand for, or 0 where `alive`, a bool, is false.
    void (*compress)(const float* values, const std::uint8_t* alive, float scale, std::uint8_t* packed, float* errors,
                     std::size_t bytes);
    void (*expand)(const std::uint8_t* packed, float scale, float* values, std::size_t bytes);
};

// The fastest kernels that this processor runs; see instruction_set.h. All give the same bits.
const SignKernels& choose_sign_kernels();

}  // namespace dsjob
