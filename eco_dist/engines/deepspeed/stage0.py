"""`deepspeed.initialize` of a script for stage 1, 2 or 3, at stage 0 with the optimizer of `fallback.py`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from eco_dist.engines.deepspeed.config import AUTO, SECTION, read_config
from eco_dist.engines.deepspeed.fallback import FallbackOptimizer
from eco_dist.optim import ECOOptimizer

_REPLACED = ("optimizer", "bf16", "fp16", "data_types", "zero_optimization", "zero_allow_untested_optimizer", SECTION)
"""Sections of the JSON that the fallback stands for."""


def initialize_fallback(
    initialize: Callable[..., Any],
    arguments: Mapping[str, Any],
    parameters: Mapping[str, Any],
    optimizers: Mapping[str, type[ECOOptimizer]],
) -> Any:
    """`deepspeed.initialize` of the same script at stage 0, with a `FallbackOptimizer`.

    Args:
        initialize: DeepSpeed's own.
        arguments: of it, by name.
        parameters: the JSON.
        optimizers: classes by the name they have in the JSON.

    Raises:
        ValueError: for what stage 0 cannot do.
        TypeError: if the optimizer is no ECO one.
    """
    _refuse(arguments["model"], parameters)
    model: nn.Module = arguments["model"]
    if _is_on(parameters, "bf16"):
        model.bfloat16()

    def make(model_parameters: Any) -> FallbackOptimizer:
        client: Any = arguments.get("optimizer")
        if client is None:
            named = parameters["optimizer"]
            options = {k: v for k, v in named.get("params", {}).items() if v != AUTO}
            client = optimizers[named["type"]](model_parameters or model.parameters(), **options)
        elif not isinstance(client, torch.optim.Optimizer):
            client = client(model_parameters)
        if not isinstance(client, ECOOptimizer):
            raise TypeError(
                f"expected an ECO optimizer for the 'eco' section's 'fallback', got {type(client).__name__}"
            )
        return FallbackOptimizer(model, client, read_config(dict(parameters)))

    json = {key: value for key, value in parameters.items() if key not in _REPLACED}
    json["zero_optimization"] = {"stage": 0}
    changed = {**arguments, "args": copy.copy(arguments.get("args")), "optimizer": make, "config": json}
    changed.pop("config_params", None)
    if hasattr(changed["args"], "deepspeed_config"):
        changed["args"].deepspeed_config = None
    result = initialize(**changed)
    if dist.get_rank() == 0:
        warnings.warn(
            "ECO trains at ZeRO stage 0, as 'fallback' in the 'eco' section asks: codes and moments are cut among the "
            "ranks, but every rank keeps the whole model and its gradients in 16 bits or what it was cast to",
            stacklevel=3,
        )
    return result


def _refuse(model: nn.Module, parameters: Mapping[str, Any]) -> None:
    partitioned = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    refused: Sequence[tuple[bool, str, str]] = (
        (_is_on(parameters, "fp16"), "fp16", "use bf16"),
        (partitioned, "deepspeed.zero.Init", "build the model without it"),
        (
            bool(parameters.get("checkpoint", {}).get("load_universal")),
            "load_universal",
            "read the checkpoint with eco_dist.checkpoint.take_over(path, engine, engine.optimizer)",
        ),
    )
    for asked, what, advice in refused:
        if asked:
            raise ValueError(f"the fallback of ECO at stage 0 does not work with {what}; {advice}")


def _is_on(parameters: Mapping[str, Any], section: str) -> bool:
    return parameters.get(section, {}).get("enabled", False) is True
