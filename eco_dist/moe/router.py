"""The router: which experts a token visits, with what weight, and how evenly.

It computes in fp32 whatever the rest does: two experts whose logits differ by less than a bf16 step would otherwise
be chosen by the order of the experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from eco_dist.moe.config import MoEConfig
from eco_dist.moe.grouped import check_rows

SMALLEST_SUM = 1e-20
"""Keeps the weights of a token finite whose sigmoid scores all vanish; DeepSeek-V3 uses the same number."""


class Routing(NamedTuple):
    """What a router decided for T tokens, and what the training loss and the metrics want to know.

    A NamedTuple, because FSDP2 looks for tensors that need a gradient in tuples, not in objects.

    Attributes:
        weights: fp32 `[T, K]`, factor on each chosen expert's output.
        experts: int64 `[T, K]`, the chosen experts.
        counts: int64 `[E]`, how often each expert was chosen.
        load_balancing_loss: E / (T K) sum_e counts_e mean_t scores_te, 1 when balanced (Switch Transformer, eq. 4).
        z_loss: mean_t logsumexp(logits_t)^2 (ST-MoE, eq. 5).
        entropy: mean_t -sum_e p_te log p_te in nats, p the normalized scores; without gradient.
        dropped: share of the rows, of all ranks that share the experts, whose expert was full; 0 without a capacity.
        capacity: most rows of an expert; None for no limit.
    """

    weights: Tensor
    experts: Tensor
    counts: Tensor
    load_balancing_loss: Tensor
    z_loss: Tensor
    entropy: Tensor
    dropped: Tensor
    capacity: int | None = None


class Router(nn.Module):
    """Scores each token against each expert and keeps the K largest.

    Args:
        config: of the layer.
    """

    def __init__(self, config: MoEConfig) -> None:
        """Build the linear layer; its weight is megablocks' `router.layer.weight`, `[E, D]`."""
        super().__init__()
        self.config = config
        self.layer = nn.Linear(config.width, config.experts, bias=False)

    def forward(self, x: Tensor) -> Routing:
        """Route `x [T, D]`, any float dtype."""
        config = self.config
        check_rows(x.shape[0] * config.top_k)
        with torch.autocast(x.device.type, enabled=False):
            logits = nn.functional.linear(x.float(), self.layer.weight.float())
            scores = logits.softmax(-1) if config.score == "softmax" else logits.sigmoid()
            weights, experts = torch.topk(scores, config.top_k, dim=-1)
            if config.normalize:
                weights = weights / (weights.sum(-1, keepdim=True) + SMALLEST_SUM)
            if config.scale != 1.0:
                weights = weights * config.scale
            counts = torch.bincount(experts.flatten(), minlength=config.experts)
            return Routing(weights, experts, counts, *self._losses(logits, scores, counts), scores.new_zeros(()))

    def _losses(self, logits: Tensor, scores: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The two losses and the entropy; 0 for no tokens."""
        config, tokens = self.config, max(logits.shape[0], 1)
        shares = scores if config.score == "softmax" else scores / (scores.sum(-1, keepdim=True) + SMALLEST_SUM)
        balance = torch.dot(counts.to(shares.dtype), shares.sum(0) / tokens)
        balance = balance * (config.experts / (tokens * config.top_k))
        z_loss = logits.logsumexp(-1).square().sum() / tokens
        with torch.no_grad():
            entropy = torch.special.entr(shares).sum() / tokens
        return balance, z_loss, entropy
