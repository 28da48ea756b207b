"""megablocks' own experts over our parameters.

Its `ParallelDroplessMLP` (what `megablocks.dMoE` calls its experts), or `ParallelMLP` where there is a capacity, sorts,
exchanges and multiplies; our router decides, in fp32. The object is built on the meta device and gets this rank's
weights for each call, so a layer has one set of parameters whatever its backend, and a quantized weight is decoded for
the call: what autograd would keep of the decoded weight for backward is replaced by the codes, and decoded again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eco_dist.moe.config import MoEConfig
from eco_dist.moe.experts import Experts, activation
from eco_dist.moe.megablocks_import import import_megablocks
from eco_dist.moe.router import Routing
from eco_dist.weights import QuantizedWeight

Implementation = Literal["grouped", "sparse"]
SPARSE_BLOCK = 128
"""The sparse products of stk work on blocks of this size; megablocks counts them whatever the implementation."""


class MegaBlocks:
    """Backend `megablocks` of a layer.

    Args:
        config: of the layer.
        implementation: `grouped` (any size) or `sparse` (stk's Triton kernels; sizes in multiples of 128).

    Raises:
        ValueError: if megablocks is missing, is another version than 0.10, or cannot do what `config` asks for.
    """

    def __init__(self, config: MoEConfig, implementation: Implementation = "grouped") -> None:
        """Import megablocks and check the request."""
        import_megablocks()
        _check_supported(config)
        if implementation == "sparse":
            _check_sparse(config)
        self.config, self.implementation = config, implementation
        self._built: tuple[nn.Module, dist.ProcessGroup | None] | None = None

    def __call__(self, experts: Experts, x: Tensor, routing: Routing) -> Tensor:
        """See `eco_dist.moe.experts.Backend`."""
        if self._built is None or self._built[1] is not experts.group:
            _check_ranks(experts)
            self._built = self._build(experts), experts.group
        theirs: Any = self._built[0]
        with _bound(theirs.mlp, experts.weights(), x.dtype, self._layouts(experts)):
            # Sequence, batch and features: megablocks flattens the first two again.
            out: Tensor = theirs(x.unsqueeze(1), None, routing.weights.to(x.dtype), routing.experts)
        return out.squeeze(1)

    def _layouts(self, experts: Experts) -> dict[str, Callable[[Tensor], Tensor]]:
        """Views of our weights `[E F, D]` as the layer with a capacity wants them: w1 `[E, D, F]`, w2 `[E, F, D]`."""
        if self.config.capacity_factor is None:
            return {}
        shape = (self.config.experts // experts.ranks, self.config.hidden, self.config.width)
        return {"w1": lambda weight: weight.view(shape).mT, "w2": lambda weight: weight.view(shape)}

    def _build(self, experts: Experts) -> nn.Module:
        """The experts of megablocks, without storage."""
        config = self.config
        with_capacity = config.capacity_factor is not None
        module, name = ("moe", "ParallelMLP") if with_capacity else ("dmoe", "ParallelDroplessMLP")
        arguments = importlib.import_module("megablocks.layers.arguments").Arguments(
            hidden_size=config.width,
            ffn_hidden_size=config.hidden,
            bias=False,
            return_bias=False,
            activation_fn=activation(config.activation),
            moe_num_experts=config.experts,
            moe_top_k=config.top_k,
            moe_capacity_factor=config.capacity_factor or 1,
            moe_loss_weight=0.0,  # megablocks would collect losses in a global list; ours are values
            moe_expert_model_parallelism=experts.group is not None,
            expert_parallel_group=experts.group,
            mlp_type="glu" if config.glu else "mlp",
            mlp_impl=self.implementation,
            fp16=False,
            device=torch.device("meta"),
        )
        built: nn.Module = getattr(importlib.import_module(f"megablocks.layers.{module}"), name)(arguments)
        mlp: Any = built.mlp
        for weight in [weight for weight, _ in mlp.named_parameters()]:
            delattr(mlp, weight)  # each call brings its own
        return built


@contextmanager
def _bound(
    mlp: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype, layouts: dict[str, Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """Give megablocks' module its weights in the compute dtype, and keep codes instead of decoded weights."""
    decoded: dict[int, QuantizedWeight] = {}
    for name, weight in weights.items():
        values = weight.dequantize(dtype) if isinstance(weight, QuantizedWeight) else weight.to(dtype)
        if isinstance(weight, QuantizedWeight):
            decoded[values.untyped_storage().data_ptr()] = weight
        vars(mlp)[name] = layouts[name](values) if name in layouts else values

    def pack(saved: Tensor) -> Tensor | tuple[Any, ...]:
        weight = decoded.get(saved.untyped_storage().data_ptr()) if saved.numel() else None
        if weight is None:
            return saved
        return weight, saved.dtype, saved.shape, saved.stride(), saved.storage_offset()

    def unpack(kept: Tensor | tuple[Any, ...]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        weight, kind, *layout = kept
        values: Tensor = weight.decode(kind).as_strided(*layout)
        return values

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
    finally:
        for name in weights:
            vars(mlp).pop(name, None)


def _check_supported(config: MoEConfig) -> None:
    """Refuse what megablocks has no form of."""
    for name in ("wire", "products"):
        if getattr(config, name) != "full":
            raise ValueError(
                f"expected {name} 'full' with backend megablocks, which has no other, got {getattr(config, name)!r}; "
                "use backend 'native'"
            )
    if config.capacity_factor is not None and config.glu:
        raise ValueError(
            "expected experts of two matrices (glu=False) for megablocks with a capacity, got three; "
            "use backend 'native'"
        )
    if config.hidden * config.experts < SPARSE_BLOCK:
        raise ValueError(
            f"expected hidden * experts of at least {SPARSE_BLOCK} for megablocks, got {config.hidden} * "
            f"{config.experts}; use backend 'native'"
        )


def _check_ranks(experts: Experts) -> None:
    """Refuse expert parallelism that megablocks does in another way."""
    if experts.parts > 1:
        raise ValueError(
            f"expected at most {experts.config.experts} ranks for as many experts with backend megablocks, which cuts "
            f"hidden features in another order, got {experts.ranks}; use backend 'native'"
        )
    if experts.ranks > 1 and experts.config.capacity_factor is not None:
        raise ValueError(
            "expected no capacity with backend megablocks on several ranks, where it takes top_k times the capacity, "
            f"got {experts.config.capacity_factor}; use backend 'native'"
        )


def _check_sparse(config: MoEConfig) -> None:
    """Say early what megablocks and stk would say late or not at all."""
    if config.width % SPARSE_BLOCK or config.hidden % SPARSE_BLOCK:
        raise ValueError(
            f"expected width and hidden in multiples of {SPARSE_BLOCK} for megablocks' sparse products, got "
            f"{config.width} and {config.hidden}; use implementation 'grouped'"
        )
    triton = importlib.import_module("triton")
    if triton.__version__ >= "3.2.0":  # megablocks compares these as strings, so we do
        raise ValueError(
            f"expected triton before 3.2 for megablocks' sparse products, got {triton.__version__}, which "
            "megablocks.Arguments() refuses; use implementation 'grouped'"
        )
