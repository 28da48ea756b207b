"""The experts of a layer: parameters as megablocks names and shapes them, and who multiplies.

[Note: expert parameters]
`mlp.w1`, `mlp.w2` and with a gate `mlp.v1`, each `[E * F, D]`: the rows of all experts below each other. With expert
parallelism each is a DTensor whose local part holds the rows of this rank's experts. With more ranks than experts that
is a part of one expert: S = R / E ranks have F / S hidden features of it each, and its output is the sum of theirs. So
a layer on R ranks is one of R smaller experts, of which a token visits K S. A quantized weight stays codes between
forward and backward. Expert gradients of one rank already sum over the ranks of its expert-parallel group (their tokens
came here), so they are divided by the group's size and then averaged over the ranks that hold the same experts (expert
data parallel) alone; everything else is averaged over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from eco_dist.moe.capacity import within_capacity
from eco_dist.moe.config import Activation, MoEConfig
from eco_dist.moe.dispatch import Exchange, Order, combine
from eco_dist.moe.grouped import grouped_linear
from eco_dist.moe.router import Routing

Backend = Callable[["Experts", Tensor, Routing], Tensor]
"""`(experts, x [T, D], routing) -> sum_k weight_k expert_k(x) [T, D]`; autocast is off, `x` in the compute dtype."""


class ExpertMLP(nn.Module):
    """The parameters of all experts of this rank."""

    w1: nn.Parameter
    w2: nn.Parameter
    v1: nn.Parameter | None

    def __init__(self, config: MoEConfig) -> None:
        """Make the parameters, empty."""
        super().__init__()
        for name in ("w1", "w2", "v1"):
            wanted = name != "v1" or config.glu
            rows = config.experts * config.hidden
            self.register_parameter(name, nn.Parameter(torch.empty(rows, config.width)) if wanted else None)


class Experts(nn.Module):
    """Send tokens to their experts, compute, and bring the results back.

    Args:
        config: of the layer.

    Attributes:
        group: expert-parallel ranks; None while every expert is here. Set by `moe.parallel`.
        backend: who moves the tokens and multiplies.
    """

    def __init__(self, config: MoEConfig, backend: Backend | None = None) -> None:
        """Make the parameters, empty."""
        super().__init__()
        self.config = config
        self.mlp = ExpertMLP(config)
        self.group: dist.ProcessGroup | None = None
        self.backend: Backend = native if backend is None else backend

    @property
    def ranks(self) -> int:
        """Ranks that share the experts."""
        return 1 if self.group is None else self.group.size()

    @property
    def parts(self) -> int:
        """Ranks that share one expert."""
        return max(1, self.ranks // self.config.experts)

    def weights(self) -> dict[str, Tensor]:
        """This rank's parameters, local tensors with gradient: `w1`, `w2` and with a gate `v1`."""
        return {name: local_weight(parameter) for name, parameter in self.mlp.named_parameters()}

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Outputs of `x [T, D]`: sum_k weight_k expert_k(x), in the dtype of `x` (autocast's where it is on)."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        with torch.autocast(x.device.type, enabled=False):
            return self.backend(self, x, routing)


def native(experts: Experts, x: Tensor, routing: Routing) -> Tensor:
    """Plain torch: sort, exchange, one grouped product a matrix, and back."""
    routing = _to_parts(routing, experts.parts)
    order = Order.by(routing.experts.flatten(), copies=routing.experts.shape[-1])
    exchange = Exchange.among(routing.counts, experts.group, experts.config.wire)
    rows = exchange.to_experts(order.sorted_rows(x))
    rows = within_capacity(rows, exchange.counts, routing.capacity, partial(feed_forward, experts))
    return combine(order.original_rows(exchange.to_tokens(rows)), routing.weights)


def _to_parts(routing: Routing, parts: int) -> Routing:
    """The routing among the parts of experts: to each part of a chosen expert, with the expert's weight."""
    if parts == 1:
        return routing
    each = torch.arange(parts, device=routing.experts.device)
    return routing._replace(
        weights=routing.weights.repeat_interleave(parts, -1),
        experts=(routing.experts.unsqueeze(-1) * parts + each).flatten(-2),
        counts=routing.counts.repeat_interleave(parts),
    )


def feed_forward(experts: Experts, rows: Tensor, counts: Tensor) -> Tensor:
    """act(x w1^T) * (x v1^T) w2, or act(x w1^T) w2, for rows `[T, D]` sorted by the experts of this rank."""
    act, weights = activation(experts.config.activation), experts.weights()
    scaled = experts.config.products == "fp8"
    linear = partial(grouped_linear, counts=counts, grad_scale=1 / experts.ranks, scaled=scaled)
    hidden = act(linear(rows, weights["w1"], inwards=True))
    if experts.config.glu:
        hidden = hidden * linear(rows, weights["v1"], inwards=True)
    return linear(hidden, weights["w2"], inwards=False)


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function of that name."""
    return F.silu if name == "silu" else _gelu_tanh


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def local_weight(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter; its gradient flows back to the parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
