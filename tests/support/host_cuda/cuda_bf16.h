#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

struct __nv_bfloat16 {
    std::uint16_t bits;
};
inline float __bfloat162float(__nv_bfloat16 x) { return std::bit_cast<float>(std::uint32_t(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16(float x) {  // to the nearest, and halfway to the even one
    if (std::isnan(x)) return {0x7fff};
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
    return {std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
