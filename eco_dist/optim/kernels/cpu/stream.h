// The common case without a detour: a run of full E4M3 blocks with block scales and injected error.
//
// Updating a block waits for the divider, finishing one (rounding, injection) does not. So a block is finished in the
// same loop that updates the next one, and the two overlap in the processor.
#pragma once
#include "block.h"

// What one block leaves for its finish.
struct Half {
    alignas(64) float updated[BLOCK_SIZE], denominator[BLOCK_SIZE], m[BLOCK_SIZE];
    float scale, inverse;
    Random random;
};

INLINE bool streams(const Shard& s, const Kind& k) {
    return k.format == E4M3 && k.granularity == BLOCK && k.compensation == MOMENTUM && k.rule != SGD &&
           (k.moments == M_FP32 || k.moments == M_BF16) && s.columns % BLOCK_SIZE == 0;
}

template <Moments M> INLINE void put_moment(void* out, int64_t i, vf x) {
    if constexpr (M == M_FP32) store((float*)out + i, x);
    else store((uint16_t*)out + i, to_bf16(x));
}

constexpr int AHEAD = 4 * BLOCK_SIZE, LINE = 16;  // elements; a line of 64 bytes holds 16 fp32 numbers

template <bool STOCHASTIC, Moments M, bool BF16_GRAD, Rule R> struct Stream {
    const Shard s;
    Half halves[2];

    explicit Stream(const Shard& shard) : s(shard) {}

    void run(int64_t begin, int64_t end, int64_t first) {
        for (int64_t block = begin; block < end; block++) {
            Half &now = halves[block & 1], &last = halves[~block & 1];
            int32_t absmax = block == begin ? pass<true, false>(block, now, last) : pass<true, true>(block, now, last);
            now.scale = scale_of(absmax, Grid<E4M3>::max);
            now.inverse = 1.0f / now.scale;
            s.scales[block] = now.scale;
            if (STOCHASTIC) draw(now.random, s.seed, s.tensor & 0x0fffffff, s.step, first + block);
        }
        pass<false, true>(end, halves[end & 1], halves[~end & 1]);
    }

   private:
    // Updates `block` into `now` and finishes the block before it, which is in `last`.
    template <bool UPDATES, bool FINISHES> int32_t pass(int64_t block, Half& now, Half& last) {
        const int64_t next = block * BLOCK_SIZE, done = next - BLOCK_SIZE;
        const float scale = UPDATES ? s.scales[block] : 1;
        vi absmax{};
#pragma GCC unroll 2
        for (int i = 0; i < BLOCK_SIZE; i += VL) {
            if (UPDATES && i % LINE == 0) fetch(next + AHEAD + i);
            if (UPDATES) absmax = larger(absmax, bits(update(now, next, i, scale)) & 0x7fffffff);
            if (FINISHES) finish(last, done, i);
        }
        return largest_lane(absmax);
    }

    // A few blocks ahead of the hardware's own prefetching, which loses track of five streams. Reading beyond the end is
    // no access.
    INLINE_MEMBER void fetch(int64_t at) {
        constexpr int moment_bytes = M == M_FP32 ? 4 : 2, grad_bytes = BF16_GRAD ? 2 : 4;
        __builtin_prefetch((const char*)s.grad + at * grad_bytes);
        __builtin_prefetch((const char*)s.exp_avg + at * moment_bytes, 1);
        __builtin_prefetch((const char*)s.exp_avg_sq + at * moment_bytes, 1);
        __builtin_prefetch((const char*)s.codes + at, 1);
    }

    INLINE_MEMBER vf update(Half& h, int64_t at, int i, float scale) {
        const vf w = value_of<E4M3>((const uint8_t*)s.codes + at + i) * scale;
        const vf g = BF16_GRAD ? from_bf16(load<vh>((const uint16_t*)s.grad + at + i)) : load<vf>((const float*)s.grad + at + i);
        vf m = moment_at<M, false>(s.exp_avg, 1, nullptr, at + i), v = moment_at<M, true>(s.exp_avg_sq, 1, nullptr, at + i), d;
        const vf t = updated_weight<R>(s, w, g, m, v, d);
        put_moment<M>(s.exp_avg_sq, at + i, v);
        if (R == ADAMW) store(h.denominator + i, d);
        store(h.m + i, m);
        store(h.updated + i, t);
        return t;
    }

    INLINE_MEMBER void finish(Half& h, int64_t at, int i) {
        const vf t = load<vf>(h.updated + i);
        vf noisy;
        const vf r = round_to_grid<E4M3, STOCHASTIC>(t * h.inverse, STOCHASTIC ? Random::top(h.random, i) : vi{}, noisy);
        put_codes<E4M3>((uint8_t*)s.codes + at + i, r, noisy);
        put_moment<M>(s.exp_avg, at + i, injected<R>(load<vf>(h.m + i), t - r * h.scale, h.denominator + i, s.gain));
    }
};

template <bool STOCHASTIC, Moments M, bool G> void stream_rule(const Shard& s, const Kind& k, int64_t begin, int64_t end, int64_t first) {
    if (k.rule == ADAMW) Stream<STOCHASTIC, M, G, ADAMW>(s).run(begin, end, first);
    else Stream<STOCHASTIC, M, G, ADAMW_DISPLACEMENT>(s).run(begin, end, first);
}
template <bool STOCHASTIC, Moments M> void stream_grad(const Shard& s, const Kind& k, int64_t begin, int64_t end, int64_t first) {
    k.grad_is_bf16 ? stream_rule<STOCHASTIC, M, true>(s, k, begin, end, first) : stream_rule<STOCHASTIC, M, false>(s, k, begin, end, first);
}
// Steps blocks begin..end of a shard whose first block has the global number `first`.
inline void stream(const Shard& s, const Kind& k, int64_t begin, int64_t end, int64_t first) {
    if (k.moments == M_FP32) k.stochastic ? stream_grad<true, M_FP32>(s, k, begin, end, first) : stream_grad<false, M_FP32>(s, k, begin, end, first);
    else k.stochastic ? stream_grad<true, M_BF16>(s, k, begin, end, first) : stream_grad<false, M_BF16>(s, k, begin, end, first);
}
