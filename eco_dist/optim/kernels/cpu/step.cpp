// The optimizer step of many shards in one call: a C ABI without torch, loaded with ctypes.
//
// Bit-equal to eco_dist/optim/step.py. One pass over memory for block scales and BF16; a row is read twice, the second
// time from cache; a tensor with one scale takes two calls, because its owners agree on the absmax in between.
#include <omp.h>
#include <vector>
#include "direct.h"
#include "stream.h"

namespace {

// --- one block with its kind chosen at run time -------------------------------------------------------------------

using Update = int32_t (*)(const Shard&, const Kind&, const Block&, Scratch&);
template <bool E, Moments M, bool G> Update by_rule(int rule) {
    return rule == SGD ? update<E, M, G, SGD> : rule == ADAMW ? update<E, M, G, ADAMW> : update<E, M, G, ADAMW_DISPLACEMENT>;
}
template <bool E, bool G> Update by_moments(const Kind& k) {
    switch (k.moments) {
        case M_FP32: return by_rule<E, M_FP32, G>(k.rule);
        case M_BF16: return by_rule<E, M_BF16, G>(k.rule);
        case M_FP8: return by_rule<E, M_FP8, G>(k.rule);
        default: return by_rule<E, M_DYNAMIC8, G>(k.rule);
    }
}
// E4M3 codes are decoded on the way where nothing is added to them.
bool decodes_inline(const Kind& k) { return k.format == E4M3 && (k.compensation == MOMENTUM || k.compensation == LOSE); }
Update choose_update(const Kind& k) {
    if (decodes_inline(k)) return k.grad_is_bf16 ? by_moments<true, true>(k) : by_moments<true, false>(k);
    return k.grad_is_bf16 ? by_moments<false, true>(k) : by_moments<false, false>(k);
}

template <Format F> struct Of {
    static void weight_before(const Kind& k, const Block& b, Scratch& x) {
        if (k.compensation == MASTER) {
            copy(x.weight, (const float*)b.extra);
            return;
        }
        const float scale = b.scale ? *b.scale : 1;
        read_codes<F>(b.codes, x.weight);
        for (int i = 0; i < BLOCK_SIZE; i += VL) store(x.weight + i, load<vf>(x.weight + i) * scale);
        if (k.compensation == RESIDUAL) load_residual<F>(k, b, scale, x);
    }
    static void round(const Kind& k, const Block& b, float scale, Scratch& x) {
        if (k.stochastic) encode<F, true>(b, scale, x);
        else encode<F, false>(b, scale, x);
    }
};

template <template <Format> class T, class Action> auto by_format(int format, Action action) {
    switch (format) {
        case E4M3: return action(T<E4M3>());
        case E5M2: return action(T<E5M2>());
        case INT8: return action(T<INT8>());
        case INT4: return action(T<INT4>());
        case BF16: return action(T<BF16>());
        default: return action(T<FP32>());
    }
}

struct Step {
    const Kind& kind;
    Update chosen;
    DirectSteps direct;
    Stats* stats;

    explicit Step(const Kind& k, Stats* s = nullptr)
        : kind(k), chosen(choose_update(k)), direct(s ? DirectSteps{} : DirectSteps::choose(k)), stats(s) {}

    bool is_direct(const Block& b) const { return direct.step && b.length == BLOCK_SIZE; }

    int32_t absmax(const Shard& s, const Block& b, Scratch& x) const {
        return is_direct(b) ? direct.absmax(s, b) : updated(s, b, x);
    }

    int32_t updated(const Shard& s, const Block& b, Scratch& x) const {
        if (!decodes_inline(kind))
            by_format<Of>(kind.format, [&](auto of) { of.weight_before(kind, b, x); });
        const bool in_place = kind.moments == M_FP32 && b.length == BLOCK_SIZE && kind.granularity != ROW && kind.granularity != TENSOR;
        x.new_v = in_place ? (float*)b.exp_avg_sq : x.v;
        int32_t absmax = chosen(s, kind, b, x);
        if (b.length == BLOCK_SIZE) return absmax;
        // Lanes beyond a short block decode padding, which must not reach a scale.
        absmax = 0;
        for (int i = 0; i < BLOCK_SIZE; i++) {
            if (i >= b.length) x.updated[i] = x.m[i] = x.v[i] = 0;
            int32_t t;
            memcpy(&t, x.updated + i, 4);
            absmax = std::max(absmax, t & 0x7fffffff);
        }
        return absmax;
    }

    void finish(const Shard& s, const Block& b, Scratch& x, float scale, Stats& sums) const {
        if (stats) by_format<Of>(kind.format, [&](auto of) { read<decltype(of)>(b, x.before); });
        if (kind.stochastic) draw(x.random, s.seed, s.tensor & 0x0fffffff, s.step, b.number);
        by_format<Of>(kind.format, [&](auto of) { of.round(kind, b, scale, x); });
        if (stats) count(b, x, sums);
        if (kind.compensation == RESIDUAL)
            by_format<Of>(kind.format, [&](auto of) { keep<decltype(of)>(s, b, scale, x); });
        else if (kind.compensation == MASTER) copy(b.extra, x.updated);
        else if (kind.compensation == MOMENTUM) kind.rule == ADAMW ? inject<ADAMW>(s.gain, x) : inject<SGD>(s.gain, x);
        if (b.length < BLOCK_SIZE)
            for (int i = b.length; i < BLOCK_SIZE; i++) x.m[i] = 0;
        store_moments(s, kind, b, x);
    }

   private:
    template <class O> struct FormatOf;
    template <Format F> struct FormatOf<Of<F>> { static constexpr Format value = F; };
    template <class O> static void read(const Block& b, float* out) { read_codes<FormatOf<O>::value>(b.codes, out); }
    template <class O> void keep(const Shard& s, const Block& b, float scale, Scratch& x) const {
        store_residual<FormatOf<O>::value>(kind, s, b, scale, x);
    }
    void count(const Block& b, Scratch& x, Stats& sums) const {
        alignas(64) float after[BLOCK_SIZE];
        by_format<Of>(kind.format, [&](auto of) { read<decltype(of)>(b, after); });
        for (int i = 0; i < b.length; i++) {
            sums.squared_error += (double)x.error[i] * x.error[i];
            sums.squared_weight += (double)x.updated[i] * x.updated[i];
            sums.moved += x.before[i] != after[i];
        }
        sums.elements += b.length;
    }
};

// --- many shards ----------------------------------------------------------------------------------------------------

template <class Action> auto with_block(const Shard& s, const Kind& k, const Layout& l, int64_t index, bool writes, Action action) {
    Block b = block_at(s, k, l, index / l.blocks, index % l.blocks);
    if (b.length == BLOCK_SIZE) return action(b);
    Staged staged;
    auto result = action(staged.take(b, l));
    if (writes) staged.put_back();
    return result;
}

bool idle_blocks(const Shard& s, const Kind& k, const Layout& l, int64_t first, int64_t count) {
    for (int64_t i = first; i < first + count; i++)
        if (!is_idle(block_at(s, k, l, i / l.blocks, i % l.blocks), k.grad_is_bf16)) return false;
    return true;
}

void step_chunk(const Chunk& c, const Step& step, Scratch& x, Stats& sums) {
    const Shard& s = *c.shard;
    const Kind& k = step.kind;
    const Layout l = layout_of(s, k);
    if (!step.stats && streams(k, l)) return stream(s, k, l, c.begin, c.end);
    const float max = by_format<Grid>(k.format, [](auto grid) { return decltype(grid)::max; });
    const int64_t unit = k.granularity == ROW ? l.blocks : 1;
    int32_t row_absmax = 0;
    for (int64_t i = c.begin; i < c.end; i++) {
        if (k.skip_idle && i % unit == 0 && idle_blocks(s, k, l, i, unit)) {
            i += unit - 1;
            continue;
        }
        if (k.granularity == ROW && i % l.blocks == 0) {
            row_absmax = 0;
            for (int64_t j = i; j < i + l.blocks; j++)
                row_absmax = std::max(row_absmax, with_block(s, k, l, j, false, [&](const Block& b) { return step.updated(s, b, x); }));
        }
        with_block(s, k, l, i, true, [&](const Block& b) {
            const bool direct = step.is_direct(b);
            int32_t absmax = direct ? 0 : step.updated(s, b, x);
            if (k.granularity == ROW) absmax = row_absmax;
            if (k.granularity == TENSOR) memcpy(&absmax, s.absmax, 4);
            const float scale = k.granularity == NONE ? 1.0f : scale_of(absmax, max);
            if (direct) return step.direct.step(s, b, scale), 0;
            step.finish(s, b, x, scale, sums);
            if (k.granularity == BLOCK) *b.scale = scale;
            return 0;
        });
        if (k.granularity == ROW && (i + 1) % l.blocks == 0) *scale_at(s, k, l, i / l.blocks, 0) = scale_of(row_absmax, max);
    }
}

}  // namespace

extern "C" {

const char* eco_isa() { return ECO_ISA; }

// Steps all shards, which are of one kind. For granularity `tensor` their absmax must hold the agreed value.
void eco_step(const Shard* shards, int count, const Kind* kind, Stats* stats, int threads) {
    const Step step(*kind, stats);
    const std::vector<Chunk> chunks = chunks_of(shards, count, kind->granularity == ROW, *kind, threads);
    double squared_error = 0, squared_weight = 0;
    int64_t moved = 0, elements = 0;
#pragma omp parallel num_threads(threads) reduction(+ : squared_error, squared_weight, moved, elements)
    {
        Scratch x;
        Stats sums{};
#pragma omp for schedule(static)
        for (size_t i = 0; i < chunks.size(); i++) step_chunk(chunks[i], step, x, sums);
        squared_error += sums.squared_error, squared_weight += sums.squared_weight;
        moved += sums.moved, elements += sums.elements;
    }
    if (kind->granularity == TENSOR) {
        const float max = by_format<Grid>(kind->format, [](auto grid) { return decltype(grid)::max; });
        for (int i = 0; i < count; i++) {
            int32_t absmax;
            memcpy(&absmax, shards[i].absmax, 4);
            *shards[i].scales = scale_of(absmax, max);
        }
    }
    if (stats) *stats = {squared_error, squared_weight, moved, elements};
}

// Largest magnitude of each shard's updated weight, for granularity `tensor`; changes nothing else.
void eco_absmax(const Shard* shards, int count, const Kind* kind, int threads) {
    const Step step(*kind);
    const std::vector<Chunk> chunks = chunks_of(shards, count, false, *kind, threads);
    std::vector<int32_t> found(chunks.size());
#pragma omp parallel num_threads(threads)
    {
        Scratch x;
#pragma omp for schedule(static)
        for (size_t i = 0; i < chunks.size(); i++) {
            const Shard& s = *chunks[i].shard;
            const Layout l = layout_of(s, *kind);
            for (int64_t j = chunks[i].begin; j < chunks[i].end; j++)
                found[i] = std::max(found[i], with_block(s, *kind, l, j, false, [&](const Block& b) { return step.absmax(s, b, x); }));
        }
    }
    for (int i = 0; i < count; i++) *shards[i].absmax = 0;
    for (size_t i = 0; i < chunks.size(); i++) {
        int32_t before;
        memcpy(&before, chunks[i].shard->absmax, 4);
        const int32_t absmax = std::max(before, found[i]);
        memcpy(chunks[i].shard->absmax, &absmax, 4);
    }
}

// Whether every element is finite and its magnitude below 2^63.
int eco_is_steppable(const void* grad, int64_t length, int is_bf16, int threads) {
    int32_t absmax = 0;
    const int64_t size = 1 << 14;
#pragma omp parallel for num_threads(threads) reduction(max : absmax) schedule(static)
    for (int64_t begin = 0; begin < length; begin += size) {
        const int64_t end = std::min(begin + size, length);
        vi m{};
        int64_t i = begin;
        for (; i + VL <= end; i += VL) {
            vf g = is_bf16 ? from_bf16(load<vh>((const uint16_t*)grad + i)) : load<vf>((const float*)grad + i);
            m = larger(m, bits(g) & 0x7fffffff);
        }
        absmax = std::max(absmax, largest_lane(m));
        for (; i < end; i++) {
            int32_t b;
            if (is_bf16) b = (int32_t)(((const uint16_t*)grad)[i] << 16);
            else memcpy(&b, (const float*)grad + i, 4);
            absmax = std::max(absmax, b & 0x7fffffff);
        }
    }
    return absmax < (127 + 63) << 23;
}

// Sum of the squares of all elements: fp32 within 1024 elements, fp64 beyond, so that threads change nothing.
double eco_sum_of_squares(const void* grad, int64_t length, int is_bf16, int threads) {
    const int64_t size = 1 << 10, pieces = (length + size - 1) / size;
    std::vector<double> sums(pieces);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t end = std::min((piece + 1) * size, length);
        vf sum{};
        int64_t i = piece * size;
        double rest = 0;
        for (; i + VL <= end; i += VL) {
            vf g = is_bf16 ? from_bf16(load<vh>((const uint16_t*)grad + i)) : load<vf>((const float*)grad + i);
            sum += g * g;
        }
        for (; i < end; i++) {
            const uint32_t b = is_bf16 ? (uint32_t)((const uint16_t*)grad)[i] << 16 : ((const uint32_t*)grad)[i];
            float g;
            memcpy(&g, &b, 4);
            rest += (double)g * g;
        }
        for (int lane = 0; lane < VL; lane++) rest += sum[lane];
        sums[piece] = rest;
    }
    double total = 0;
    for (double sum : sums) total += sum;
    return total;
}

// Reads and writes what a step with E4M3 codes, fp32 moments and block scales does, in the same order, without its
// arithmetic: the limit of this access pattern on a machine, for measurements. A multiple of VL elements.
void eco_touch(const Shard* shard, int64_t elements, int grad_is_bf16, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < elements; i += VL) {
        float *m = (float*)shard->exp_avg + i, *v = (float*)shard->exp_avg_sq + i;
        uint8_t* codes = (uint8_t*)shard->codes + i;
        const vi g = grad_is_bf16 ? widen(load<vh>((const uint16_t*)shard->grad + i)) : load<vi>((const float*)shard->grad + i);
        store(m, load<vf>(m) + 1.0f);
        store(v, load<vf>(v) + 1.0f);
        store(codes, load<vb>(codes) + low_bytes(g));
    }
}

}  // extern "C"
