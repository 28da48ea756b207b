"""What `eco-dist memory` does, without its parsing: plan a model on a cluster, say what would fit, write reports."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from torch import nn

from eco_dist.memory.activations import Batch, TransformerShape
from eco_dist.memory.architectures import Experts
from eco_dist.memory.baselines import resolve
from eco_dist.memory.diff import diff_table
from eco_dist.memory.fit import largest_batch, parse_bytes, smallest_world
from eco_dist.memory.layouts import ZeroOptions, layout_of
from eco_dist.memory.layouts.zero import WorkingCopy
from eco_dist.memory.peak import Backend
from eco_dist.memory.plan import mesh_for, plan_shape
from eco_dist.memory.public import find_architecture, unknown_model
from eco_dist.memory.render import Page, write_reports
from eco_dist.memory.report import MemoryReport, format_bytes
from eco_dist.memory.schema import read_report
from eco_dist.memory.tensors import ModelShape, module_shape
from eco_dist.weights import DEFAULT_SKIP

OVER_BUDGET = 3
"""Exit code of a plan or measurement that does not fit."""

Preset = tuple[nn.Module, TransformerShape]
"""A module on the meta device, and the sizes of its layers."""

Engine = Literal["single", "fsdp2", "fsdp1", "zero0", "zero1", "zero2", "zero3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Predict what every rank of a cluster will hold, on this machine, before anything is rented.

    Args:
        model: a public model (llama-3-8b, deepseek-v3, ...), a preset of `train`, or a Hugging Face config.json.
        recipe: a recipe, or a baseline such as bf16-master.
        baseline: what to hold beside it; `none` for nothing.
        engine: who shards.
        world_size: number of ranks; default 8, or 1 for engine single.
        shards: ranks that share one copy of the model; fewer than world-size is HSDP.
        ep: expert parallelism.
        tp: tensor parallelism; no engine has it for quantized weights.
        experts: how experts are stored: one matrix (flat), one 3-D tensor (stacked), or apart (separate).
        optimizer: adamw or sgd.
        batch: sequences a rank computes at a time.
        length: tokens of a sequence.
        compute: dtype of forward and backward.
        backend: what carries gradients; gloo, on CPUs, copies what it reduces.
        checkpoint: recompute every block in backward.
        step_in_backward: step weights as soon as their gradient is there.
        working_copy: what forward reads at ZeRO 1 and 2, as in the JSON's `eco` section.
        reduce_bucket: `reduce_bucket_size` of the DeepSpeed JSON, elements.
        budget: memory of a device, such as 80GiB; exit code 3 if a rank needs more.
        out: directory for report.json, report.md, report.html and report.png.
    """

    model: tyro.conf.Positional[str]
    recipe: str = "fp8"
    baseline: str = "bf16-master"
    engine: Engine = "fsdp2"
    world_size: int | None = None
    shards: int | None = None
    ep: int = 1
    tp: int = 1
    experts: Experts = "flat"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    batch: int = 1
    length: int = 4096
    compute: Literal["bf16", "fp32"] = "bf16"
    backend: Backend = "nccl"
    checkpoint: bool = True
    step_in_backward: bool = False
    working_copy: WorkingCopy = "replica"
    reduce_bucket: int = ZeroOptions.reduce_bucket
    budget: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    out: Path | None = None

    def execute(self, console: Console, find_preset: Callable[[str], Preset | None], presets: Iterable[str]) -> int:
        """Plan, print, write; returns the exit code.

        Args:
            console: prints the tables.
            find_preset: a preset by name; None for an unknown one.
            presets: their names, for an error.

        Raises:
            ValueError: for an unknown model, recipe or size, or a mesh that does not exist.
        """
        find = functools.partial(self._model, find_preset=find_preset, presets=tuple(presets))
        model = find(self.recipe)
        report = self._plan(model)
        baseline = None if self.baseline == "none" else self._plan(find(self.baseline))
        page = Page(report=report, baseline=baseline)
        console.print(report.table())
        console.print(" ".join(filter(None, (page.verdict(), page.saving()))), highlight=False)
        for sentence in report.assumptions:
            console.print(f"- {sentence}", highlight=False)
        if report.budget is not None:
            console.print(self._advice(model, report), highlight=False)
        if self.out is not None:
            write_reports(page, self.out)
            console.print(f"wrote {self.out}", highlight=False)
        return OVER_BUDGET if report.fits is False else 0

    def _model(
        self, recipe: str, *, find_preset: Callable[[str], Preset | None], presets: tuple[str, ...]
    ) -> ModelShape:
        chosen = resolve(recipe)
        preset = find_preset(self.model)
        if preset is not None:
            module, transformer = preset
            return module_shape(module, chosen, skip=DEFAULT_SKIP, transformer=transformer, name=self.model)
        architecture = find_architecture(self.model, experts=self.experts)
        if architecture is None:
            raise unknown_model(self.model, presets)
        return architecture.stored(chosen)

    def _plan(self, model: ModelShape, *, world_size: int | None = None, batch: int | None = None) -> MemoryReport:
        one_rank = layout_of(self.engine).one_rank
        world = world_size or self.world_size or (1 if one_rank else 8)
        return plan_shape(
            model,
            engine=self.engine,
            mesh=mesh_for(self.engine, world, shards=self.shards, ep=self.ep, tp=self.tp),
            optimizer=self.optimizer,
            batch=Batch(
                sequences=batch or self.batch,
                length=self.length,
                compute_bytes=2 if self.compute == "bf16" else 4,
                checkpoints=self.checkpoint,
            ),
            in_backward=self.step_in_backward,
            budget=None if self.budget is None else parse_bytes(self.budget),
            zero=ZeroOptions(working_copy=self.working_copy, reduce_bucket=self.reduce_bucket),
            backend=self.backend,
        )

    def _advice(self, model: ModelShape, report: MemoryReport) -> str:
        """What fits instead, or how much more would."""
        assert report.budget is not None
        budget = format_bytes(report.budget)
        if report.fits:
            largest = largest_batch(lambda batch: self._plan(model, batch=batch))
            return f"Largest batch that fits into {budget}: {largest} sequences of {self.length:,} tokens a rank."
        if layout_of(self.engine).one_rank:
            return f"One process cannot hold it in {budget}; choose engine fsdp2."
        start = self.ep if self.shards is None else self.shards
        world = smallest_world(lambda size: self._plan(model, world_size=size), start=start)
        if world is None or world <= len(report.ranks):
            return (
                f"No world up to 16,384 ranks fits into {budget} as it is; choose a smaller batch or length, "
                "a smaller recipe such as fp8-8bit, or --step-in-backward."
            )
        return f"It fits into {budget} from {world:,} ranks on (powers of two tried); or choose a smaller recipe."


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureRequest:
    """Train three steps, and report what every rank holds and what comes and goes; several ranks under torchrun.

    Args:
        config: YAML file of a run; without it every key has its default.
        overrides: changes to it, as section.key=value.
        out: directory for report.json, measured.json, report.md, report.html and report.png.
        budget: memory of a device, such as 80GiB; exit code 3 if a rank needs more.
    """

    config: Path | None = None
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    out: Path = Path("runs/memory")
    budget: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None

    @property
    def settings(self) -> tuple[str, ...]:
        """Overrides that make a short run of it, for its directory alone."""
        run = {"steps": 3, "directory": self.out / "run", "overwrite": "true", "plot": "false", "save_weights": "false"}
        return tuple(f"run.{key}={value}" for key, value in run.items())

    def verdict(self, console: Console) -> int:
        """Print what was measured; returns the exit code."""
        budget = None if self.budget is None else parse_bytes(self.budget)
        report = dataclasses.replace(read_report(self.out / "measured.json"), budget=budget)
        console.print(report.table())
        console.print(Page(report=report).verdict(), highlight=False)
        console.print(f"wrote {self.out}", highlight=False)
        return OVER_BUDGET if report.fits is False else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffRequest:
    """Compare two memory reports: what one holds that the other does not.

    Args:
        before: report.json of a plan or measurement, or memory.json of a run.
        after: another one.
    """

    before: tyro.conf.Positional[Path]
    after: tyro.conf.Positional[Path]

    def execute(self, console: Console) -> int:
        """Print the table; returns the exit code."""
        console.print(diff_table(read_report(self.before), read_report(self.after)))
        return 0
