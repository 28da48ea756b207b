"""The learning rate over a run: linear warmup, then cosine."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

__all__ = ["warmup_cosine", "warmup_cosine_factor"]


def warmup_cosine_factor(
    steps: int, *, warmup: float = 0.1, warmup_start: float = 0.01, final: float = 0.1
) -> Callable[[int], float]:
    """The factor on the peak learning rate as a function of the step number 0, 1, ..., steps - 1.

    With W = round(warmup * steps):  step < W: warmup_start + (1 - warmup_start) * step / W;
    then final + (1 - final) * (1 + cos(pi * (step - W) / (steps - W))) / 2.
    The value ``final`` itself belongs to step ``steps``, which no run takes: so with ``final = 0`` no step is wasted at
    a learning rate of 0.

    Raises:
        ValueError: ``steps`` is not positive or a share lies outside 0..1.
    """
    if steps < 1:
        raise ValueError(f"expected 1 step or more, got {steps}; give a positive number of steps")
    for name, value in (("warmup", warmup), ("warmup_start", warmup_start), ("final", final)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"expected {name} between 0 and 1, got {value}; give a share")
    warmup_steps = round(warmup * steps)

    def factor(step: int) -> float:
        if step < warmup_steps:
            return warmup_start + (1.0 - warmup_start) * step / warmup_steps
        progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
        return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * progress))

    return factor


def warmup_cosine(
    optimizer: Optimizer, steps: int, *, warmup: float = 0.1, warmup_start: float = 0.01, final: float = 0.1
) -> LambdaLR:
    """`warmup_cosine_factor` as an ordinary torch scheduler: call ``step()`` once after each optimizer step."""
    return LambdaLR(optimizer, warmup_cosine_factor(steps, warmup=warmup, warmup_start=warmup_start, final=final))
