"""Importing this module lets DeepSpeed train without master weights: `"optimizer": {"type": "ECOAdamW"}` in its JSON.

`initialize` is DeepSpeed's own, for scripts that would rather name what they use. `measure` says what an engine holds,
`monitor_memory` tells DeepSpeed's monitors.
"""

from __future__ import annotations

import dataclasses
from typing import Any

try:
    import deepspeed as _deepspeed  # noqa: F401
except ImportError as error:
    raise ImportError(
        "eco_dist.deepspeed needs DeepSpeed; install it with: pip install 'eco-dist[deepspeed]'"
    ) from error

from eco_dist.checkpoint import take_over
from eco_dist.engines.deepspeed.config import EcoConfig
from eco_dist.engines.deepspeed.experts import shard_experts
from eco_dist.engines.deepspeed.fallback import FallbackOptimizer
from eco_dist.engines.deepspeed.install import initialize, install
from eco_dist.engines.deepspeed.memory import ZeroMemory
from eco_dist.memory import MemoryReport
from eco_dist.memory import measure as _measure
from eco_dist.memory.callbacks import monitor_events

__all__ = ["EcoConfig", "FallbackOptimizer", "initialize", "measure", "monitor_memory", "shard_experts"]


def measure(engine: Any, *, check: bool = False, strict: bool = False) -> MemoryReport:
    """What every rank of a DeepSpeed engine holds between steps, whichever optimizer it has. Collective.

    Args:
        engine: what `initialize` returned, after a step.
        check: see `eco_dist.memory.measure`.
        strict: see `eco_dist.memory.measure`.

    Raises:
        MasterCopyError: if `strict`, and an fp32 tensor as large as a quantized weight belongs to nothing.
    """
    held = ZeroMemory(engine.optimizer, engine.module)
    report = _measure(engine.module, held, check=check, strict=strict)
    return dataclasses.replace(
        report,
        engine=f"zero{engine.zero_optimization_stage()}",
        optimizer=type(engine.basic_optimizer).__name__,
        parameters=sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
    )


def monitor_memory(engine: Any, *, strict: bool = True) -> MemoryReport:
    """Measure, and write a line of each number to the monitors of the engine's JSON (tensorboard, wandb, csv, comet).

    Collective; call it after `engine.step()`, now and then.

    Args:
        engine: what `initialize` returned.
        strict: see `measure`.

    Raises:
        MasterCopyError: see `measure`.
    """
    report = measure(engine, strict=strict)
    engine.monitor.write_events(monitor_events(report, engine.global_samples))
    return report


install(take_over)
