"""Let `deepspeed.initialize` train ECO optimizers: by its own engine, at stage 0 by ours alone, or not at all.

Only public functions of DeepSpeed are touched here. What relies on its inside is imported once the contract holds.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch

from eco_dist.engines.deepspeed.config import SECTION, read_config
from eco_dist.engines.deepspeed.contract import broken_promises, require_contract
from eco_dist.engines.deepspeed.stage0 import initialize_fallback
from eco_dist.engines.deepspeed.universal import LoadsUniversal, TakeOver
from eco_dist.optim import ECOSGD, ECOAdamW, ECOOptimizer

_MARK = "_eco_dist_original"
_broken: list[str] = []
"""What the installed DeepSpeed lacks, as `install` found it."""
_OPTIMIZERS = {optimizer.__name__: optimizer for optimizer in (ECOAdamW, ECOSGD)}


def install(take_over: TakeOver) -> None:
    """Route ECO optimizers; others are untouched. Doing it twice is doing it once.

    Where the installed DeepSpeed lacks what the engine relies on, `deepspeed.initialize` refuses ECO optimizers with
    the list of it, unless the JSON asks for the fallback.

    Args:
        take_over: reads a universal checkpoint: `eco_dist.checkpoint.take_over`.
    """
    LoadsUniversal.take_over = staticmethod(take_over)
    for name, optimizer in _OPTIMIZERS.items():
        setattr(torch.optim, name, optimizer)  # where DeepSpeed looks for "optimizer": {"type": ...}
    if not hasattr(deepspeed.initialize, _MARK):
        deepspeed.initialize = _routed(deepspeed.initialize)
    _broken[:] = broken_promises()
    if not _broken:
        from eco_dist.engines.deepspeed.routing import route

        route()


@functools.wraps(deepspeed.initialize)
def initialize(*args: Any, **kwargs: Any) -> Any:
    """`deepspeed.initialize`, for scripts that would rather name what they use."""
    return deepspeed.initialize(*args, **kwargs)


def _routed(original: Any) -> Any:
    """`deepspeed.initialize` that looks at what it is asked for."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments
        parameters = _json(arguments)
        if _is_eco(arguments.get("optimizer"), parameters):
            if read_config(parameters).fallback:
                return initialize_fallback(original, arguments, parameters, _OPTIMIZERS)
            if _broken:
                require_contract()
        return original(*args, **kwargs)

    setattr(routed, _MARK, original)
    return routed


def _json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that `deepspeed.initialize` is given, in one of its ways; empty if it cannot be read here."""
    config = arguments.get("config") or arguments.get("config_params")
    config = config or getattr(arguments.get("args"), "deepspeed_config", None) or {}
    if isinstance(config, Mapping):
        return dict(config)
    path = Path(config)
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def _is_eco(optimizer: Any, parameters: Mapping[str, Any]) -> bool:
    """Whether an ECO optimizer is asked for; one that a callable makes is known by the section of the JSON."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return isinstance(optimizer, ECOOptimizer)
    named = parameters.get("optimizer", {}).get("type") in _OPTIMIZERS
    return (named and optimizer is None) or (optimizer is not None and SECTION in parameters)
