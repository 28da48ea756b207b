"""Which window of tokens goes where: a stateful sampler that is a pure function of its position.

Note: the sequence
    Positions 0, 1, 2, ... run through the epochs: position p is window ``permute(p mod W)`` of epoch ``p div W`` for W
    windows. Global batch k is positions k B .. (k + 1) B - 1 for B sequences a batch; rank r of R takes the r-th of R
    equal slices of it. So ranks never overlap, the sequence of global batches does not depend on the number of ranks,
    and the whole state is one integer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["WindowSampler", "permute"]

ROUNDS = 6
_MASK = (1 << 64) - 1


def permute(index: npt.NDArray[np.int64], count: int, *, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """A keyed permutation of 0..count-1, computed one index at a time without a table.

    A Feistel network of `ROUNDS` rounds permutes 0..4^h-1 for the smallest 4^h >= count; an image outside 0..count-1
    is mapped again until it falls inside (cycle walking: at most 4 tries on average), which keeps it a permutation.

    Args:
        index: ``(n,)`` int64 in 0..count-1.
        count: number of windows W.
        seed: of the run; with the epoch it is the key, and each pair gives an independent order.
        epoch: number of the epoch.
    """
    half = max(1, (max(1, count - 1).bit_length() + 1) // 2)
    keys = [_mix_int((seed << 32) ^ (epoch << 4) ^ r) for r in range(ROUNDS)]
    out = _feistel(index.astype(np.uint64), half, keys)
    outside = out >= count
    while outside.any():
        out[outside] = _feistel(out[outside], half, keys)
        outside = out >= count
    return out.astype(np.int64)


def _feistel(x: npt.NDArray[np.uint64], half: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = x >> shift, x & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + np.uint64(key)) & mask)
    return (left << shift) | right


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64: every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mix_int(x: int) -> int:
    return int(_mix(np.asarray([(x * 0x9E3779B97F4A7C15 + 1) & _MASK], dtype=np.uint64))[0])


class WindowSampler:
    """Deals the windows of one rank, step by step.

    Args:
        windows: number of windows W of the training text.
        batch: sequences a global batch B.
        seed: of the order.
        rank, world_size: which slice of each global batch is dealt.

    Raises:
        ValueError: a batch does not split evenly over the ranks, or is larger than the text.
    """

    def __init__(self, *, windows: int, batch: int, seed: int, rank: int = 0, world_size: int = 1) -> None:
        """Start at position 0."""
        if batch % world_size:
            raise ValueError(
                f"expected data.batch divisible by the number of ranks, got {batch} sequences on {world_size} ranks; "
                "change data.batch"
            )
        if windows < batch:
            raise ValueError(
                f"expected at least data.batch={batch} windows of text, got {windows}; add text or lower data.batch"
            )
        self.windows, self.batch, self.seed = windows, batch, seed
        self.rank, self.world_size = rank, world_size
        self._position = 0

    @property
    def epoch(self) -> int:
        """The epoch of the next batch's first window."""
        return self._position // self.windows

    def next_batch(self) -> npt.NDArray[np.int64]:
        """Window numbers ``(batch / world_size,)`` of this rank's slice; advances by one global batch."""
        local = self.batch // self.world_size
        first = self._position + self.rank * local
        positions = np.arange(first, first + local, dtype=np.int64)
        self._position += self.batch
        epochs, index = positions // self.windows, positions % self.windows
        out = np.empty_like(index)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            out[here] = permute(index[here], self.windows, seed=self.seed, epoch=int(epoch))
        return out

    def state_dict(self) -> dict[str, Any]:
        """The position in sequences, and what it is a position in; the same on every rank."""
        return {"position": self._position, "windows": self.windows, "seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, on any number of ranks and with any batch size.

        Raises:
            ValueError: the state belongs to another text or another seed.
        """
        for name in ("windows", "seed"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"expected a sampler state with {name} {getattr(self, name)}, got {state[name]}; "
                    "resume with the same text, sequence length and seed"
                )
        self._position = int(state["position"])
