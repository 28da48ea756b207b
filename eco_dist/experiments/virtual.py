"""The virtual weight: does an export that pays the pending rounding errors back lose less than the stored weight?

A model is trained with fp32 weights, then further with FP8 weights, as in `finetune.py`; each checkpoint is exported as
its stored and as its virtual weight (`eco-dist export --virtual`), and both are evaluated as fp32 weights.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eco_dist.checkpoint import export
from eco_dist.experiments.finetune import Settings, finished, pretrain, run_config
from eco_dist.training.config import RecipeConfig, TrainConfig
from eco_dist.training.resume import CHECKPOINTS

if TYPE_CHECKING:
    from rich.table import Table

SIZES = (
    Settings(preset="nano", finetune_steps=400),
    Settings(preset="tiny", pretrain_steps=1500, finetune_steps=400),
    Settings(preset="small", pretrain_steps=1500, finetune_steps=400),
)
RESULT_FILE = "virtual.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """A way to train further; `end` is the last learning rate as a share of the peak."""

    recipe: RecipeConfig
    end: float = 0.0
    injects: bool = True


ARMS = {
    "fp32-master": Arm(recipe=RecipeConfig(name="fp32-master"), injects=False),
    "fp8-master": Arm(recipe=RecipeConfig(name="fp8-master"), injects=False),
    "fp8": Arm(recipe=RecipeConfig()),
    "fp8, end 0.1": Arm(recipe=RecipeConfig(), end=0.1),
    "fp8, paper": Arm(recipe=RecipeConfig(injection="paper")),
    "fp8, displacement": Arm(recipe=RecipeConfig(injection="displacement")),
    "fp8, nearest": Arm(recipe=RecipeConfig(rounding="nearest")),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Losses:
    """Validation losses of one arm at one size: a value a seed. `virtual` is empty where no error is pending."""

    stored: list[float]
    virtual: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Losses by preset and arm."""

    seeds: tuple[int, ...]
    sizes: dict[str, dict[str, Losses]]

    def table(self) -> Table:
        """One line for a size and an arm."""
        from rich.table import Table

        table = Table(title="stored and virtual weights, validation loss in nats")
        for title in ("size", "trained with", "stored weight", "virtual weight", "virtual - stored"):
            table.add_column(title)
        for size, arms in self.sizes.items():
            for name, losses in arms.items():
                change = [a - b for a, b in zip(losses.virtual, losses.stored, strict=False)]
                cells = (losses.stored, losses.virtual)
                shown = [" / ".join(f"{loss:.4f}" for loss in cell) for cell in cells]
                table.add_row(size, name, *shown, " / ".join(f"{gap:+.4f}" for gap in change))
        return table


def run(
    directory: Path,
    *,
    seeds: Sequence[int] = (0, 1),
    sizes: Sequence[Settings] = SIZES,
    arms: Sequence[str] = tuple(ARMS),
) -> Result:
    """Run the study, or what is missing of it in `directory`, and write `virtual.json` there.

    Args:
        directory: where runs go; finished ones are read, not repeated.
        seeds: seeds of weights and batches.
        sizes: settings of each size.
        arms: names of `ARMS`.
    """
    losses: dict[str, dict[str, Losses]] = {}
    for settings in sizes:
        by_arm = {name: Losses(stored=[], virtual=[]) for name in arms}
        for seed in seeds:
            folder = directory / settings.preset / f"seed-{seed}"
            start = pretrain(folder / "pretrained", settings, seed=seed)
            for name in arms:
                _train_and_export(folder / name.replace(", ", "-"), settings, start, seed, ARMS[name], by_arm[name])
        losses[settings.preset] = by_arm
        result = Result(seeds=tuple(seeds), sizes=losses)
        (directory / RESULT_FILE).write_text(json.dumps(dataclasses.asdict(result), indent=2) + "\n", encoding="utf-8")
    return result


def _train_and_export(folder: Path, settings: Settings, start: Path, seed: int, arm: Arm, losses: Losses) -> None:
    config = run_config(
        settings,
        folder / "run",
        seed=seed + 1000,  # other batches than before
        steps=settings.finetune_steps,
        lr=settings.finetune_lr,
        init_from=start,
    )
    config = dataclasses.replace(
        config,
        recipe=arm.recipe,
        schedule=dataclasses.replace(config.schedule, final=arm.end),
        run=dataclasses.replace(config.run, save_every=settings.finetune_steps),
    )
    trained = finished(config)
    if not arm.injects:
        losses.stored.append(trained)
        return
    for is_virtual, column in ((False, losses.stored), (True, losses.virtual)):
        target = folder / ("virtual" if is_virtual else "stored")
        if not (target / "model.safetensors").exists():
            shutil.rmtree(target, ignore_errors=True)
            export(config.run.directory / CHECKPOINTS, target, format="fp32", virtual=is_virtual, force=True)
        column.append(finished(_evaluation(settings, target, seed)))


def _evaluation(settings: Settings, exported: Path, seed: int) -> TrainConfig:
    """A run that evaluates exported weights as fp32 weights: one step at learning rate 0."""
    return run_config(
        settings, exported / "evaluated", seed=seed, steps=1, lr=0.0, init_from=exported / "model.safetensors"
    )
