"""A training step under torch's memory trackers, for tests that hold modelled peaks against it."""

from typing import Any

import torch
from torch import nn

from eco_dist.memory.report import Moment
from eco_dist.memory.track import StepTracker
from eco_dist.models import logits_of, next_token_loss


def tracked_step(
    model: nn.Module, optimizer: Any, *, vocabulary: int, sequences: int, length: int
) -> tuple[Moment, ...]:
    """Transient bytes of the second of two steps on random tokens."""

    def step() -> None:
        tokens = torch.randint(0, vocabulary, (sequences, length + 1))
        next_token_loss(logits_of(model(tokens[:, :-1])), tokens[:, 1:].contiguous()).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    tracker = StepTracker(model, optimizer)
    with tracker:
        step()
    return tracker.timeline
