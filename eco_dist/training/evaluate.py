"""Validation: the mean loss over a fixed set of held-out windows, the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from eco_dist.models import logits_of, next_token_loss
from eco_dist.training.ranks import Ranks
from eco_dist.training.tokens import TokenFile

__all__ = ["Evaluator", "chosen_windows"]


def chosen_windows(windows: int, wanted: int) -> npt.NDArray[np.int64]:
    """``min(windows, wanted)`` window numbers, evenly spread over the held-out text."""
    count = min(windows, wanted)
    return (np.arange(count, dtype=np.int64) * windows) // count


class Evaluator:
    """Computes the validation loss of a model, collective over the ranks.

    Args:
        tokens: the held-out text.
        wanted: how many windows to read.
        batch: windows a forward pass on one rank.
        ranks: among which the windows are dealt.
        compute: context of a forward pass, for its dtype.
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        wanted: int,
        batch: int,
        ranks: Ranks,
        compute: Callable[[], AbstractContextManager[object]],
    ) -> None:
        """Choose the windows, and deal them to the ranks."""
        self._tokens, self._batch, self._ranks, self._compute = tokens, batch, ranks, compute
        chosen = chosen_windows(tokens.windows, wanted)
        # Every rank makes the same number of passes of the same size, as sharded engines need; a padding row repeats a
        # window and weighs nothing.
        passes = -(-len(chosen) // (batch * ranks.world_size))
        rows = np.arange(ranks.rank, passes * batch * ranks.world_size, ranks.world_size)
        self._windows = chosen[rows % len(chosen)].reshape(passes, batch)
        self._counts = (rows < len(chosen)).reshape(passes, batch)

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> float:
        """The mean loss in nats a token."""
        was_training = model.training
        model.eval()
        total = count = 0.0
        for windows, counts in zip(self._windows, self._counts, strict=True):
            inputs, targets = (part.to(self._ranks.device) for part in self._tokens.batch(windows))
            with self._compute():
                logits = logits_of(model(inputs))
            kept = torch.from_numpy(counts).to(self._ranks.device)
            if counts.any():
                total += float(next_token_loss(logits[kept], targets[kept])) * float(counts.sum())
                count += float(counts.sum())
        model.train(was_training)
        total, count = self._ranks.sum([total, count])
        return total / count
