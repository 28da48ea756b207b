// The common case without a detour: E4M3 codes with block or row scales, and error that goes into the momentum, or to
// nearest codes and into a byte beside each.
//
// A block's step is a chain: square root, division, absmax, scale, codes, injection. Followed in one go, the processor runs
// out of room to look ahead and waits for the divider. So the chain is cut into parts, and one loop does a different part
// of several blocks at once: it starts one, updates the one before, finishes one whose scale is known, and, with 8-bit
// moments, seals one whose first moment's scale is known.
#pragma once
#include <memory>
#include <vector>
#include "layout.h"

constexpr int64_t LONGEST_ROW = 256;  // blocks; a row in scratch must fit into the second-level cache

INLINE bool streams(const Kind& k, const Layout& l) {
    const bool scales = k.granularity == BLOCK || (k.granularity == ROW && l.blocks <= LONGEST_ROW);
    const bool moments = k.moments == M_FP32 || k.moments == M_FP8 || (k.moments == M_BF16 && !k.stochastic_moments);
    const bool keeps = k.compensation == MOMENTUM || (k.compensation == RESIDUAL && !k.residual_is_fp32 && !k.stochastic);
    return scales && moments && keeps && k.format == E4M3 && k.rule != SGD;
}

struct Scale {
    float value, inverse;
    explicit Scale(float of = 1) : value(of), inverse(1.0f / of) {}
};

// A block under way, and what each part leaves for the next.
struct Slot {
    alignas(64) float root[BLOCK_SIZE], denominator[BLOCK_SIZE], m[BLOCK_SIZE], updated[BLOCK_SIZE];
    Block at;
    Staged* staged;  // holds a short block
    Scale weight, first, second;  // new ones, of the codes and of 8-bit moments
};

template <Moments M> INLINE void put(void* out, int i, vf x) {
    if constexpr (M == M_FP32) store((float*)out + i, x);
    else store((uint16_t*)out + i, to_bf16(x));
}

// START: second moment and its root. UPDATE: first moment and updated weight. FINISH: codes and injection, and the codes of
// an 8-bit second moment. SEAL: those of an 8-bit first moment.
enum Part { START = 1, UPDATE = 2, FINISH = 4, SEAL = 8 };

// How codes are rounded and where the error goes.
enum Rounding { STOCHASTIC, NEAREST, NEAREST_RESIDUAL };

template <Rounding Q, Moments M, bool BF16_GRAD, Rule R> struct Stream {
    static constexpr bool EIGHT_BIT = M == M_FP8, KEEPS = Q == NEAREST_RESIDUAL, NOISY = Q == STOCHASTIC;
    static constexpr int ALL = START | UPDATE | FINISH | (EIGHT_BIT ? SEAL : 0);
    const Shard shard;
    const Kind k;
    const Layout l;
    const int64_t count, depth;  // blocks of a scale group; blocks between a block's start and its last part
    const std::unique_ptr<Slot[]> slots;
    std::vector<Staged> staged;  // for as many short blocks as can be under way
    int64_t at = 0, started = 0, short_blocks = 0;

    Stream(const Shard& s, const Kind& kind, const Layout& layout)
        : shard(s), k(kind), l(layout), count(kind.granularity == ROW ? layout.blocks : 1), depth(count + 1 + EIGHT_BIT),
          slots(new Slot[depth + 1]), staged(s.columns % BLOCK_SIZE ? 4 : 0) {}

    // Steps blocks begin..end, counted over rows; a row with one scale is never cut.
    void run(int64_t begin, int64_t end) {
        const Shard s = shard;  // a copy, which no store below can change
        int32_t absmax = 0;
        for (int64_t group = begin; group < end; group += count) {
            if (k.skip_idle && is_idle_group(group)) continue;
            for (int64_t i = group; i < group + count; i++) {
                place(slots[at], i);
                if (started >= depth) {
                    absmax = std::max(absmax, pass<ALL>(s, slots[at], back(1), back(1 + count), back(depth)));
                } else {
                    only<START>(slots[at]);
                    if (started) absmax = std::max(absmax, only<UPDATE>(back(1)));
                    if (started > count) only<FINISH>(back(1 + count));
                }
                if (started && i == group) settle(absmax), absmax = 0;
                started++, at = at == depth ? 0 : at + 1;
            }
        }
        if (!started) return;
        settle(std::max(absmax, only<UPDATE>(back(1))));
        for (int64_t i = std::min(started, count + 1); i > 0; i--) only<FINISH>(back(i));
        if (EIGHT_BIT) for (int64_t i = std::min(started, depth); i > 0; i--) only<SEAL>(back(i));
    }

   private:
    // The block started that long ago.
    Slot& back(int64_t distance) { return slots[at >= distance ? at - distance : at + depth + 1 - distance]; }

    bool is_idle_group(int64_t group) const {
        for (int64_t i = group; i < group + count; i++)
            if (!is_idle(block_at(shard, k, l, i / l.blocks, i % l.blocks), BF16_GRAD)) return false;
        return true;
    }

    void place(Slot& slot, int64_t i) {
        slot.at = block_at(shard, k, l, i / l.blocks, i % l.blocks);
        slot.staged = nullptr;
        if (slot.at.length == BLOCK_SIZE) return;
        slot.staged = &staged[short_blocks++ % 4];
        slot.at = slot.staged->take(slot.at, l);
    }

    // Gives the group whose last block was just updated its scale.
    void settle(int32_t absmax) {
        const Scale scale(scale_of(absmax, Grid<E4M3>::max));
        *back(1).at.scale = scale.value;
        for (int64_t i = 1; i <= count; i++) back(i).weight = scale;
    }

    template <int PART> __attribute__((noinline)) int32_t only(Slot& slot) { return pass<PART>(shard, slot, slot, slot, slot); }

    // Starts block a, updates b, finishes c and seals d; returns the absmax of the update.
    template <int PARTS> INLINE_MEMBER int32_t pass(const Shard& s, Slot& first, Slot& second, Slot& third, Slot& fourth) {
        const Block a = first.at, b = second.at, c = third.at, d = fourth.at;
        const float v_scale = (PARTS & START) && EIGHT_BIT ? *a.exp_avg_sq_scale : 1;
        const float m_scale = (PARTS & UPDATE) && EIGHT_BIT ? *b.exp_avg_scale : 1, scale = PARTS & UPDATE ? *b.scale : 1;
        const Scale weight = third.weight, root = third.second, m = fourth.first;
        Random random;
        if (Q != NEAREST && (PARTS & FINISH)) draw(random, s.seed, NOISY ? s.tensor & 0x0fffffff : RESIDUE | s.tensor, s.step, c.number);
        vi absmax{}, root_absmax{}, m_absmax{}, codes[4];
        vf signs[4];
#pragma GCC unroll 1
        for (int i = 0; i < BLOCK_SIZE; i += 4 * VL) {
            if (PARTS & START) fetch(a, AHEAD + i);
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) {
                const int at = i + n * VL;
                if (PARTS & START) widen_absmax(root_absmax, start(s, first, a, at, v_scale));
                if (PARTS & UPDATE) widen_absmax(absmax, update(s, second, b, at, scale, m_scale));
                if (PARTS & FINISH) widen_absmax(m_absmax, finish(s, third, c, at, weight, random, codes[n], signs[n]));
            }
            if (PARTS & FINISH) store_bytes((uint8_t*)c.codes + i, codes, signs);
            if ((PARTS & FINISH) && EIGHT_BIT) fp8_codes<true, false>(third.root, i, root.inverse, random, c.exp_avg_sq);
            if (PARTS & SEAL) fp8_codes<false, false>(fourth.m, i, m.inverse, random, d.exp_avg);
        }
        if constexpr (EIGHT_BIT) {
            if (PARTS & START) first.second = Scale(scale_of(largest_lane(root_absmax), Grid<E4M3>::max));
            if (PARTS & FINISH) third.first = Scale(scale_of(largest_lane(m_absmax), Grid<E4M3>::max));
            if (PARTS & SEAL) *d.exp_avg_scale = m.value, *d.exp_avg_sq_scale = fourth.second.value;
            if ((PARTS & SEAL) && k.stochastic_moments) {  // rare: replaces what was rounded to nearest
                put_moment<false>(shard, k, d, fourth.m);
                put_moment<true>(shard, k, d, fourth.root);
            }
        }
        if ((PARTS & (EIGHT_BIT ? SEAL : FINISH)) && fourth.staged) fourth.staged->put_back();
        return largest_lane(absmax);
    }

    static INLINE_MEMBER void widen_absmax(vi& absmax, vf x) { absmax = larger(absmax, bits(x) & 0x7fffffff); }

    static INLINE_MEMBER void fetch(const Block& b, int at) {
        for (int line = at; line < at + 4 * VL; line += LINE) fetch_line<M, BF16_GRAD>(b, line);
        __builtin_prefetch((const char*)b.codes + at, 1);
        if (KEEPS) __builtin_prefetch((const char*)b.extra + at, 1);
    }

    // The second moment and its root, which is returned.
    static INLINE_MEMBER vf start(const Shard& s, Slot& slot, const Block& b, int i, float v_scale) {
        vf v = moment_at<M, true>(b.exp_avg_sq, v_scale, nullptr, i);
        const vf r = second_moment(s, grad_at<BF16_GRAD>(s, b.grad, i), v);
        store(slot.root + i, r);
        if constexpr (!EIGHT_BIT) put<M>(b.exp_avg_sq, i, v);
        return r;
    }

    // The first moment and the updated weight, which is returned.
    static INLINE_MEMBER vf update(const Shard& s, Slot& slot, const Block& b, int i, float scale, float m_scale) {
        vf w = scaled_e4m3((const uint8_t*)b.codes + i, scale);
        if (KEEPS) w = w + residual_at(b.extra, i) * residual_unit<E4M3>(value_of<E4M3>((const uint8_t*)b.codes + i), scale);
        vf m = moment_at<M, false>(b.exp_avg, m_scale, nullptr, i), d;
        const vf t = updated_weight<R>(s, w, grad_at<BF16_GRAD>(s, b.grad, i), load<vf>(slot.root + i), m, d);
        if (R == ADAMW && !KEEPS) store(slot.denominator + i, d);
        store(slot.m + i, m);
        store(slot.updated + i, t);
        return t;
    }

    // The codes and what is done with their error; returns the first moment.
    static INLINE_MEMBER vf finish(const Shard& s, Slot& slot, const Block& b, int i, Scale scale, const Random& random, vi& code, vf& sign) {
        const vf t = load<vf>(slot.updated + i);
        vf r;
        const vi top = Q != NEAREST ? Random::top(random, i) : vi{};
        code = e4m3_nearest<NOISY>(t * scale.inverse, top, r, sign);
        const vf error = t - r * scale.value;
        vf m = load<vf>(slot.m + i);
        if (KEEPS) put_residual(b.extra, i, error, residual_unit<E4M3>(r, scale.value), top);
        else m = injected<R>(m, error, load<vf>(slot.denominator + i), s.gain);
        if constexpr (EIGHT_BIT) store(slot.m + i, m);
        else put<M>(b.exp_avg, i, m);
        return m;
    }
};

template <Rounding Q, Moments M, bool G> void stream_rule(const Shard& s, const Kind& k, const Layout& l, int64_t begin, int64_t end) {
    if (k.rule == ADAMW) Stream<Q, M, G, ADAMW>(s, k, l).run(begin, end);
    else Stream<Q, M, G, ADAMW_DISPLACEMENT>(s, k, l).run(begin, end);
}
template <Moments M, bool G> void stream_rounding(const Shard& s, const Kind& k, const Layout& l, int64_t begin, int64_t end) {
    if (k.compensation == RESIDUAL) stream_rule<NEAREST_RESIDUAL, M, G>(s, k, l, begin, end);
    else if (k.stochastic) stream_rule<STOCHASTIC, M, G>(s, k, l, begin, end);
    else stream_rule<NEAREST, M, G>(s, k, l, begin, end);
}
template <Moments M> void stream_moments(const Shard& s, const Kind& k, const Layout& l, int64_t begin, int64_t end) {
    k.grad_is_bf16 ? stream_rounding<M, true>(s, k, l, begin, end) : stream_rounding<M, false>(s, k, l, begin, end);
}
inline void stream(const Shard& s, const Kind& k, const Layout& l, int64_t begin, int64_t end) {
    switch (k.moments) {
        case M_FP32: return stream_moments<M_FP32>(s, k, l, begin, end);
        case M_BF16: return stream_moments<M_BF16>(s, k, l, begin, end);
        default: return stream_moments<M_FP8>(s, k, l, begin, end);
    }
}
