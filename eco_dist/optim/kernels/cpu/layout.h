// Where the blocks of a shard lie in memory, and how they are shared out.
#pragma once
#include <vector>
#include "block.h"

struct Layout {
    int64_t blocks;  // per row
    int64_t code_row;  // bytes of a row of codes
    int code_bits, moment_bytes, grad_bytes, extra_bytes;
};

constexpr int MOMENT_BYTES[] = {4, 2, 1, 1};

inline Layout layout_of(const Shard& s, const Kind& k) {
    Layout l;
    l.blocks = (s.columns + BLOCK_SIZE - 1) / BLOCK_SIZE;
    l.code_bits = code_bits((Format)k.format);
    l.code_row = (s.columns * l.code_bits + 7) / 8;
    l.moment_bytes = MOMENT_BYTES[k.moments];
    l.grad_bytes = k.grad_is_bf16 ? 2 : 4;
    l.extra_bytes = k.compensation == MASTER || (k.compensation == RESIDUAL && k.residual_is_fp32) ? 4
                    : k.compensation == RESIDUAL                                                   ? 1
                                                                                                   : 0;
    return l;
}

inline float* scale_at(const Shard& s, const Kind& k, const Layout& l, int64_t row, int64_t block) {
    if (!s.scales) return nullptr;
    return s.scales + (k.granularity == BLOCK ? row * l.blocks + block : k.granularity == ROW ? row : 0);
}

inline Block block_at(const Shard& s, const Kind& k, const Layout& l, int64_t row, int64_t block) {
    const int64_t column = block * BLOCK_SIZE, element = row * s.columns + column;
    Block b;
    b.codes = (char*)s.codes + row * l.code_row + column * l.code_bits / 8;
    b.grad = (const char*)s.grad + element * l.grad_bytes;
    b.exp_avg = (char*)s.exp_avg + element * l.moment_bytes;
    b.exp_avg_sq = s.exp_avg_sq ? (char*)s.exp_avg_sq + element * l.moment_bytes : nullptr;
    b.extra = s.extra ? (char*)s.extra + element * l.extra_bytes : nullptr;
    b.scale = scale_at(s, k, l, row, block);
    b.exp_avg_scale = s.exp_avg_scale ? s.exp_avg_scale + row * l.blocks + block : nullptr;
    b.exp_avg_sq_scale = s.exp_avg_sq_scale ? s.exp_avg_sq_scale + row * l.blocks + block : nullptr;
    b.length = (int)std::min<int64_t>(BLOCK_SIZE, s.columns - column);
    b.number = (s.first_row + row) * l.blocks + block;
    return b;
}

struct Chunk {
    const Shard* shard;
    int64_t begin, end;  // blocks, counted over rows
};

// Work in pieces of 16,384 to 131,072 elements, as large as leaves four for every thread, because a piece fills and drains
// the parts of a step. A scale group of a row is never cut.
inline std::vector<Chunk> chunks_of(const Shard* shards, int count, bool whole_rows, const Kind& k, int threads) {
    int64_t all = 0;
    for (int i = 0; i < count; i++) all += shards[i].rows * layout_of(shards[i], k).blocks;
    const int64_t target = std::clamp<int64_t>(all / (4 * threads), 128, 1024);
    std::vector<Chunk> chunks;
    for (int i = 0; i < count; i++) {
        const int64_t blocks = layout_of(shards[i], k).blocks, total = shards[i].rows * blocks;
        const int64_t unit = whole_rows ? blocks : 1, length = std::max<int64_t>(1, target / unit) * unit;
        for (int64_t begin = 0; begin < total; begin += length)
            chunks.push_back({shards + i, begin, std::min(begin + length, total)});
    }
    return chunks;
}

// A short block, copied to full length and back. What pads it is zero, which a step with E4M3 codes leaves at zero.
struct Staged {
    alignas(64) char codes[4 * BLOCK_SIZE]{}, grad[4 * BLOCK_SIZE]{}, m[4 * BLOCK_SIZE]{}, v[4 * BLOCK_SIZE]{},
        extra[4 * BLOCK_SIZE]{};
    Block outer;
    size_t code_bytes, moment_bytes, extra_bytes;

    Block take(const Block& b, const Layout& l) {
        outer = b;
        code_bytes = (size_t)(b.length * l.code_bits + 7) / 8;
        moment_bytes = (size_t)(b.length * l.moment_bytes);
        extra_bytes = (size_t)(b.length * l.extra_bytes);
        memcpy(codes, b.codes, code_bytes);
        memcpy(grad, b.grad, (size_t)(b.length * l.grad_bytes));
        memcpy(m, b.exp_avg, moment_bytes);
        if (b.exp_avg_sq) memcpy(v, b.exp_avg_sq, moment_bytes);
        if (b.extra) memcpy(extra, b.extra, extra_bytes);
        Block inner = b;
        inner.codes = codes, inner.grad = grad, inner.exp_avg = m;
        inner.exp_avg_sq = b.exp_avg_sq ? v : nullptr, inner.extra = b.extra ? extra : nullptr;
        return inner;
    }
    void put_back() const {
        memcpy(outer.codes, codes, code_bytes);
        memcpy(outer.exp_avg, m, moment_bytes);
        if (outer.exp_avg_sq) memcpy(outer.exp_avg_sq, v, moment_bytes);
        if (outer.extra) memcpy(outer.extra, extra, extra_bytes);
    }
};
