"""Fine-tuning trained weights: where dropping the rounding error hurts, and what each recipe costs in loss.

A small model is trained with fp32 weights on real text, then trained further from those weights with every recipe, on
the same batches. Short runs from scratch at a high learning rate do not separate the recipes: naive stochastic rounding
looks fine there. The loss that naive rounding adds grows like 1/lr (ECO, appendix C), so it shows here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from eco_dist.training import TrainConfig, read_summary, train
from eco_dist.training.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RecipeConfig,
    RunConfig,
    ScheduleConfig,
)
from eco_dist.training.summary import SUMMARY_FILE

if TYPE_CHECKING:
    from rich.table import Table

RECIPES = ("fp32-master", "fp8-master", "fp8", "fp8-bf16", "fp8-8bit", "fp8-residual", "fp8-naive")
EXPERT_RECIPES = ("fp32-master", "fp8-master", "fp8", "fp8-8bit", "fp8-naive")
RESULT_FILE = "finetune.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Size of the study; the defaults are those of the table in docs/convergence.md.

    Attributes:
        preset: model size.
        batch: sequences a step.
        seq_len: tokens a sequence.
        pretrain_steps: steps with fp32 weights at `pretrain_lr`.
        finetune_steps: steps with each recipe at `finetune_lr`, warmup 10 %, cosine to zero.
        eval_sequences: held-out sequences of the final validation.
    """

    preset: str = "nano"
    batch: int = 16
    seq_len: int = 64
    pretrain_steps: int = 3000
    pretrain_lr: float = 3e-3
    finetune_steps: int = 600
    finetune_lr: float = 1e-3
    eval_sequences: int = 2048


EXPERT_SETTINGS = Settings(preset="smoe-tiny", pretrain_steps=1500, finetune_steps=400)
"""The same study of a mixture of experts, whose table is in docs/moe.md."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Validation losses of the study: recipe -> one value a seed, in the order of `seeds`."""

    seeds: tuple[int, ...]
    settings: Settings
    val_loss: dict[str, list[float]]

    def gap(self, recipe: str, reference: str) -> list[float]:
        """Validation loss of a recipe minus that of another, per seed, in nats."""
        return [a - b for a, b in zip(self.val_loss[recipe], self.val_loss[reference], strict=True)]

    def table(self) -> Table:
        """One line a recipe: losses of the seeds, and the mean gap to fp32 weights and to FP8 master weights."""
        from rich.table import Table

        table = Table(title=f"fine-tuning {self.settings.preset}, validation loss in nats")
        table.add_column("recipe")
        for seed in self.seeds:
            table.add_column(f"seed {seed}", justify="right")
        for reference in ("fp32-master", "fp8-master"):
            table.add_column(f"over {reference}", justify="right")
        for recipe, losses in self.val_loss.items():
            gaps = [self.gap(recipe, reference) for reference in ("fp32-master", "fp8-master")]
            cells = [f"{loss:.4f}" for loss in losses] + [f"{sum(gap) / len(gap):+.4f}" for gap in gaps]
            table.add_row(recipe, *cells)
        return table


def run(
    directory: Path,
    *,
    seeds: Sequence[int] = (0, 1),
    recipes: Sequence[str] = RECIPES,
    settings: Settings | None = None,
) -> Result:
    """Run the study, or what is missing of it in `directory`, and write `finetune.json` there.

    Args:
        directory: where runs go; finished ones are read, not repeated.
        seeds: seeds of weights and batches.
        recipes: recipes to fine-tune with; the two master recipes are needed for the table.
        settings: size of the study.
    """
    settings = settings or Settings()
    losses: dict[str, list[float]] = {recipe: [] for recipe in recipes}
    for seed in seeds:
        start = pretrain(directory / f"seed-{seed}" / "pretrained", settings, seed=seed)
        for recipe in recipes:
            config = run_config(
                settings,
                directory / f"seed-{seed}" / recipe,
                seed=seed + 1000,  # other batches than before
                steps=settings.finetune_steps,
                lr=settings.finetune_lr,
                recipe=recipe,
                init_from=start,
            )
            losses[recipe].append(finished(config))
    result = Result(seeds=tuple(seeds), settings=settings, val_loss=losses)
    content = {"seeds": list(seeds), "settings": dataclasses.asdict(settings), "val_loss": losses}
    (directory / RESULT_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return result


def pretrain(directory: Path, settings: Settings, *, seed: int) -> Path:
    """The trained weights every study starts from, a safetensors file; trained now unless `directory` has them."""
    finished(run_config(settings, directory, seed=seed, steps=settings.pretrain_steps, lr=settings.pretrain_lr))
    return directory / "weights.safetensors"


def run_config(
    settings: Settings,
    directory: Path,
    *,
    seed: int,
    steps: int,
    lr: float,
    recipe: str = "fp32-master",
    init_from: Path | None = None,
) -> TrainConfig:
    """A run of a study.

    Args:
        settings: size of the study.
        directory: of the run.
        seed: of weights and batches.
        steps: steps, with warmup and cosine to zero.
        lr: largest learning rate.
        recipe: name of a recipe.
        init_from: weights to start from.
    """
    return TrainConfig(
        model=ModelConfig(preset=settings.preset, init_from=init_from),
        recipe=RecipeConfig(name=recipe),
        data=DataConfig(seq_len=settings.seq_len, batch=settings.batch),
        optimizer=OptimizerConfig(lr=lr, beta2=0.95),
        schedule=ScheduleConfig(final=0.0),
        run=RunConfig(
            directory=directory,
            steps=steps,
            seed=seed,
            log_every=100,
            eval_every=steps,
            eval_sequences=settings.eval_sequences,
            overwrite=True,
            plot=False,
        ),
    )


def finished(config: TrainConfig) -> float:
    """Final validation loss of a run, which is done now unless it was before."""
    directory = config.run.directory
    summary = read_summary(directory) if (directory / SUMMARY_FILE).exists() else train(config)
    return summary.val_loss
