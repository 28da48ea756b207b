"""Philox4x32 on Python integers, after Salmon et al. (SC 2011), and the layout of bits over elements."""

from __future__ import annotations

MASK = 2**32 - 1


def philox(counter: tuple[int, int, int, int], key: tuple[int, int], rounds: int) -> tuple[int, int, int, int]:
    """The bijection, one round a line."""
    (a, b, c, d), (k, j) = counter, key
    for _ in range(rounds):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k, right & MASK, (left >> 32) ^ d ^ j, left & MASK
        k, j = (k + 0x9E3779B9) & MASK, (j + 0xBB67AE85) & MASK
    return a, b, c, d


def half(
    *, seed: int, tensor: int, step: int, purpose: int, row: int, column: int, columns: int, rounds: int = 7
) -> int:
    """Signed 16 bits of one element: call number (row, block, lane), then the half of the position in the block."""
    blocks = -(-columns // 128)
    block, position = row * blocks + column // 128, column % 128
    call = block * 16 + position % 16
    counter = (call & MASK, call >> 32, (purpose << 28) | tensor, step)
    words = philox(counter, (seed & MASK, seed >> 32), rounds)
    which = position // 16
    word = words[which // 2]
    value = word >> 16 if which % 2 == 0 else word & 0xFFFF
    return value - 65536 if value >= 32768 else value
