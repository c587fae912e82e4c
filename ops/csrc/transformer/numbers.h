// What the kernels of the transformer layer compute with.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#define DSJOB_DEVICE __device__ __forceinline__

namespace dsjob {

DSJOB_DEVICE float widen(float value) { return value; }
DSJOB_DEVICE float widen(std::uint8_t value) { return value; }
DSJOB_DEVICE float widen(__half value) { return __half2float(value); }
DSJOB_DEVICE float widen(__nv_bfloat16 value) { return __bfloat162float(value); }
DSJOB_DEVICE void narrow(float value, float* out) { *out = value; }
DSJOB_DEVICE void narrow(float value, __half* out) { *out = __float2half(value); }
DSJOB_DEVICE void narrow(float value, __nv_bfloat16* out) { *out = __float2bfloat16(value); }

// Four elements, which a thread loads or stores at once. Their address is a multiple of their size.
template <typename T>
struct alignas(4 * sizeof(T)) Pack {
    T values[4];
};

template <typename T>
DSJOB_DEVICE Pack<T> load(const T* from) {
    return *reinterpret_cast<const Pack<T>*>(from);
}

template <typename T>
DSJOB_DEVICE void store(const Pack<T>& pack, T* to) {
    *reinterpret_cast<Pack<T>*>(to) = pack;
}

constexpr float kRoot = 0.7978845608028654f;  // sqrt(2 / pi)
constexpr float kCubic = 0.044715f;

// GELU, approximated with tanh as in torch.
DSJOB_DEVICE float gelu(float x) { return 0.5f * x * (1.0f + tanhf(kRoot * (x + kCubic * x * x * x))); }

DSJOB_DEVICE float gelu_slope(float x) {
    const float bent = tanhf(kRoot * (x + kCubic * x * x * x));
    const float inner = kRoot * (1.0f + 3.0f * kCubic * x * x);
    return 0.5f * (1.0f + bent) + 0.5f * x * (1.0f - bent * bent) * inner;
}

struct Four {
    std::uint32_t values[4];
};

// Philox 4x32 with 10 rounds: four random numbers for a seed and a counter (Salmon et al. 2011). No state is kept, so
// each thread draws the numbers of its own elements. The halves of the counter are those of torch's kernels: how many
// fours the generator has given before, and which of the parallel sequences. So no number is drawn twice.
DSJOB_DEVICE Four draw(std::uint64_t seed, std::uint64_t before, std::uint64_t sequence) {
    std::uint32_t a = before, b = before >> 32, c = sequence, d = sequence >> 32;
    std::uint32_t low = seed, high = seed >> 32;
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t first = 0xD2511F53ull * a, second = 0xCD9E8D57ull * c;
        a = static_cast<std::uint32_t>(second >> 32) ^ b ^ low;
        c = static_cast<std::uint32_t>(first >> 32) ^ d ^ high;
        b = static_cast<std::uint32_t>(second);
        d = static_cast<std::uint32_t>(first);
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    return {{a, b, c, d}};
}

// Whether dropout keeps an element, for one of its random numbers.
DSJOB_DEVICE bool is_kept(std::uint32_t number, float ratio) { return (number >> 8) * 0x1p-24f >= ratio; }

}  // namespace dsjob
