// One block of up to 128 elements: update, round, compensate, store. Everything between lives in L1.
#pragma once
#include <algorithm>
#include <cfloat>
#include "formats.h"
#include "philox.h"
#include "shard.h"

constexpr int BLOCK_SIZE = 128;
constexpr uint32_t FIRST_MOMENT = 1u << 28, SECOND_MOMENT = 2u << 28, RESIDUE = 3u << 28;  // purposes of random bits
constexpr float NOISE_UNIT = 0x1p-17f, SMALLEST_SCALE = 0x1p-126f, RESIDUAL_STEPS = 127;

// fp32 values of the block under way.
struct Scratch {
    alignas(64) float weight[BLOCK_SIZE], updated[BLOCK_SIZE], denominator[BLOCK_SIZE], error[BLOCK_SIZE];
    alignas(64) float m[BLOCK_SIZE], v[BLOCK_SIZE], before[BLOCK_SIZE];
    float* new_v;  // where `update` leaves the second moment (8-bit: its root): v, or memory if nothing is left to do to it
    Random random;
};

// Where the block's data lies; a short block is staged here, padded with zeros.
struct Block {
    void *codes, *exp_avg, *exp_avg_sq, *extra;
    const void* grad;
    float *scale, *exp_avg_scale, *exp_avg_sq_scale;
    int length;
    int64_t number;  // global, for random bits
};

// Whether a block's gradient is zero throughout.
INLINE bool is_idle(const Block& b, bool bf16) {
    uint32_t any = 0;
    if (bf16) for (int i = 0; i < b.length; i++) any |= ((const uint16_t*)b.grad)[i] & 0x7fffu;
    else for (int i = 0; i < b.length; i++) any |= ((const uint32_t*)b.grad)[i] & 0x7fffffffu;
    return !any;
}

INLINE float scale_of(int32_t absmax_bits, float max) {
    float absmax;
    memcpy(&absmax, &absmax_bits, 4);
    if (absmax == 0) return 1;
    const float largest = (float)(FLT_MAX * (1 - 0x1p-23) / (double)max);
    return std::min(std::max(absmax / max, SMALLEST_SCALE), largest);
}

INLINE void unpack_int4(const uint8_t* packed, int8_t* out, int n = BLOCK_SIZE) {
    for (int i = 0; i < n; i += 2) {
        int8_t pair = (int8_t)packed[i / 2];
        out[i] = (int8_t)((uint8_t)pair << 4) >> 4;
        out[i + 1] = pair >> 4;
    }
}

INLINE void pack_int4(const int8_t* codes, void* out) {
    for (int i = 0; i < BLOCK_SIZE; i += 2) ((uint8_t*)out)[i / 2] = (uint8_t)((codes[i] & 0xF) | (codes[i + 1] << 4));
}

template <Format F> INLINE void read_codes(const void* codes, float* out) {
    alignas(64) int8_t nibbles[BLOCK_SIZE];
    if constexpr (F == INT4) {
        unpack_int4((const uint8_t*)codes, nibbles);
        codes = nibbles;
    }
    constexpr int bytes = F == INT4 ? 1 : code_bits(F) / 8;
    for (int i = 0; i < BLOCK_SIZE; i += VL) store(out + i, value_of<F>((const char*)codes + i * bytes));
}

INLINE void read_eight_bit(const void* codes, float scale, const float* table, bool second, float* out) {
    for (int i = 0; i < BLOCK_SIZE; i++) out[i] = table[((const uint8_t*)codes)[i]] * scale;
    if (second) for (int i = 0; i < BLOCK_SIZE; i++) out[i] = out[i] * out[i];
}

template <Moments M, bool SECOND> INLINE vf moment_at(const void* stored, float scale, const float* unpacked, int64_t i) {
    if constexpr (M == M_FP32) return load<vf>((const float*)stored + i);
    else if constexpr (M == M_BF16) return from_bf16(load<vh>((const uint16_t*)stored + i));
    else if constexpr (M == M_FP8) {
        vf x = scaled_e4m3((const uint8_t*)stored + i, scale);
        return SECOND ? x * x : x;
    } else return load<vf>(unpacked + i);
}

// Asks for a line of gradients and moments a few blocks ahead of the hardware's own prefetching, which loses track of five
// streams. Reading beyond the end is no access.
constexpr int AHEAD = 4 * BLOCK_SIZE, LINE = 16;  // elements; a line of 64 bytes holds 16 fp32 numbers
template <Moments M, bool BF16_GRAD> INLINE void fetch_line(const Block& b, int at) {
    constexpr int moment_bytes = M == M_FP32 ? 4 : M == M_BF16 ? 2 : 1, grad_bytes = BF16_GRAD ? 2 : 4;
    __builtin_prefetch((const char*)b.grad + at * grad_bytes);
    __builtin_prefetch((const char*)b.exp_avg + at * moment_bytes, 1);
    __builtin_prefetch((const char*)b.exp_avg_sq + at * moment_bytes, 1);
}

template <bool BF16> INLINE vf grad_at(const Shard& s, const void* grad, int i) {
    return (BF16 ? from_bf16(load<vh>((const uint16_t*)grad + i)) : load<vf>((const float*)grad + i)) * s.grad_scale;
}

// The rule, see eco_dist/optim/rules.py; the only copy of it on this side. AdamW's second moment in place; returns its
// root.
INLINE vf second_moment(const Shard& s, vf g, vf& v) {
    v = v * s.beta2 + (g * g) * s.factor2;
    return root(v);
}
// The first moment in place and the denominator, given the root; returns the updated weight.
template <Rule R> INLINE vf updated_weight(const Shard& s, vf w, vf g, vf r, vf& m, vf& d) {
    if constexpr (R == SGD) {
        m = m * s.beta1 + g * s.factor1;
        return w * s.decay - m * s.step_size;
    } else {
        d = r * s.root2 + s.eps;
        if constexpr (R == ADAMW_DISPLACEMENT) {
            m = m * s.beta1 + (g / d) * s.factor1;
            return w * s.decay - m;
        } else {
            m = m * s.beta1 + g * s.factor1;
            return w * s.decay - (m / d) * s.step_size;
        }
    }
}
template <Rule R> INLINE vf injected(vf m, vf e, vf d, float gain) {
    if (R == ADAMW) e = e * d;
    return m + e * gain;
}

INLINE void copy(void* to, const float* from) {
    for (int i = 0; i < BLOCK_SIZE; i += VL) store((float*)to + i, load<vf>(from + i));
}

// Updated weight, moments and denominators into scratch; returns the bit pattern of the largest magnitude.
template <bool INLINE_E4M3, Moments M, bool BF16_GRAD, Rule R>
static int32_t update(const Shard& shard, const Kind& kind, const Block& block, Scratch& x) {
    const Shard s = shard;  // copies, which no store below can change
    const Block b = block;
    float* const new_v = x.new_v;
    const float scale = b.scale ? *b.scale : 1.0f;
    const float m_scale = b.exp_avg_scale ? *b.exp_avg_scale : 1.0f;
    const float v_scale = b.exp_avg_sq_scale ? *b.exp_avg_sq_scale : 1.0f;
    if constexpr (M == M_DYNAMIC8) {
        read_eight_bit(b.exp_avg, m_scale, kind.dynamic_values[0], false, x.m);
        if (R != SGD) read_eight_bit(b.exp_avg_sq, v_scale, kind.dynamic_values[1], true, x.v);
    }
    vi absmax{};
    for (int i = 0; i < BLOCK_SIZE; i += VL) {
        vf w = INLINE_E4M3 ? scaled_e4m3((const uint8_t*)b.codes + i, scale) : load<vf>(x.weight + i);
        const vf g = grad_at<BF16_GRAD>(s, b.grad, i);
        vf m = moment_at<M, false>(b.exp_avg, m_scale, x.m, i), v{}, r{}, d{};
        if constexpr (R != SGD) {
            v = moment_at<M, true>(b.exp_avg_sq, v_scale, x.v, i);
            r = second_moment(s, g, v);
        }
        const vf t = updated_weight<R>(s, w, g, r, m, d);
        if constexpr (R != SGD) {
            store(new_v + i, M == M_FP8 || M == M_DYNAMIC8 ? r : v);
            store(x.denominator + i, d);
        }
        store(x.m + i, m);
        store(x.updated + i, t);
        absmax = larger(absmax, bits(t) & 0x7fffffff);
    }
    return largest_lane(absmax);
}

// Codes of the updated weight, and its error, with the scale given.
template <Format F, bool STOCHASTIC> static void encode(const Block& b, float scale, Scratch& x) {
    const float inverse = 1.0f / scale;
    alignas(64) int8_t nibbles[BLOCK_SIZE];
    constexpr int bytes = F == INT4 ? 1 : code_bits(F) / 8;
    char* out = F == INT4 ? (char*)nibbles : (char*)b.codes;
#pragma GCC unroll 16
    for (int i = 0; i < BLOCK_SIZE; i += VL) {
        vf t = load<vf>(x.updated + i), noisy;
        vi top = STOCHASTIC ? Random::top(x.random, i) : vi{};
        vf r = round_to_grid<F, STOCHASTIC>(is_scaled(F) ? t * inverse : t, top, noisy);
        put_codes<F>(out + i * bytes, r, noisy);
        store(x.error + i, t - (is_scaled(F) ? r * scale : r));
    }
    if constexpr (F == INT4) pack_int4(nibbles, b.codes);
}

// One count of an 8-bit residual, in weight units, beside a representable value; all of those in the block; counts.
template <Format F> INLINE vf residual_unit(vf value, float scale) {
    const vf step = grid_step<F>(value);
    return (is_scaled(F) ? step * scale : step) * (1.0f / RESIDUAL_STEPS);
}
template <Format F> INLINE void residual_units(const Block& b, float scale, float* units) {
    read_codes<F>(b.codes, units);
    for (int i = 0; i < BLOCK_SIZE; i += VL) store(units + i, residual_unit<F>(load<vf>(units + i), scale));
}
INLINE vf residual_at(const void* counts, int i) { return to_float(widen(load<vsb>((const int8_t*)counts + i))); }
INLINE void put_residual(void* counts, int i, vf error, vf unit, vi top) {
    const vf noise = to_float((top >> 15) | 1) * NOISE_UNIT;
    const vf r = (clamp(error / unit + noise, 1024) + 0x1.8p23f) - 0x1.8p23f;
    store((int8_t*)counts + i, low_bytes(to_int(clamp(r, RESIDUAL_STEPS))));
}

template <Format F> static void load_residual(const Kind& kind, const Block& b, float scale, Scratch& x) {
    alignas(64) float units[BLOCK_SIZE];
    if (!kind.residual_is_fp32) residual_units<F>(b, scale, units);
    for (int i = 0; i < BLOCK_SIZE; i += VL) {
        vf e = kind.residual_is_fp32 ? load<vf>((const float*)b.extra + i) : residual_at(b.extra, i) * load<vf>(units + i);
        store(x.weight + i, load<vf>(x.weight + i) + e);
    }
}

template <Format F> static void store_residual(const Kind& kind, const Shard& s, const Block& b, float scale, Scratch& x) {
    if (kind.residual_is_fp32) {
        copy(b.extra, x.error);
        return;
    }
    alignas(64) float units[BLOCK_SIZE];
    residual_units<F>(b, scale, units);
    draw(x.random, s.seed, RESIDUE | s.tensor, s.step, b.number);
    for (int i = 0; i < BLOCK_SIZE; i += VL)
        put_residual(b.extra, i, load<vf>(x.error + i), load<vf>(units + i), Random::top(x.random, i));
}

// Codes of an eight-bit float moment, 4 * VL of them; a positive second moment, given as its root, never becomes zero.
template <bool SECOND, bool STOCHASTIC> INLINE void fp8_codes(const float* values, int i, float inverse, const Random& random, void* out) {
    vi codes[4];
    vf signs[4], rounded;
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        const int at = i + n * VL;
        const vf v = load<vf>(values + at);
        codes[n] = e4m3_nearest<STOCHASTIC>(v * inverse, STOCHASTIC ? Random::top(random, at) : vi{}, rounded, signs[n]);
        if (SECOND) codes[n] = larger(codes[n], (vi)(v > 0) & 1), signs[n] = vf{};
    }
    store_bytes((uint8_t*)out + i, codes, signs);
}
template <bool SECOND, bool STOCHASTIC> INLINE void put_fp8(const float* values, void* out, float* scale, const Random& random) {
    vi absmax{};
    for (int i = 0; i < BLOCK_SIZE; i += VL) absmax = larger(absmax, bits(load<vf>(values + i)) & 0x7fffffff);
    const float s = *scale = scale_of(largest_lane(absmax), Grid<E4M3>::max), inverse = 1.0f / s;
    for (int i = 0; i < BLOCK_SIZE; i += 4 * VL) fp8_codes<SECOND, STOCHASTIC>(values, i, inverse, random, out);
}

// Code of the map's value at or below x, and whether noise takes it to the next one.
INLINE long dynamic_code(const float* table, const float* middles, float x, const Random* random, int i) {
    if (!random) return std::lower_bound(middles, middles + 255, x) - middles;
    const long below = std::min(std::max(std::upper_bound(table, table + 256, x) - table - 1, 0l), 254l);
    const float share = (x - table[below]) / (table[below + 1] - table[below]);
    return below + (share > (float)(2 * Random::half(*random, i) + 65537) * NOISE_UNIT);
}
INLINE void put_dynamic(const Kind& kind, bool second, const float* values, void* out, float* scale, const Random* random) {
    const float *table = kind.dynamic_values[second], *middles = kind.dynamic_middles[second];
    int32_t absmax = 0;
    for (int i = 0; i < BLOCK_SIZE; i++) {
        int32_t b;
        memcpy(&b, values + i, 4);
        absmax = std::max(absmax, b & 0x7fffffff);
    }
    float s;
    memcpy(&s, &absmax, 4);
    s = *scale = s == 0 ? 1 : std::max(s, SMALLEST_SCALE);
    const float inverse = 1.0f / s;
    for (int i = 0; i < BLOCK_SIZE; i++) {
        const long code = dynamic_code(table, middles, values[i] * inverse, random, i);
        ((uint8_t*)out)[i] = (uint8_t)(second && values[i] > 0 && code == 0 ? 1 : code);
    }
}

INLINE void put_bf16(const float* values, void* out, const Random* random) {
    for (int i = 0; i < BLOCK_SIZE; i += VL) {
        vf x = load<vf>(values + i), t;
        if (random) x = round_to_grid<BF16, true>(x, Random::top(*random, i), t);
        store((uint16_t*)out + i, to_bf16(x));
    }
}

// A moment in less than fp32: m, or v (8-bit: v's root).
template <bool SECOND> static __attribute__((noinline)) void put_moment(const Shard& s, const Kind& kind, const Block& b, const float* values) {
    void* out = SECOND ? b.exp_avg_sq : b.exp_avg;
    float* scale = SECOND ? b.exp_avg_sq_scale : b.exp_avg_scale;
    Random random;
    if (kind.stochastic_moments) draw(random, s.seed, (SECOND ? SECOND_MOMENT : FIRST_MOMENT) | s.tensor, s.step, b.number);
    const Random* noise = kind.stochastic_moments ? &random : nullptr;
    if (kind.moments == M_BF16) put_bf16(values, out, noise);
    else if (kind.moments == M_DYNAMIC8) put_dynamic(kind, SECOND, values, out, scale, noise);
    else if (noise) put_fp8<SECOND, true>(values, out, scale, random);
    else put_fp8<SECOND, false>(values, out, scale, random);
}

static void store_moments(const Shard& s, const Kind& kind, const Block& b, Scratch& x) {
    const bool second = kind.rule != SGD;
    if (kind.moments == M_FP32) {
        copy(b.exp_avg, x.m);
        if (second && x.new_v == x.v) copy(b.exp_avg_sq, x.v);
        return;
    }
    put_moment<false>(s, kind, b, x.m);
    if (second) put_moment<true>(s, kind, b, x.v);
}

template <Rule R> INLINE void inject(float gain, Scratch& x) {
    for (int i = 0; i < BLOCK_SIZE; i += VL)
        store(x.m + i, injected<R>(load<vf>(x.m + i), load<vf>(x.error + i), load<vf>(x.denominator + i), gain));
}
