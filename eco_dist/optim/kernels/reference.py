"""The reference step as a backend: any device, no compiler."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eco_dist.optim import step as reference
from eco_dist.optim.step import PlainTask, StepStats, Task


class ReferenceKernel:
    """Plain torch, one shard after the other."""

    name = "reference, plain torch"

    def measure(self, tasks: Sequence[Task]) -> None:
        """Set the absmax of every task's updated weight; the shards do not change."""
        for task in tasks:
            reference.measure_absmax(task)

    def step(self, tasks: Sequence[Task], seed: int, stats: StepStats | None) -> None:
        """Step every shard in place."""
        for task in tasks:
            reference.step(task, seed, stats)

    def step_plain(self, tasks: Sequence[PlainTask]) -> None:
        """Step high-precision parameters in place."""
        for task in tasks:
            reference.step_plain(task)

    def is_steppable(self, grad: Tensor) -> Tensor:
        """Whether every element of a gradient is finite and its magnitude below 2^63."""
        return reference.is_steppable(grad)

    def norm(self, grad: Tensor) -> Tensor:
        """L2 norm of a gradient, a 0-dimensional tensor."""
        norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float32)
        return norm
