// Philox4x32-7: the random bits of one block, see eco_dist/numerics/philox.py for the layout.
#pragma once
#include "lanes.h"

constexpr int ROUNDS = 7, LANES = 16;

struct Random {
    alignas(64) int32_t words[4][LANES];
    // 16 bits in the upper half of each lane, for the VL elements from `position` on.
    INLINE vi top(const Random& r, int position) {
        int vector = position / LANES;
        vi word = load<vi>(&r.words[vector / 2][position % LANES]);
        return vector % 2 ? word << 16 : word;
    }
};

INLINE void draw(Random& out, uint64_t seed, uint32_t stream, uint32_t step, int64_t block) {
    vu lane{};
    for (int i = 0; i < VL; i++) lane[i] = i;
    for (int first = 0; first < LANES; first += VL) {
        uint64_t call = (uint64_t)block * LANES + first;  // 16 calls never cross a multiple of 2^32
        vu c0 = lane + (uint32_t)call, c1 = vu{} + (uint32_t)(call >> 32), c2 = vu{} + stream, c3 = vu{} + step;
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        for (int round = 0; round < ROUNDS; round++) {
            vu high0, low0, high1, low1;
            multiply(c0, 0xD2511F53u, high0, low0);
            multiply(c2, 0xCD9E8D57u, high1, low1);
            c0 = high1 ^ c1 ^ k0;
            c1 = low1;
            c2 = high0 ^ c3 ^ k1;
            c3 = low0;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        store(&out.words[0][first], c0);
        store(&out.words[1][first], c1);
        store(&out.words[2][first], c2);
        store(&out.words[3][first], c3);
    }
}
