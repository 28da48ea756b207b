// Steps whose scale is known before: INT4 with a scale for the tensor, and BF16, which has none. Every vector goes from
// memory to memory at once.
#pragma once
#include "block.h"

// VL codes, two in a byte, the first one below.
INLINE vi int4_codes(const uint8_t* packed) {
#if defined(__AVX2__)
    uint64_t pairs = 0;
    memcpy(&pairs, packed, VL / 2);
    vu word, up;
    for (int i = 0; i < VL; i++) word[i] = (uint32_t)(pairs >> 32 * (i / 8)), up[i] = 28 - 4 * (i % 8);
    return (vi)(word << up) >> 28;
#else
    int8_t codes[VL];
    unpack_int4(packed, codes, VL);
    return widen(load<vsb>(codes));
#endif
}

template <Format F, bool BF16_GRAD, Rule R> struct Direct {
    struct Values { vf updated, m, v, denominator; };

    static INLINE_MEMBER Values update(const Shard& s, const Block& b, int i, float scale) {
        vf w;
        if constexpr (F == INT4) w = to_float(int4_codes((const uint8_t*)b.codes + i / 2)) * scale;
        else w = value_of<F>((const uint16_t*)b.codes + i);
        const vf g = grad_at<BF16_GRAD>(s, b.grad, i);
        Values x{{}, load<vf>((const float*)b.exp_avg + i), load<vf>((const float*)b.exp_avg_sq + i), {}};
        const vf r = second_moment(s, g, x.v);
        x.updated = updated_weight<R>(s, w, g, r, x.m, x.denominator);
        return x;
    }

    static INLINE_MEMBER void fetch(const Block& b, int at) {
        fetch_line<M_FP32, BF16_GRAD>(b, at);
        __builtin_prefetch((const char*)b.codes + at * code_bits(F) / 8, 1);
    }

    // Bit pattern of the largest magnitude of the updated weight; changes nothing.
    static int32_t absmax(const Shard& shard, const Block& block) {
        const Shard s = shard;  // copies, which no store can change
        const Block b = block;
        const float scale = b.scale ? *b.scale : 1;
        vi largest{};
        for (int i = 0; i < BLOCK_SIZE; i += VL) {
            if (i % LINE == 0) fetch(b, AHEAD + i);
            largest = larger(largest, bits(update(s, b, i, scale).updated) & 0x7fffffff);
        }
        return largest_lane(largest);
    }

    template <bool STOCHASTIC> static void step(const Shard& shard, const Block& block, float new_scale) {
        const Shard s = shard;
        const Block b = block;
        const float scale = b.scale ? *b.scale : 1, inverse = 1.0f / new_scale;
        alignas(64) int8_t nibbles[BLOCK_SIZE];
        Random random;
        if (STOCHASTIC) draw(random, s.seed, s.tensor & 0x0fffffff, s.step, b.number);
        for (int i = 0; i < BLOCK_SIZE; i += VL) {
            if (i % LINE == 0) fetch(b, AHEAD + i);
            const Values x = update(s, b, i, scale);
            const vf t = x.updated;
            vf noisy, r = round_to_grid<F, STOCHASTIC>(F == INT4 ? t * inverse : t, STOCHASTIC ? Random::top(random, i) : vi{}, noisy);
            put_codes<F>(F == INT4 ? (void*)(nibbles + i) : (void*)((uint16_t*)b.codes + i), r, noisy);
            const vf error = t - (F == INT4 ? r * new_scale : r);
            store((float*)b.exp_avg + i, injected<R>(x.m, error, x.denominator, s.gain));
            store((float*)b.exp_avg_sq + i, x.v);
        }
        if (F == INT4) pack_int4(nibbles, b.codes);
    }
};

// The functions of a kind of step; null where another way is to be taken. They take whole blocks.
struct DirectSteps {
    int32_t (*absmax)(const Shard&, const Block&) = nullptr;
    void (*step)(const Shard&, const Block&, float) = nullptr;

    template <class D> static DirectSteps of(const Kind& k) {
        return {D::absmax, k.stochastic ? D::template step<true> : D::template step<false>};
    }
    template <Format F, bool G> static DirectSteps by_rule(const Kind& k) {
        return k.rule == ADAMW ? of<Direct<F, G, ADAMW>>(k) : of<Direct<F, G, ADAMW_DISPLACEMENT>>(k);
    }
    template <Format F> static DirectSteps by_gradient(const Kind& k) {
        return k.grad_is_bf16 ? by_rule<F, true>(k) : by_rule<F, false>(k);
    }
    static DirectSteps choose(const Kind& k) {
        if (k.moments != M_FP32 || k.compensation != MOMENTUM || k.rule == SGD) return {};
        if (k.format == BF16) return by_gradient<BF16>(k);
        return k.format == INT4 && k.granularity == TENSOR ? by_gradient<INT4>(k) : DirectSteps{};
    }
};
