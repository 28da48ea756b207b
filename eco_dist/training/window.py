"""What happened since the last log line."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from eco_dist.training.ranks import Ranks

__all__ = ["LogWindow"]


class LogWindow:
    """Training loss and tokens since the last log line; time spent in validation does not count."""

    def __init__(self, ranks: Ranks, clock: Callable[[], float] = time.perf_counter) -> None:
        """Start a window; `clock` gives seconds."""
        self._ranks, self._clock = ranks, clock
        self.open()

    def open(self) -> None:
        """Start anew."""
        self._loss: Tensor | float = 0.0
        self._tokens = self.steps = 0
        self._started = self._clock()

    def add(self, loss: Tensor, tokens: int) -> None:
        """Add one micro-batch: its share of a step's loss, and its tokens on this rank."""
        self._loss = self._loss + loss.double()
        self._tokens += tokens

    def close(self) -> tuple[float, float]:
        """Mean loss a step over all ranks, and tokens a second of all ranks; collective."""
        seconds = max(self._clock() - self._started, 1e-9)
        loss, tokens = self._ranks.sum([float(self._loss), float(self._tokens)])
        return loss / (max(self.steps, 1) * self._ranks.world_size), tokens / seconds
