// Decoding, rounding and encoding of the formats, as eco_dist/numerics does it.
#pragma once
#include "lanes.h"

enum Format { E4M3, E5M2, INT8, INT4, BF16 };

template <Format F> struct Grid;
template <> struct Grid<E4M3> { static constexpr float max = 448; static constexpr int mantissa = 3, min_exponent = -6; };
template <> struct Grid<E5M2> { static constexpr float max = 57344; static constexpr int mantissa = 2, min_exponent = -14; };
template <> struct Grid<INT8> { static constexpr float max = 127; };
template <> struct Grid<INT4> { static constexpr float max = 7; };
template <> struct Grid<BF16> { static constexpr float max = 0x1.fep127f; };

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
    if constexpr (F == BF16) return from_bf16(load<vh>(codes));
    else if constexpr (F == INT8 || F == INT4) return to_float(widen(load<vsb>(codes)));
    else return minifloat_value<F>(widen(load<vb>(codes)));
}
// Codes of VL representable values; `sign` has the sign a zero is to have.
template <Format F> INLINE void put_codes(void* codes, vf value, vf sign) {
    if constexpr (F == BF16) store(codes, low_halves((vu)value >> 16));
    else if constexpr (F == INT8 || F == INT4) store(codes, low_bytes(to_int(value)));
    else store(codes, low_bytes(minifloat_code<F>(value, sign)));
}

// Rounds y, in units of the scale. `top` holds 16 random bits in the upper half of each lane. `t` is y plus noise.
template <Format F, bool STOCHASTIC> INLINE vf round_to_grid(vf y, vi top, vf& t) {
    using G = Grid<F>;
    if constexpr (F == BF16) {
        vu b = (vu)y;
        b = STOCHASTIC ? b + ((vu)(top >> 16) + 32768) : b + 0x7fff + ((b >> 16) & 1);
        t = (vf)(b & 0xffff0000u);
        return clamp(t, G::max);
    } else {
        y = clamp(y, G::max);
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
        return clamp((t + big) - big, G::max);
    }
}

// Distance between neighbours on the grid at each representable value.
template <Format F> INLINE vf grid_step(vf value) {
    using G = Grid<F>;
    if constexpr (F == INT8 || F == INT4) return splat(1.0f);
    else if constexpr (F == BF16) return floats(larger(bits(value) & 0x7f800000, splat(int32_t(1 << 23)))) * 0x1p-7f;
    else return floats(larger(bits(value) & 0x7f800000, splat(int32_t((127 + G::min_exponent) << 23))) - (G::mantissa << 23));
}
