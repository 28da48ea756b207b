// Philox4x32-7: the random bits of one block, see eco_dist/numerics/philox.py for the layout.
#pragma once
#include "lanes.h"

constexpr int ROUNDS = 7, LANES = 16;

struct Random {
    alignas(64) int32_t words[4][LANES];
    // The signed 16 bits of the element at `position`.
    INLINE int32_t half(const Random& r, int position) {
        const int32_t word = r.words[position / LANES / 2][position % LANES];
        return (position / LANES % 2 ? (int32_t)((uint32_t)word << 16) : word) >> 16;
    }
    // 16 bits in the upper half of each lane, for the VL elements from `position` on.
    INLINE vi top(const Random& r, int position) {
        int vector = position / LANES;
        vi word = load<vi>(&r.words[vector / 2][position % LANES]);
        return vector % 2 ? word << 16 : word;
    }
};

// Four counters a call in 64-bit lanes, so that a product needs no rearranging: even and odd calls apart.
struct Counters {
    vl c0, c1, c2, c3;
    INLINE void round(Counters& c, uint32_t k0, uint32_t k1) {
        const vl p0 = times(c.c0, 0xD2511F53u), p1 = times(c.c2, 0xCD9E8D57u);
        c.c0 = (p1 >> 32) ^ c.c1 ^ k0;
        c.c1 = p1;
        c.c2 = (p0 >> 32) ^ c.c3 ^ k1;
        c.c3 = p0;
    }
};
INLINE void interleave(int32_t* out, vl even, vl odd) { store(out, (even & 0xffffffffu) | (odd << 32)); }

INLINE void draw(Random& out, uint64_t seed, uint32_t stream, uint32_t step, int64_t block) {
    vl lane{};
    for (int i = 0; i < VL / 2; i++) lane[i] = 2 * i;
    for (int first = 0; first < LANES; first += VL) {
        const uint64_t call = (uint64_t)block * LANES + first;  // 16 calls never cross a multiple of 2^32
        const vl high = vl{} + (call >> 32), purpose = vl{} + stream, number = vl{} + step;
        Counters even{lane + (uint32_t)call, high, purpose, number};
        Counters odd{lane + (uint32_t)call + 1, high, purpose, number};
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < ROUNDS; round++) {
            Counters::round(even, k0, k1);
            Counters::round(odd, k0, k1);
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        interleave(&out.words[0][first], even.c0, odd.c0);
        interleave(&out.words[1][first], even.c1, odd.c1);
        interleave(&out.words[2][first], even.c2, odd.c2);
        interleave(&out.words[3][first], even.c3, odd.c3);
    }
}
