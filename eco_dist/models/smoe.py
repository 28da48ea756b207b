"""The sparse form of the Llama: a mixture of experts in place of the feed-forward layers.

Note: names
    As `Llama`, but with ``blocks.N.moe.router.layer.weight (E, D)``, ``blocks.N.moe.experts.mlp.{w1,w2,v1} (E F, D)``
    and, with a shared expert, ``blocks.N.moe.shared_expert.{gate_proj,up_proj,down_proj}.weight`` where a block has
    experts. The first ``dense_layers`` blocks keep an ordinary feed-forward.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eco_dist.models.llama import Attention, Block, Llama, LlamaConfig
from eco_dist.moe import MoEConfig, MoELayer, Routing

__all__ = ["RoutingSummary", "SMoE", "SMoEConfig", "logits_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SMoEConfig(LlamaConfig):
    """The shape of a sparse model.

    Args:
        moe: of the expert layers; its width is the model's.
        dense_layers: blocks at the start with an ordinary feed-forward.
        dense_hidden: hidden features of those; 0 for the Llama's own rule.

    Raises:
        ValueError: as `LlamaConfig`, and for widths that differ or no layer with experts.
    """

    moe: MoEConfig
    dense_layers: int = 0
    dense_hidden: int = 0

    def __post_init__(self) -> None:
        """Refuse what does not fit together."""
        super().__post_init__()
        if self.moe.width != self.width:
            raise ValueError(f"expected moe.width of the model's {self.width}, got {self.moe.width}; make them equal")
        if not 0 <= self.dense_layers < self.layers:
            raise ValueError(
                f"expected dense_layers from 0 to {self.layers - 1}, got {self.dense_layers}; at least one layer has "
                "experts"
            )
        if self.activations != "none":
            raise ValueError(
                f"expected activations 'none' for a model with experts, got {self.activations!r}: rounding the inputs "
                "of experts is not implemented"
            )

    @property
    def hidden(self) -> int:
        """Hidden features of the dense blocks."""
        return self.dense_hidden or super().hidden

    @property
    def expert_parameters(self) -> int:
        """Number of weights in routed experts."""
        matrices = 3 if self.moe.glu else 2
        per_layer = matrices * self.moe.experts * self.moe.hidden * self.width
        return (self.layers - self.dense_layers) * per_layer

    @property
    def block_parameters(self) -> int:
        """Number of weights without embedding and head."""
        everywhere = self.layers * (4 * self.width**2 + 2 * self.width) + self.width
        dense = self.dense_layers * 3 * self.width * self.hidden
        router = self.moe.experts * self.width
        shared = 3 * self.width * self.moe.shared_hidden
        return everywhere + dense + self.expert_parameters + (self.layers - self.dense_layers) * (router + shared)


class RoutingSummary(NamedTuple):
    """What the routers of all expert layers did in a forward pass.

    Attributes:
        load_balancing_loss: mean over layers; 1 when balanced.
        z_loss: mean over layers.
        counts: int64 ``(layers with experts, E)``, tokens of this rank to each expert.
        entropy: mean over layers of the routers' entropy in nats, without gradient.
        dropped: mean over layers of the share of rows whose expert was full.
    """

    load_balancing_loss: Tensor
    z_loss: Tensor
    counts: Tensor
    entropy: Tensor
    dropped: Tensor


class SMoEBlock(nn.Module):
    """One pre-norm residual block: x + attention(norm(x)), then x + experts(norm(x))."""

    def __init__(self, config: SMoEConfig) -> None:
        """Build the layers of this part."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.moe = MoELayer(config.moe)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """Map ``x (B, T, D)`` to ``(B, T, D)``, and say how it was routed."""
        x = x + self.attention(self.attention_norm(x))
        out, routing = self.moe(self.moe_norm(x))
        return x + out, routing


class SMoE(Llama):
    """The whole sparse model.

    Args:
        config: the shape.
        seed: seed of the initial weights, see `Llama.init_weights`.
    """

    config: SMoEConfig

    def __init__(self, config: SMoEConfig, *, seed: int = 0) -> None:
        """Build the modules, and draw their weights unless they are on the meta device."""
        super().__init__(config, seed=seed)

    def _block(self, layer: int) -> nn.Module:
        """Dense blocks first, then blocks of experts."""
        return Block(self.config) if layer < self.config.dense_layers else SMoEBlock(self.config)

    def forward(self, tokens: Tensor) -> tuple[Tensor, RoutingSummary]:  # type: ignore[override]
        """Map token ids ``(B, T)`` int64 to logits ``(B, T, V)`` and a summary of the routing."""
        x = self.embed(tokens)
        routings: list[Routing] = []
        for block in self.blocks:
            if isinstance(block, SMoEBlock):
                x, routing = block(x)
                routings.append(routing)
            else:
                x = block(x)
        summary = RoutingSummary(
            load_balancing_loss=torch.stack([routing.load_balancing_loss for routing in routings]).mean(),
            z_loss=torch.stack([routing.z_loss for routing in routings]).mean(),
            counts=torch.stack([routing.counts for routing in routings]),
            entropy=torch.stack([routing.entropy for routing in routings]).mean(),
            dropped=torch.stack([routing.dropped for routing in routings]).mean(),
        )
        return self.head(self.norm(x)), summary


def logits_of(output: Tensor | tuple[Tensor, RoutingSummary]) -> Tensor:
    """The logits of a model's output, dense or sparse."""
    return output if isinstance(output, Tensor) else output[0]
