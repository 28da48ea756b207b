// Decoding, rounding and encoding of the formats, as eco_dist/numerics does it.
#pragma once
#include "lanes.h"

// FP32 is no format of codes: high-precision parameters take the same step with nothing to round.
enum Format { E4M3, E5M2, INT8, INT4, BF16, FP32 };

template <Format F> struct Grid;
template <> struct Grid<E4M3> { static constexpr float max = 448; static constexpr int mantissa = 3, min_exponent = -6; };
template <> struct Grid<E5M2> { static constexpr float max = 57344; static constexpr int mantissa = 2, min_exponent = -14; };
template <> struct Grid<INT8> { static constexpr float max = 127; };
template <> struct Grid<INT4> { static constexpr float max = 7; };
template <> struct Grid<BF16> { static constexpr float max = 0x1.fep127f; };
template <> struct Grid<FP32> { static constexpr float max = 0x1.fffffep127f; };

constexpr bool is_scaled(Format f) { return f != BF16 && f != FP32; }
constexpr int code_bits(Format f) { return f == INT4 ? 4 : f == BF16 ? 16 : f == FP32 ? 32 : 8; }

#if defined(__AVX2__)
// E4M3 is fp16 without its lowest seven mantissa bits, times 2^8: hardware converts, subnormals included.
INLINE vf e4m3_as_fp16(const void* codes) {
#if defined(__AVX512F__)
    __m256i half = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes)), 7);
    return (vf)_mm512_cvtph_ps(_mm256_and_si256(half, _mm256_set1_epi16((short)0xBFFF)));
#else
    __m128i half = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)codes)), 7);
    return (vf)_mm256_cvtph_ps(_mm_and_si128(half, _mm_set1_epi16((short)0xBFFF)));
#endif
}
INLINE vb e4m3_code(vf value, vf sign) {
    const vf scaled = floats(bits(value * 0x1p-8f) | (bits(sign) & (int32_t)0x80000000));
#if defined(__AVX512F__)
    __m256i half = _mm512_cvtps_ph((__m512)scaled, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256i code = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(half, 7), _mm256_set1_epi16(0x7f)),
                                   _mm256_and_si256(_mm256_srli_epi16(half, 8), _mm256_set1_epi16(0x80)));
    return (vb)_mm256_cvtepi16_epi8(code);
#else
    __m128i half = _mm256_cvtps_ph((__m256)scaled, _MM_FROUND_TO_NEAREST_INT);
    __m128i code = _mm_or_si128(_mm_and_si128(_mm_srli_epi16(half, 7), _mm_set1_epi16(0x7f)),
                                _mm_and_si128(_mm_srli_epi16(half, 8), _mm_set1_epi16(0x80)));
    return (vb)_mm_cvtsi128_si64(_mm_packus_epi16(code, code));
#endif
}
#endif

// An eight-bit float without infinities in use: value of a code, code of a representable value.
template <Format F> INLINE vf minifloat_value(vi code) {
    using G = Grid<F>;
    vi m = code & 0x7f;
    vf normal = floats((m << (23 - G::mantissa)) + ((126 + G::min_exponent) << 23));
    vf subnormal = to_float(m) * __builtin_ldexpf(1, G::min_exponent - G::mantissa);
    vf value = m >= (1 << G::mantissa) ? normal : subnormal;
    return floats(bits(value) | ((code & 0x80) << 24));
}
template <Format F> INLINE vi minifloat_code(vf value, vf sign) {
    using G = Grid<F>;
    vf a = magnitude(value);
    vi normal = (bits(a) >> (23 - G::mantissa)) - ((126 + G::min_exponent) << G::mantissa);
    vi subnormal = to_int(a * __builtin_ldexpf(1, G::mantissa - G::min_exponent));
    vi code = a < __builtin_ldexpf(1, G::min_exponent) ? subnormal : normal;
    return code | ((bits(sign) >> 24) & 0x80);
}

// Representable values of VL codes. INT4 is unpacked by the caller.
template <Format F> INLINE vf value_of(const void* codes) {
    if constexpr (F == FP32) return load<vf>(codes);
    else if constexpr (F == BF16) return from_bf16(load<vh>(codes));
    else if constexpr (F == INT8 || F == INT4) return to_float(widen(load<vsb>(codes)));
#if defined(__AVX2__)
    else if constexpr (F == E4M3) return e4m3_as_fp16(codes) * 256.0f;
#endif
    else return minifloat_value<F>(widen(load<vb>(codes)));
}
// Values of VL codes of E4M3 times a scale, rounded once: 256 * scale is exact.
INLINE vf scaled_e4m3(const void* codes, float scale) {
#if defined(__AVX2__)
    return e4m3_as_fp16(codes) * (scale * 256.0f);
#else
    return value_of<E4M3>(codes) * scale;
#endif
}
// Codes of VL representable values; `sign` has the sign a zero is to have.
template <Format F> INLINE void put_codes(void* codes, vf value, vf sign) {
    if constexpr (F == FP32) store(codes, value);
    else if constexpr (F == BF16) store(codes, low_halves((vu)value >> 16));
    else if constexpr (F == INT8 || F == INT4) store(codes, low_bytes(to_int(value)));
#if defined(__AVX2__)
    else if constexpr (F == E4M3) store(codes, e4m3_code(value, sign));
#endif
    else store(codes, low_bytes(minifloat_code<F>(value, sign)));
}

// Rounds y, in units of the scale. `top` holds 16 random bits in the upper half of each lane. `t` is y plus noise.
template <Format F, bool STOCHASTIC> INLINE vf round_to_grid(vf y, vi top, vf& t) {
    using G = Grid<F>;
    if constexpr (F == FP32) {
        t = y;
        return y;
    } else if constexpr (F == BF16) {
        vu b = (vu)y;
        b = STOCHASTIC ? b + ((vu)(top >> 16) + 32768) : b + 0x7fff + ((b >> 16) & 1);
        t = (vf)(b & 0xffff0000u);
        return clamp(t, G::max);
    } else {
        // No clamp: y comes from a scale that maps the largest magnitude onto the largest code, within a few ulps, and
        // the noise stays below half a grid step, so nothing rounds beyond it.
        vi exponent;
        if constexpr (F == INT8 || F == INT4) exponent = splat(int32_t(127 << 23));
        else exponent = larger(bits(y) & 0x7f800000, splat(int32_t((127 + G::min_exponent) << 23)));
        constexpr int mantissa = []() { if constexpr (F == INT8 || F == INT4) return 0; else return G::mantissa; }();
        t = y;
        if constexpr (STOCHASTIC) {
            vf unit = floats(exponent - ((mantissa + 17) << 23));
            t = y + to_float((top >> 15) | 1) * unit;
        }
        // Adding 1.5 * 2^(E + 23 - mantissa) leaves no bits below the grid step: rounds to nearest, ties to even.
        vf big = floats(exponent + ((23 - mantissa) << 23) + 0x400000);
        return (t + big) - big;
    }
}

// `round_to_grid` for E4M3 whose value `r` and the code of its magnitude come out together; `t` has the sign. Adding
// 1.5 * 2^(E + 20) leaves the number of grid steps in the lowest bits; a code is that number, plus eight for each binade.
template <bool STOCHASTIC> INLINE vi e4m3_nearest(vf y, vi top, vf& r, vf& t) {
    const vi binade = less_upper(bits(y) & 0x7f800000, 121 << 23);  // above the lowest, as an exponent
    t = y;
    // Noise is never zero, so that adding to its exponent scales it.
    if constexpr (STOCHASTIC) t = y + floats(bits(to_float(middle_of_upper(top))) + (binade - ((6 + 20 + 15) << 23)));
    const vi big = binade + (((121 + 20) << 23) + 0x400000);
    const vf sum = t + floats(big);
    r = sum - floats(big);
    return absolute(bits(sum) - big) + (binade >> 20);
}

// Distance between neighbours on the grid at each representable value.
template <Format F> INLINE vf grid_step(vf value) {
    using G = Grid<F>;
    if constexpr (F == INT8 || F == INT4) return splat(1.0f);
    else if constexpr (F == FP32) return splat(0.0f);
    else if constexpr (F == BF16) return floats(larger(bits(value) & 0x7f800000, splat(int32_t(1 << 23)))) * 0x1p-7f;
    else return floats(larger(bits(value) & 0x7f800000, splat(int32_t((127 + G::min_exponent) << 23))) - (G::mantissa << 23));
}
