"""Which parameters of a DeepSpeed model become codes, and the parameter groups that follow from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eco_dist.engines.deepspeed.config import EcoConfig
from eco_dist.engines.flat.shards import PlannedWeight, ShardOptimizer
from eco_dist.optim import ECOOptimizer
from eco_dist.weights import QuantizedWeight, plan_conversion
from eco_dist.weights.convert import tensor_ids


class WeightPlan:
    """What became codes: parameters and their `PlannedWeight`."""

    def __init__(self, weights: Mapping[int, PlannedWeight], config: EcoConfig) -> None:
        """Hold a plan; see `plan_weights`."""
        self._weights = dict(weights)
        self.config = config

    def get(self, parameter: Tensor) -> PlannedWeight | None:
        """The plan of a parameter; None if it stays in high precision."""
        return self._weights.get(id(parameter))

    def __getitem__(self, parameter: Tensor) -> PlannedWeight:
        """The plan of a parameter that becomes codes."""
        return self._weights[id(parameter)]


def plan_weights(model: nn.Module, config: EcoConfig) -> WeightPlan:
    """Decide, by the same rules as `quantize_weights_`, what becomes codes.

    Args:
        model: the plain model, partitioned by `deepspeed.zero.Init` or not.
        config: the `eco` section.
    """
    named = dict(model.named_parameters())
    with _whole_shapes(list(named.values())):
        report = plan_conversion(model, config.resolved(), skip=config.skip, also_skip=config.also_skip)
    chosen = [c for c in report.conversions if c.recipe is not None and named[c.names[0]].requires_grad]
    streams = [_stream_name(c.names[0], named[c.names[0]]) for c in chosen]
    ids = tensor_ids(_stream_name(c.names[0], named[c.names[0]]) for c in report.conversions)
    weights = {}
    for conversion, stream in zip(chosen, streams, strict=True):
        assert conversion.recipe is not None
        name = conversion.names[0]
        weights[id(named[name])] = PlannedWeight(
            name=name, shape=conversion.shape, recipe=conversion.recipe, tensor_id=ids[stream]
        )
    return WeightPlan(weights, config)


def refuse_quantized(model: nn.Module) -> None:
    """Refuse a converted model: DeepSpeed casts and moves parameters, which a quantized weight does not allow.

    Raises:
        ValueError: names the first quantized weight.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, QuantizedWeight):
            raise ValueError(
                f"expected a plain model for DeepSpeed, got the quantized weight '{name}'; leave out "
                "quantize_weights_: the 'eco' section of the DeepSpeed JSON says what becomes codes"
            )


def split_optimizer(client: ECOOptimizer, plan: WeightPlan) -> ShardOptimizer:
    """The client's optimizer with every group split by how its parameters are stored.

    Raises:
        ValueError: if the client is to clip by itself, which DeepSpeed's own norm does here.
    """
    if client.max_grad_norm is not None:
        raise ValueError(
            f"expected clipping in the DeepSpeed JSON, got max_grad_norm={client.max_grad_norm} in the optimizer; set "
            "gradient_clipping instead"
        )
    groups: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for source in client.param_groups:
        parts: dict[int, list[Tensor]] = {}
        for parameter in source["params"]:
            weight = plan.get(parameter)
            parts.setdefault(0 if weight is None else weight.units.columns, []).append(parameter)
        groups += [({**source, "params": parts[columns]}, source) for columns in sorted(parts)]
    optimizer = ShardOptimizer(client, groups)
    if plan.config.seed is not None:
        optimizer.seed = plan.config.seed
    return optimizer


def is_expert(parameter: Tensor) -> bool:
    """Whether a parameter has DeepSpeed's mark of experts, whose values differ between ranks under the same name."""
    return not getattr(parameter, "allreduce", True)


def _stream_name(name: str, parameter: Tensor) -> str:
    """Experts have the same name on every rank of their expert-parallel group, and must not round alike."""
    if not is_expert(parameter):
        return name
    from deepspeed.utils import groups as process_groups

    rank = process_groups._get_expert_parallel_rank(vars(parameter)["group_name"])
    return name if rank == 0 else f"{name}@expert-parallel-{rank}"


@contextlib.contextmanager
def _whole_shapes(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Let parameters that `zero.Init` has partitioned show their global shape; nothing weight-sized is allocated."""
    partitioned = [(p, p.data) for p in parameters if hasattr(p, "ds_shape") and p.shape != p.ds_shape]
    try:
        for parameter, data in partitioned:
            parameter.data = torch.zeros(1, dtype=data.dtype, device=data.device).expand(vars(parameter)["ds_shape"])
        yield
    finally:
        for parameter, data in partitioned:
            parameter.data = data
