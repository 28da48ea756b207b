"""A sparse mixture of experts in place of a feed-forward layer."""

from __future__ import annotations

from torch import Tensor, nn

from eco_dist.moe.backend import backend_of
from eco_dist.moe.capacity import limited
from eco_dist.moe.config import MoEConfig
from eco_dist.moe.experts import Experts, activation
from eco_dist.moe.router import Router, Routing


class SharedExpert(nn.Module):
    """A gated feed-forward every token passes: down(act(gate x) * up x); names as in megablocks."""

    def __init__(self, config: MoEConfig) -> None:
        """Build the layers."""
        super().__init__()
        self.act = activation(config.activation)
        self.gate_proj = nn.Linear(config.width, config.shared_hidden, bias=False)
        self.up_proj = nn.Linear(config.width, config.shared_hidden, bias=False)
        self.down_proj = nn.Linear(config.shared_hidden, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., D]` to `[..., D]`."""
        out: Tensor = self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))
        return out


class MoELayer(nn.Module):
    """Router, experts and, if asked for, a shared expert. Without a capacity factor no token is dropped.

    Parameters have megablocks' names and shapes: `router.layer.weight [E, D]`, `experts.mlp.{w1,w2,v1} [E F, D]`,
    `shared_expert.{gate_proj,up_proj,down_proj}.weight`; a state dict of `megablocks.dMoE` loads as it is.

    Args:
        config: the shape.
    """

    def __init__(self, config: MoEConfig) -> None:
        """Build the parts; expert weights are drawn by `init_weights` or loaded."""
        super().__init__()
        self.config = config
        self.router = Router(config)
        self.experts = Experts(config, backend_of(config))
        self.shared_expert = SharedExpert(config) if config.shared_hidden else None
        if not self.router.layer.weight.is_meta:
            self.init_weights(std=0.02)

    def init_weights(self, std: float) -> None:
        """Draw router and experts from a normal distribution, as megablocks does."""
        for parameter in (*self.router.parameters(), *self.experts.parameters()):
            nn.init.normal_(parameter, std=std)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        """Map `[..., D]` to `[..., D]`, and say how the tokens were routed; losses are values, not side effects."""
        tokens = x.reshape(-1, self.config.width)
        routing = limited(self.router(tokens), self.config, self.experts.group)
        out = self.experts(tokens, routing).view_as(x)
        if self.shared_expert is not None:
            out = out + self.shared_expert(x)
        return out, routing
