"""What a sparse model's routers did: their losses in a step, and how evenly experts were used, for the metrics."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from eco_dist.models import RoutingSummary, next_token_loss
from eco_dist.training.config import ModelConfig
from eco_dist.training.ranks import Ranks

__all__ = ["RunRouting"]


class RunRouting:
    """Adds the routers' losses, and sums up their choices since the last log line; nothing to do for a dense model.

    Args:
        config: weights of the losses.
        ranks: of the run.
    """

    def __init__(self, config: ModelConfig, ranks: Ranks) -> None:
        """Start with nothing counted."""
        self._config, self._ranks = config, ranks
        self._counts = torch.zeros(())
        self._entropy, self._dropped, self._passes = 0.0, 0.0, 0

    def losses(self, output: Tensor | tuple[Tensor, RoutingSummary], targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats a token, and the same plus the routers' losses, which is what backward wants."""
        if isinstance(output, Tensor):
            loss = next_token_loss(output, targets)
            return loss, loss
        logits, routing = output
        loss = next_token_loss(logits, targets)
        self._counts = self._counts + routing.counts.double()
        self._entropy += float(routing.entropy)
        self._dropped += float(routing.dropped)
        self._passes += 1
        config = self._config
        return loss, loss + config.balance_loss * routing.load_balancing_loss + config.z_loss * routing.z_loss

    def close(self) -> dict[str, Any]:
        """The fields of `StepMetrics` about experts since the last call, of all ranks; collective."""
        if not self._passes:
            return {}
        layers, experts = self._counts.shape
        own = [self._entropy, self._dropped, self._passes, *self._counts.flatten().tolist()]
        entropy, dropped, passes, *counts = self._ranks.sum(own)
        load = torch.tensor(counts, dtype=torch.float64).view(layers, experts)
        load = load / load.sum(-1, keepdim=True)
        self._counts = torch.zeros(())
        self._entropy, self._dropped, self._passes = 0.0, 0.0, 0
        evenness = torch.special.entr(load).sum(-1).mean() / math.log(experts) if experts > 1 else torch.ones(())
        return {
            "expert_load": load.tolist(),
            "load_evenness": float(evenness),
            "router_entropy": entropy / passes,
            "dropped_share": dropped / passes,
        }
