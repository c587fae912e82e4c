// A vector instruction compares 8 or 16 numbers and leaves their bits in the order in which they are sent.
#include "kernels.h"

#include "../instruction_set.h"

#if defined(__x86_64__)
#include <immintrin.h>
#define DSJOB_AVX2 __attribute__((target("avx2,fma")))
#define DSJOB_AVX512 __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#endif

namespace dsjob {
namespace {

void compress_plain(const float* values, const std::uint8_t* alive, float scale, std::uint8_t* packed, float* errors,
                    std::size_t bytes) {
    for (std::size_t byte = 0; byte < bytes; ++byte) {
        unsigned bits = 0;
        for (unsigned k = 0; k < 8; ++k) {
            const std::size_t i = 8 * byte + k;
            const bool positive = values[i] >= 0.0f;
            bits |= unsigned(positive) << k;
            errors[i] = alive[i] ? values[i] - (positive ? scale : -scale) : 0.0f;
        }
        packed[byte] = std::uint8_t(bits);
    }
}

void expand_plain(const std::uint8_t* packed, float scale, float* values, std::size_t bytes) {
    for (std::size_t byte = 0; byte < bytes; ++byte)
        for (unsigned k = 0; k < 8; ++k) values[8 * byte + k] = packed[byte] >> k & 1 ? scale : -scale;
}

#if defined(__x86_64__)

DSJOB_AVX2 void compress_avx2(const float* values, const std::uint8_t* alive, float scale, std::uint8_t* packed,
                              float* errors, std::size_t bytes) {
    const __m256 above = _mm256_set1_ps(scale), below = _mm256_set1_ps(-scale), zero = _mm256_setzero_ps();
    for (std::size_t byte = 0; byte < bytes; ++byte) {
        const __m256 value = _mm256_loadu_ps(values + 8 * byte);
        const __m256 positive = _mm256_cmp_ps(value, zero, _CMP_GE_OQ);
        const __m128i flags = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(alive + 8 * byte));
        const __m256i dead = _mm256_cmpeq_epi32(_mm256_cvtepu8_epi32(flags), _mm256_setzero_si256());
        const __m256 error = _mm256_sub_ps(value, _mm256_blendv_ps(below, above, positive));
        _mm256_storeu_ps(errors + 8 * byte, _mm256_andnot_ps(_mm256_castsi256_ps(dead), error));
        packed[byte] = std::uint8_t(_mm256_movemask_ps(positive));
    }
}

DSJOB_AVX2 void expand_avx2(const std::uint8_t* packed, float scale, float* values, std::size_t bytes) {
    const __m256 above = _mm256_set1_ps(scale), below = _mm256_set1_ps(-scale);
    const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    for (std::size_t byte = 0; byte < bytes; ++byte) {
        const __m256i bits = _mm256_and_si256(_mm256_set1_epi32(packed[byte]), places);
        const __m256 positive = _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, places));
        _mm256_storeu_ps(values + 8 * byte, _mm256_blendv_ps(below, above, positive));
    }
}

DSJOB_AVX512 void compress_avx512(const float* values, const std::uint8_t* alive, float scale, std::uint8_t* packed,
                                  float* errors, std::size_t bytes) {
    const __m512 above = _mm512_set1_ps(scale), below = _mm512_set1_ps(-scale), zero = _mm512_setzero_ps();
    std::size_t byte = 0;
    for (; byte + 2 <= bytes; byte += 2) {
        const __m512 value = _mm512_loadu_ps(values + 8 * byte);
        const __mmask16 positive = _mm512_cmp_ps_mask(value, zero, _CMP_GE_OQ);
        const __m128i flags = _mm_loadu_si128(reinterpret_cast<const __m128i*>(alive + 8 * byte));
        const __m512 meant = _mm512_mask_blend_ps(positive, below, above);
        _mm512_storeu_ps(errors + 8 * byte, _mm512_maskz_sub_ps(_mm_test_epi8_mask(flags, flags), value, meant));
        const std::uint16_t bits = positive;
        __builtin_memcpy(packed + byte, &bits, sizeof bits);
    }
    compress_avx2(values + 8 * byte, alive + 8 * byte, scale, packed + byte, errors + 8 * byte, bytes - byte);
}

DSJOB_AVX512 void expand_avx512(const std::uint8_t* packed, float scale, float* values, std::size_t bytes) {
    const __m512 above = _mm512_set1_ps(scale), below = _mm512_set1_ps(-scale);
    std::size_t byte = 0;
    for (; byte + 2 <= bytes; byte += 2) {
        std::uint16_t bits;
        __builtin_memcpy(&bits, packed + byte, sizeof bits);
        _mm512_storeu_ps(values + 8 * byte, _mm512_mask_blend_ps(__mmask16(bits), below, above));
    }
    expand_avx2(packed + byte, scale, values + 8 * byte, bytes - byte);
}

#endif

}  // namespace

const SignKernels& choose_sign_kernels() {
    static constexpr SignKernels plain = {"plain", compress_plain, expand_plain};
#if defined(__x86_64__)
    static constexpr SignKernels avx2 = {"avx2", compress_avx2, expand_avx2};
    static constexpr SignKernels avx512 = {"avx512", compress_avx512, expand_avx512};
    const InstructionSet found = find_instruction_set();
    if (found != InstructionSet::plain) return found == InstructionSet::avx512 ? avx512 : avx2;
#endif
    return plain;
}

}  // namespace dsjob
