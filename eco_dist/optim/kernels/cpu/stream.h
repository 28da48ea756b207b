// The common case without a detour: E4M3 codes with block or row scales and injected error.
//
// Updating a block waits for the divider, finishing one (rounding, injection) does not. So a scale group is finished in
// the same loop that updates the next one, and the two overlap in the processor. A row is updated once, into scratch.
#pragma once
#include <utility>
#include <vector>
#include "layout.h"

constexpr int64_t LONGEST_ROW = 256;  // blocks; two rows in scratch must fit into the second-level cache

INLINE bool streams(const Kind& k, const Layout& l) {
    const bool scales = k.granularity == BLOCK || (k.granularity == ROW && l.blocks <= LONGEST_ROW);
    const bool moments = k.moments == M_FP32 || k.moments == M_FP8 || (k.moments == M_BF16 && !k.stochastic_moments);
    return scales && moments && k.format == E4M3 && k.compensation == MOMENTUM && k.rule != SGD;
}

// What the update of a block leaves for its finish.
struct Slot {
    alignas(64) float updated[BLOCK_SIZE], denominator[BLOCK_SIZE], m[BLOCK_SIZE], root[BLOCK_SIZE];
    Block at;
};

// A scale group under way: a block, or the blocks of a row. The last one of a row may be short and is staged.
struct Unit {
    std::vector<Slot> slots;
    Staged staged;
    bool is_staged;
    float scale, inverse;
};

template <Moments M> INLINE void put(void* out, int i, vf x) {
    if constexpr (M == M_FP32) store((float*)out + i, x);
    else store((uint16_t*)out + i, to_bf16(x));
}

constexpr int AHEAD = 4 * BLOCK_SIZE, LINE = 16;  // elements; a line of 64 bytes holds 16 fp32 numbers

template <bool STOCHASTIC, Moments M, bool BF16_GRAD, Rule R> struct Stream {
    const Shard s;
    const Kind k;
    const Layout l;
    Unit units[2];

    Stream(const Shard& shard, const Kind& kind, const Layout& layout) : s(shard), k(kind), l(layout) {
        for (Unit& unit : units) unit.slots.resize(k.granularity == ROW ? l.blocks : 1);
    }

    // Steps blocks begin..end, counted over rows; a row with one scale is never cut.
    void run(int64_t begin, int64_t end) {
        Unit *now = &units[0], *last = &units[1];
        bool pending = false;
        const int64_t count = (int64_t)now->slots.size();
        for (int64_t row = begin / l.blocks, column = begin % l.blocks, i = begin; i < end; i += count) {
            const bool idle = !place(*now, row, column);
            if ((column += count) == l.blocks) row++, column = 0;
            if (idle) continue;
            int32_t absmax = 0;
            for (int64_t j = 0; j < count; j++) {
                const int32_t here = pending ? pass<true, true>(now->slots[j], *last, j) : pass<true, false>(now->slots[j], *last, j);
                absmax = std::max(absmax, here);
            }
            now->scale = *now->slots[0].at.scale = scale_of(absmax, Grid<E4M3>::max);
            now->inverse = 1.0f / now->scale;
            std::swap(now, last);
            pending = true;
        }
        if (pending) for (int64_t j = 0; j < count; j++) pass<false, true>(now->slots[j], *last, j);
    }

   private:
    // Whether there is anything to do in the scale group that starts there.
    bool place(Unit& unit, int64_t row, int64_t column) {
        bool idle = k.skip_idle;
        for (Slot& slot : unit.slots) {
            slot.at = block_at(s, k, l, row, column++);
            idle = idle && is_idle(slot.at, BF16_GRAD);
        }
        if (idle) return false;
        Block& final = unit.slots.back().at;
        unit.is_staged = final.length < BLOCK_SIZE;
        if (unit.is_staged) final = unit.staged.take(final, l);
        return true;
    }

    // Updates one block and finishes the one in the same place of the scale group before.
    template <bool UPDATES, bool FINISHES> int32_t pass(Slot& now, Unit& unit, int64_t j) {
        Slot& last = unit.slots[j];
        const Block b = now.at, done = last.at;
        const float scale = UPDATES ? *b.scale : 1, m_scale = UPDATES && M == M_FP8 ? *b.exp_avg_scale : 1,
                    v_scale = UPDATES && M == M_FP8 ? *b.exp_avg_sq_scale : 1;
        Random random;
        if (FINISHES && STOCHASTIC) draw(random, s.seed, s.tensor & 0x0fffffff, s.step, done.number);
        const float new_scale = unit.scale, inverse = unit.inverse;
        vi absmax{}, codes[4];
        for (int i = 0; i < BLOCK_SIZE; i += 4 * VL) {
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) {
                const int at = i + n * VL;
                if (UPDATES && at % LINE == 0) fetch(b, AHEAD + at);
                if (UPDATES) absmax = larger(absmax, bits(update(now, b, at, scale, m_scale, v_scale)) & 0x7fffffff);
                if (FINISHES) codes[n] = finish(last, done, at, new_scale, inverse, random);
            }
            if (FINISHES) store_bytes((uint8_t*)done.codes + i, codes[0], codes[1], codes[2], codes[3]);
        }
        if (FINISHES && M == M_FP8) {
            put_moment<false>(s, k, done, last.m);
            put_moment<true>(s, k, done, last.root);
        }
        if (FINISHES && done.length < BLOCK_SIZE) unit.staged.put_back();
        return largest_lane(absmax);
    }

    // A few blocks ahead of the hardware's own prefetching, which loses track of five streams. Reading beyond the end is
    // no access.
    INLINE_MEMBER void fetch(const Block& b, int at) {
        constexpr int moment_bytes = M == M_FP32 ? 4 : M == M_BF16 ? 2 : 1, grad_bytes = BF16_GRAD ? 2 : 4;
        __builtin_prefetch((const char*)b.grad + at * grad_bytes);
        __builtin_prefetch((const char*)b.exp_avg + at * moment_bytes, 1);
        __builtin_prefetch((const char*)b.exp_avg_sq + at * moment_bytes, 1);
        __builtin_prefetch((const char*)b.codes + at, 1);
    }

    INLINE_MEMBER vf update(Slot& slot, const Block& b, int i, float scale, float m_scale, float v_scale) {
        const vf w = scaled_e4m3((const uint8_t*)b.codes + i, scale);
        const vf g = BF16_GRAD ? from_bf16(load<vh>((const uint16_t*)b.grad + i)) : load<vf>((const float*)b.grad + i);
        vf m = moment_at<M, false>(b.exp_avg, m_scale, nullptr, i), v = moment_at<M, true>(b.exp_avg_sq, v_scale, nullptr, i), r, d;
        const vf t = updated_weight<R>(s, w, g, m, v, r, d);
        if constexpr (M == M_FP8) store(slot.root + i, r);
        else put<M>(b.exp_avg_sq, i, v);
        if (R == ADAMW) store(slot.denominator + i, d);
        store(slot.m + i, m);
        store(slot.updated + i, t);
        return t;
    }

    // Stores the momentum with the injected error; returns the codes.
    INLINE_MEMBER vi finish(Slot& slot, const Block& b, int i, float scale, float inverse, const Random& random) {
        const vf t = load<vf>(slot.updated + i);
        vf r;
        const vi code = e4m3_nearest<STOCHASTIC, true>(t * inverse, STOCHASTIC ? Random::top(random, i) : vi{}, r);
        const vf m = injected<R>(load<vf>(slot.m + i), t - r * scale, slot.denominator + i, s.gain);
        if constexpr (M == M_FP8) store(slot.m + i, m);
        else put<M>(b.exp_avg, i, m);
        return code;
    }
};

template <bool STOCHASTIC, Moments M, bool G> void stream_rule(const Shard& s, const Kind& k, const Layout& l, int64_t begin, int64_t end) {
    if (k.rule == ADAMW) Stream<STOCHASTIC, M, G, ADAMW>(s, k, l).run(begin, end);
    else Stream<STOCHASTIC, M, G, ADAMW_DISPLACEMENT>(s, k, l).run(begin, end);
}
template <Moments M> void stream_moments(const Shard& s, const Kind& k, const Layout& l, int64_t begin, int64_t end) {
    if (k.stochastic) k.grad_is_bf16 ? stream_rule<true, M, true>(s, k, l, begin, end) : stream_rule<true, M, false>(s, k, l, begin, end);
    else k.grad_is_bf16 ? stream_rule<false, M, true>(s, k, l, begin, end) : stream_rule<false, M, false>(s, k, l, begin, end);
}
inline void stream(const Shard& s, const Kind& k, const Layout& l, int64_t begin, int64_t end) {
    switch (k.moments) {
        case M_FP32: return stream_moments<M_FP32>(s, k, l, begin, end);
        case M_BF16: return stream_moments<M_BF16>(s, k, l, begin, end);
        default: return stream_moments<M_FP8>(s, k, l, begin, end);
    }
}
