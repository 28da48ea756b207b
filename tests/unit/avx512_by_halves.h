// The AVX-512 intrinsics that the kernel uses, each done by AVX2 on both halves, so that its AVX-512 build runs where no
// processor has them. Read before everything else (-include); the compiler builds for AVX2.
#pragma once
#include <immintrin.h>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1

namespace halves {

#define EMULATED static inline __attribute__((always_inline))
template <class Half, class Whole> EMULATED Half low(const Whole& x) { Half h; memcpy(&h, &x, sizeof h); return h; }
template <class Half, class Whole> EMULATED Half high(const Whole& x) { Half h; memcpy(&h, (const char*)&x + sizeof h, sizeof h); return h; }
template <class Whole, class Half> EMULATED Whole join(const Half& a, const Half& b) {
    Whole x;
    memcpy(&x, &a, sizeof a);
    memcpy((char*)&x + sizeof a, &b, sizeof b);
    return x;
}

EMULATED __m512i set1_epi32(int x) { return join<__m512i>(_mm256_set1_epi32(x), _mm256_set1_epi32(x)); }
EMULATED __m512i set1_epi64(long long x) { return join<__m512i>(_mm256_set1_epi64x(x), _mm256_set1_epi64x(x)); }
EMULATED __m512 set1_ps(float x) { return join<__m512>(_mm256_set1_ps(x), _mm256_set1_ps(x)); }

#define UNARY(name, type, half) \
    EMULATED type name(const type& a) { return join<type>(_mm256_##name(low<half>(a)), _mm256_##name(high<half>(a))); }
#define BINARY(name, type, half) \
    EMULATED type name(const type& a, const type& b) { \
        return join<type>(_mm256_##name(low<half>(a), low<half>(b)), _mm256_##name(high<half>(a), high<half>(b))); \
    }
UNARY(abs_epi32, __m512i, __m256i)
UNARY(sqrt_ps, __m512, __m256)
BINARY(subs_epu16, __m512i, __m256i)
BINARY(mul_epu32, __m512i, __m256i)
BINARY(max_ps, __m512, __m256)
BINARY(min_ps, __m512, __m256)

EMULATED __m512 cvtph_ps(__m256i a) { return join<__m512>(_mm256_cvtph_ps(low<__m128i>(a)), _mm256_cvtph_ps(high<__m128i>(a))); }
#define cvtps_ph_by_halves(a, rounding) \
    halves::join<__m256i>(_mm256_cvtps_ph(halves::low<__m256>(a), (rounding) & 3), _mm256_cvtps_ph(halves::high<__m256>(a), (rounding) & 3))

#define WIDEN(name, from, shift) \
    EMULATED __m512i name(from a) { return join<__m512i>(_mm256_##name(low<__m128i>(a)), _mm256_##name(shift)); }
WIDEN(cvtepu8_epi32, __m128i, _mm_srli_si128(a, 8))
WIDEN(cvtepi8_epi32, __m128i, _mm_srli_si128(a, 8))
WIDEN(cvtepu16_epi32, __m256i, high<__m128i>(a))

template <class Narrow, class Lane> EMULATED Narrow truncated(const __m512i& a) {
    int wide[16];
    Lane narrow[16];
    memcpy(wide, &a, sizeof wide);
    for (int i = 0; i < 16; i++) narrow[i] = (Lane)wide[i];
    Narrow x;
    memcpy(&x, narrow, sizeof x);
    return x;
}
EMULATED __m128i cvtepi32_epi8(const __m512i& a) { return truncated<__m128i, char>(a); }
EMULATED __m256i cvtepi32_epi16(const __m512i& a) { return truncated<__m256i, short>(a); }

// VL and BW instructions on 256 bits.
EMULATED __m128i cvtepi16_epi8(const __m256i& a) {
    short wide[16];
    char narrow[16];
    memcpy(wide, &a, sizeof wide);
    for (int i = 0; i < 16; i++) narrow[i] = (char)wide[i];
    return low<__m128i>(narrow);
}

}  // namespace halves

#define _mm512_set1_epi32 halves::set1_epi32
#define _mm512_set1_epi64 halves::set1_epi64
#define _mm512_set1_ps halves::set1_ps
#define _mm512_abs_epi32 halves::abs_epi32
#define _mm512_sqrt_ps halves::sqrt_ps
#define _mm512_subs_epu16 halves::subs_epu16
#define _mm512_mul_epu32 halves::mul_epu32
#define _mm512_max_ps halves::max_ps
#define _mm512_min_ps halves::min_ps
#define _mm512_cvtph_ps halves::cvtph_ps
#undef _mm512_cvtps_ph
#define _mm512_cvtps_ph cvtps_ph_by_halves
#define _mm512_cvtepu8_epi32 halves::cvtepu8_epi32
#define _mm512_cvtepi8_epi32 halves::cvtepi8_epi32
#define _mm512_cvtepu16_epi32 halves::cvtepu16_epi32
#define _mm512_cvtepi32_epi8 halves::cvtepi32_epi8
#define _mm512_cvtepi32_epi16 halves::cvtepi32_epi16
#define _mm256_cvtepi16_epi8 halves::cvtepi16_epi8
