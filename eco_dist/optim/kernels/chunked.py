"""The reference step over a few rows at a time: what runs where no kernel can be had.

Cutting a shard changes no bit of it (random bits follow the global row), so this is the reference itself, with
temporaries of a chunk's size instead of the shard's, small enough to stay in the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from torch import Tensor

from eco_dist.numerics import Granularity
from eco_dist.optim import step as reference
from eco_dist.optim.kernels.reference import ReferenceKernel
from eco_dist.optim.step import StepStats, Task

CHUNK = 1 << 16
"""Elements of a chunk, about; a row is never cut."""


class ChunkedKernel(ReferenceKernel):
    """Plain torch on chunks of rows."""

    name = "plain torch, in chunks"

    def measure(self, tasks: Sequence[Task]) -> None:
        """Set the absmax of every task's updated weight; the shards do not change."""
        for task in tasks:
            absmax: Tensor | None = None
            for chunk in _chunks(task):
                reference.measure_absmax(chunk)
                assert chunk.absmax is not None
                absmax = chunk.absmax if absmax is None else absmax.maximum(chunk.absmax)
            task.absmax = absmax

    def step(self, tasks: Sequence[Task], seed: int, stats: StepStats | None) -> None:
        """Step every shard in place."""
        for task in tasks:
            scales = task.shard.scales
            for chunk in _chunks(task):
                reference.step(chunk, seed, stats)
                scales = chunk.shard.scales
            if task.shard.recipe.granularity is Granularity.TENSOR:
                task.shard.scales.copy_(scales)


def _chunks(task: Task) -> Iterator[Task]:
    """The task cut into runs of whole rows, sharing its memory; a scale of the whole tensor is copied with each."""
    shard = task.shard
    rows = shard.rows
    length = max(1, CHUNK // max(1, shard.columns))
    one_scale = shard.recipe.granularity is Granularity.TENSOR
    codes, grad = _rows(shard.codes, rows), task.grad.reshape(rows, shard.columns)
    for start in range(0, max(rows, 1), length):
        here = slice(start, min(start + length, rows))
        part = dataclasses.replace(
            shard,
            codes=codes[here],
            scales=shard.scales.view(1, 1).clone() if one_scale else _rows(shard.scales, rows)[here],
            state={key: _rows(value, rows)[here] if value.ndim else value for key, value in shard.state.items()},
            first_row=shard.first_row + start,
        )
        absmax = task.absmax.view(1, 1) if one_scale and task.absmax is not None else None
        yield dataclasses.replace(task, shard=part, grad=grad[here], absmax=absmax)


def _rows(tensor: Tensor, rows: int) -> Tensor:
    """A tensor of the shard with its leading dimensions flattened."""
    return tensor.view(rows, tensor.shape[-1])
