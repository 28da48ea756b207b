"""Random bits from a counter: Philox4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The bits of an element are a pure function of (seed, stream, step, global element index). Nothing is stored and nothing
advances, so replicas agree, a resumed run continues bit for bit, and a tensor draws the same bits however it is cut.

[Note: element index]
Rows are counted in blocks of 128, the last one padded: element (row, column) of a tensor with `columns` columns is
number (row * ceil(columns/128) + column // 128) * 128 + column % 128. A block therefore always starts at a multiple of
128, whatever the width, and a kernel that works on blocks never meets a misaligned counter.

One Philox call gives eight 16-bit halves. Inside a block they go to the eight elements with the same `position % 16`
(one SIMD lane): element `position` takes half `position // 16` of call `block * 16 + position % 16`, where halves 0, 1
are the high and low half of word 0, halves 2, 3 those of word 1, and so on. `tl.philox(seed, lo, hi, stream, step)`
in Triton yields the same words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from eco_dist.numerics.groups import BLOCK_SIZE, blocks_per_row

ROUNDS = 7
"""Seven rounds already pass BigCrush (Salmon et al., table 2); the customary ten only add a margin."""

LANES = 16
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Words = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """Key of one stream of random bits.

    Attributes:
        seed: 64-bit run seed, the Philox key.
        tensor: 28-bit number of the tensor.
        step: number of the optimizer step.
        purpose: 0 weights, 1 first moment, 2 second moment, 3 residual: what is rounded draws its own bits.
    """

    seed: int
    tensor: int
    step: int
    purpose: int = 0

    @property
    def word(self) -> int:
        """Third counter word: purpose in the upper four bits, tensor below."""
        return (self.purpose << 28) | (self.tensor & 0x0FFFFFFF)


def philox4x32(counter: Words, key: tuple[int, int], rounds: int = ROUNDS) -> Words:
    """The Philox4x32 bijection.

    Args:
        counter: four int64 tensors of one shape holding unsigned 32-bit values.
        key: two unsigned 32-bit integers.
        rounds: number of rounds.

    Returns:
        Four int64 tensors holding unsigned 32-bit values.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        # int64 products wrap, but their low 64 bits are those of the unsigned product, which is all that is read.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK
        c2, c3 = ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def random_halves(
    stream: Stream, shape: Sequence[int], first_row: int = 0, device: torch.device | None = None
) -> Tensor:
    """Signed 16-bit random integers for a run of whole rows of a tensor.

    Args:
        stream: seed, tensor, step and purpose.
        shape: local shape `[..., columns]`; leading dimensions are flattened into rows.
        first_row: global number of the first of these rows (see [Note: element index]).
        device: where the result lives.

    Returns:
        int32 tensor of `shape`, uniform in [-32768, 32767].
    """
    columns = shape[-1]
    rows = 1
    for size in shape[:-1]:
        rows *= size
    blocks = blocks_per_row(columns)
    calls = torch.arange(rows * blocks * LANES, dtype=torch.int64, device=device) + first_row * blocks * LANES
    fixed = torch.zeros_like(calls)
    counter = (calls & _MASK, calls >> 32, fixed + stream.word, fixed + (stream.step & _MASK))
    words = torch.stack(philox4x32(counter, (stream.seed & _MASK, (stream.seed >> 32) & _MASK)))
    halves = torch.stack((words >> 16, words & 0xFFFF), dim=1).reshape(BLOCK_SIZE // LANES, rows, blocks, LANES)
    in_order = halves.permute(1, 2, 0, 3).reshape(rows, blocks * BLOCK_SIZE)[:, :columns]
    return in_order.to(torch.int16).to(torch.int32).reshape(tuple(shape))
