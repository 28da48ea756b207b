"""The memory of a run: measured after its first step, and for a full report tracked over its third."""

from __future__ import annotations

import dataclasses
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eco_dist.memory import MemoryReport, compare_table
from eco_dist.memory.activations import Batch, TransformerShape
from eco_dist.memory.baselines import resolve
from eco_dist.memory.plan import mesh_for, plan_shape
from eco_dist.memory.render import Page, write_reports
from eco_dist.memory.tensors import module_shape
from eco_dist.models import LlamaConfig, SMoEConfig
from eco_dist.recipe import Recipe
from eco_dist.training.batch import split_batch
from eco_dist.training.config import TrainConfig
from eco_dist.training.display import Display
from eco_dist.training.engine import RunEngine
from eco_dist.training.ranks import Ranks
from eco_dist.training.zero_json import stored_as, zero_options
from eco_dist.weights import DEFAULT_SKIP

__all__ = ["RunMemory", "batch_of", "plan_run", "transformer_shape"]

EXPERTS = ".experts.mlp."
"""In the names of the weights that expert parallelism deals out."""

TRACKED_STEP = 3
"""The first step sets an engine up and the second runs under the wire meter."""


class RunMemory:
    """What a run's ranks hold, planned and measured.

    Attributes:
        measured: after the first step; None before.
    """

    def __init__(self, engine: RunEngine, planned: MemoryReport, baseline: MemoryReport, out: Path | None) -> None:
        """Prepare; `out` is the directory of the full report, None for none."""
        self._engine = engine
        self._planned, self._baseline = planned, baseline
        self._out = out
        self.measured: MemoryReport | None = None

    def around_step(self, number: int) -> AbstractContextManager[object]:
        """Context of a step; `number` counts from 1 where this process began."""
        if self._out is None or number != TRACKED_STEP:
            return nullcontext()
        return self._engine.track()

    def measure(self, directory: Path, display: Display, ranks: Ranks) -> None:
        """Measure, print planned beside measured, and write ``memory.json``; collective.

        Raises:
            MasterCopyError: if a full report is wanted and a master copy survives the step.
        """
        self.measured = self._engine.measure(strict=self._out is not None)
        display.print(compare_table(self._planned, self.measured, self._baseline))
        if ranks.is_first:
            reports = {"planned": self._planned, "measured": self.measured, "baseline": self._baseline}
            content = {name: report.to_json() for name, report in reports.items()}
            (directory / "memory.json").write_text(json.dumps(content, indent=2), encoding="utf-8")

    def finish(self, ranks: Ranks) -> None:
        """Write the full report if one is wanted; collective."""
        if self._out is None or self.measured is None:
            return
        timelines = ranks.gather(self._engine.timeline())
        measured = dataclasses.replace(
            self.measured,
            ranks=tuple(
                dataclasses.replace(rank, holding=dataclasses.replace(rank.holding, timeline=timeline))
                for rank, timeline in zip(self.measured.ranks, timelines, strict=True)
            ),
        )
        if ranks.is_first:
            write_reports(Page(report=self._planned, baseline=self._baseline, measured=measured), self._out)


def transformer_shape(config: LlamaConfig) -> TransformerShape:
    """The sizes that a Llama's activations follow from, with or without experts."""
    sparse: dict[str, int] = {}
    if isinstance(config, SMoEConfig):
        sparse = {
            "expert_hidden": config.moe.hidden,
            "active": config.moe.top_k,
            "shared_hidden": config.moe.shared_hidden,
            "dense_layers": config.dense_layers,
        }
    return TransformerShape(
        layers=config.layers,
        width=config.width,
        vocabulary=config.vocabulary,
        heads=config.heads,
        query=config.width,
        key=config.width,
        value=config.width,
        out=config.width,
        hidden=config.hidden,
        **sparse,
    )


def plan_run(
    model: nn.Module,
    recipe: Recipe | str,
    config: TrainConfig,
    shape: LlamaConfig,
    world_size: int,
    settings: dict[str, Any] | None = None,
) -> MemoryReport:
    """What a run's ranks will hold.

    Args:
        model: as drawn, before it is converted.
        recipe: of the run, or the name of what it is compared with.
        config: of the run.
        shape: of the model.
        world_size: number of ranks.
        settings: DeepSpeed JSON of the run; None for other engines.
    """
    if settings is not None and not isinstance(recipe, str):
        recipe = stored_as(settings, recipe)
    whole = module_shape(
        model,
        resolve(recipe),
        skip=DEFAULT_SKIP,
        also_skip=config.model.keep,
        transformer=transformer_shape(shape),
    )
    is_dealt = config.engine.expert_parallel > 1
    tensors = tuple(
        dataclasses.replace(t, is_expert=is_dealt and EXPERTS in t.name, group=int(len(t.shape) < 2))
        for t in whole.tensors
    )
    return plan_shape(
        dataclasses.replace(whole, tensors=tensors),
        engine=config.engine.layout,
        mesh=mesh_for(config.engine.layout, world_size, ep=config.engine.expert_parallel),
        optimizer=config.optimizer.name,
        batch=batch_of(config, world_size),
        zero=None if settings is None else zero_options(settings),
        backend="nccl" if torch.cuda.is_available() and config.engine.device != "cpu" else "gloo",
    )


def batch_of(config: TrainConfig, world_size: int) -> Batch:
    """What one rank computes at a time."""
    return Batch(
        sequences=split_batch(config, world_size).micro,
        length=config.data.seq_len,
        compute_bytes=2 if config.engine.computes == "bf16" else 4,
    )
