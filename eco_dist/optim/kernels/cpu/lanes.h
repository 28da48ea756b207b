// Vectors of VL lanes on GCC/Clang vector extensions: one source for AVX-512, AVX2 and everything else.
//
// The arithmetic must not depend on the width: no fused multiply-add (-ffp-contract=off), IEEE division and square root,
// so every build gives the same bits as the plain torch reference.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ECO_ISA "avx512"
constexpr int VL = 16;
#elif defined(__AVX2__)
#define ECO_ISA "avx2"
constexpr int VL = 8;
#else
#define ECO_ISA "portable"
constexpr int VL = 4;
#endif

#define INLINE static inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef uint32_t vu __attribute__((vector_size(4 * VL)));
typedef uint8_t vb __attribute__((vector_size(VL)));
typedef int8_t vsb __attribute__((vector_size(VL)));
typedef uint16_t vh __attribute__((vector_size(2 * VL)));

template <class V> INLINE V load(const void* p) { V x; memcpy(&x, p, sizeof x); return x; }
template <class V> INLINE void store(void* p, V x) { memcpy(p, &x, sizeof x); }
INLINE vi bits(vf x) { return (vi)x; }
INLINE vf floats(vi x) { return (vf)x; }
INLINE vf to_float(vi x) { return __builtin_convertvector(x, vf); }
INLINE vi to_int(vf x) { return __builtin_convertvector(x, vi); }
INLINE vf splat(float x) { return vf{} + x; }
INLINE vi splat(int32_t x) { return vi{} + x; }
INLINE vf magnitude(vf x) { return floats(bits(x) & 0x7fffffff); }
INLINE vi larger(vi a, vi b) { return a > b ? a : b; }
INLINE vi absolute(vi x) {
#if defined(__AVX512F__)
    return (vi)_mm512_abs_epi32((__m512i)x);
#elif defined(__AVX2__)
    return (vi)_mm256_abs_epi32((__m256i)x);
#else
    return (x ^ (x >> 31)) - (x >> 31);
#endif
}
// max(x, limit) - limit where the lower halves of all lanes and of the limit are zero and nothing is negative.
INLINE vi less_upper(vi x, int32_t limit) {
#if defined(__AVX512F__)
    return (vi)_mm512_subs_epu16((__m512i)x, _mm512_set1_epi32(limit));
#elif defined(__AVX2__)
    return (vi)_mm256_subs_epu16((__m256i)x, _mm256_set1_epi32(limit));
#elif defined(__SSE2__)
    return (vi)_mm_subs_epu16((__m128i)x, _mm_set1_epi32(limit));
#else
    return larger(x, splat(limit)) - limit;
#endif
}
// The upper halves, with 0x8000 below.
INLINE vi middle_of_upper(vi x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return (vi)_mm256_blend_epi16((__m256i)x, _mm256_set1_epi32(0x8000), 0x55);
#else
    return (x & (int32_t)0xffff0000) | 0x8000;
#endif
}
INLINE vf clamp(vf x, float limit) {
#if defined(__AVX512F__)
    return (vf)_mm512_max_ps(_mm512_min_ps((__m512)x, _mm512_set1_ps(limit)), _mm512_set1_ps(-limit));
#elif defined(__AVX2__)
    return (vf)_mm256_max_ps(_mm256_min_ps((__m256)x, _mm256_set1_ps(limit)), _mm256_set1_ps(-limit));
#elif defined(__SSE2__)
    return (vf)_mm_max_ps(_mm_min_ps((__m128)x, _mm_set1_ps(limit)), _mm_set1_ps(-limit));
#else
    x = x > limit ? splat(limit) : x;
    return x < -limit ? splat(-limit) : x;
#endif
}
INLINE vf root(vf x) {
#if defined(__AVX512F__)
    return (vf)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
    return (vf)_mm256_sqrt_ps((__m256)x);
#elif defined(__SSE2__)
    return (vf)_mm_sqrt_ps((__m128)x);
#else
    for (int i = 0; i < VL; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}
INLINE int32_t largest_lane(vi x) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1)));
#else
    int32_t m = x[0];
    for (int i = 1; i < VL; i++) m = x[i] > m ? x[i] : m;
    return m;
#endif
}

// Bytes and halves <-> 32-bit lanes. Compilers take __builtin_convertvector apart lane by lane here.
INLINE vi widen(vb x) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu8_epi32((__m128i)x);
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)x));
#elif defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128();
    return (vi)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128((int32_t)x), zero), zero);
#else
    return __builtin_convertvector(x, vi);
#endif
}
INLINE vi widen(vsb x) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepi8_epi32((__m128i)x);
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((int64_t)x));
#elif defined(__SSE2__)
    const __m128i zero = _mm_setzero_si128();
    return (vi)_mm_unpacklo_epi16(zero, _mm_unpacklo_epi8(zero, _mm_cvtsi32_si128((int32_t)x))) >> 24;
#else
    return __builtin_convertvector(x, vi);
#endif
}
INLINE vi widen(vh x) {
#if defined(__AVX512F__)
    return (vi)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
    return (vi)_mm256_cvtepu16_epi32((__m128i)x);
#elif defined(__SSE2__)
    return (vi)_mm_unpacklo_epi16(_mm_cvtsi64_si128((int64_t)x), _mm_setzero_si128());
#else
    return __builtin_convertvector(x, vi);
#endif
}
// The low byte of each lane.
INLINE vb low_bytes(vi x) {
#if defined(__AVX512F__)
    return (vb)_mm512_cvtepi32_epi8((__m512i)x);
#elif defined(__AVX2__)
    const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                          0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i b = _mm256_shuffle_epi8((__m256i)x, pick);
    return (vb)_mm_cvtsi128_si64(_mm_unpacklo_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1)));
#elif defined(__SSE2__)
    const __m128i halves = _mm_packs_epi32((__m128i)(x & 0xff), _mm_setzero_si128());
    return (vb)_mm_cvtsi128_si32(_mm_packus_epi16(halves, halves));
#else
    return __builtin_convertvector(x, vb);
#endif
}
// Four vectors of codes in 0..127, one after the other as bytes with the signs as highest bits. Packing saturates, which
// keeps a sign.
INLINE void store_bytes(uint8_t* out, const vi* codes, const vf* signs) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    auto packed = [](const auto* x) INLINE_LAMBDA {
        return _mm256_packs_epi16(_mm256_packs_epi32((__m256i)x[0], (__m256i)x[1]), _mm256_packs_epi32((__m256i)x[2], (__m256i)x[3]));
    };
    const __m256i bytes = _mm256_or_si256(packed(codes), _mm256_and_si256(packed(signs), _mm256_set1_epi8((char)0x80)));
    store(out, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#elif defined(__SSE2__) && !defined(__AVX512F__)
    auto packed = [](const auto* x) INLINE_LAMBDA {
        return _mm_packs_epi16(_mm_packs_epi32((__m128i)x[0], (__m128i)x[1]), _mm_packs_epi32((__m128i)x[2], (__m128i)x[3]));
    };
    store(out, _mm_or_si128(packed(codes), _mm_and_si128(packed(signs), _mm_set1_epi8((char)0x80))));
#else
    for (int i = 0; i < 4; i++) store(out + i * VL, low_bytes(codes[i] | ((bits(signs[i]) >> 24) & 0x80)));
#endif
}
// Unsigned lanes below 2^16.
INLINE vh low_halves(vu x) {
#if defined(__AVX512F__)
    return (vh)_mm512_cvtepi32_epi16((__m512i)x);
#elif defined(__AVX2__)
    return (vh)_mm_packus_epi32(_mm256_castsi256_si128((__m256i)x), _mm256_extracti128_si256((__m256i)x, 1));
#elif defined(__SSE2__)
    const __m128i words = (__m128i)((vi)(x << 16) >> 16);
    return (vh)_mm_cvtsi128_si64(_mm_packs_epi32(words, words));
#else
    return __builtin_convertvector(x, vh);
#endif
}

// bf16 <-> fp32: the upper half of the bit pattern; to nearest, ties to even.
INLINE vf from_bf16(vh x) { return floats(widen(x) << 16); }
INLINE vh to_bf16(vf x) {
    vu b = (vu)x;
    return low_halves((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}

// Counters of Philox, 32 bits in each 64-bit lane; the upper halves may hold anything.
typedef uint64_t vl __attribute__((vector_size(4 * VL)));
INLINE vl times(vl a, uint32_t m) {
#if defined(__AVX512F__)
    return (vl)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(m));
#elif defined(__AVX2__)
    return (vl)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(m));
#elif defined(__SSE2__)
    return (vl)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(m));
#else
    return (a & 0xffffffffu) * (uint64_t)m;
#endif
}
