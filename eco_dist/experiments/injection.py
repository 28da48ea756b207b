"""How the error should enter the momentum: every form of injection through every scenario, on real text.

The scenarios are those of `scenarios.py`; the model, the text and the trained weights are those of `finetune.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eco_dist.engines import single
from eco_dist.experiments import finetune
from eco_dist.experiments.scenarios import BASELINE, SCENARIOS, Scenario, arms_of
from eco_dist.models import Llama, llama_config, next_token_loss
from eco_dist.optim import ECOOptimizer
from eco_dist.recipe import Recipe
from eco_dist.training.build import Text, build_optimizer, open_text
from eco_dist.training.config import DataConfig, EngineConfig, OptimizerConfig, RunConfig, TrainConfig
from eco_dist.training.evaluate import Evaluator
from eco_dist.training.plain_weights import load_plain_weights
from eco_dist.training.ranks import Ranks, open_ranks
from eco_dist.training.sampler import WindowSampler
from eco_dist.weights import QuantizedWeight

if TYPE_CHECKING:
    from rich.table import Table

WATCH = 100
"""Steps after an event in which the largest training loss is looked for."""

SMOOTHING = 5
"""Steps a training loss is averaged over first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Course:
    """How one arm went through one scenario.

    Attributes:
        losses: training loss of every step.
        val_loss: validation loss after the last one.
        largest_momentum: of any quantized weight after the last one, in units of exp_avg; None if it is in 8 bits.
    """

    losses: list[float]
    val_loss: float
    largest_momentum: float | None

    def worst_after(self, step: int) -> float:
        """Largest smoothed training loss in the `WATCH` steps from `step` on."""
        window = self.losses[step : step + WATCH]
        return max(sum(window[i : i + SMOOTHING]) / SMOOTHING for i in range(len(window) - SMOOTHING + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Courses of the study: scenario -> arm -> one course a seed."""

    seeds: tuple[int, ...]
    courses: dict[str, dict[str, list[Course]]]

    def gaps(self, scenario: str, arm: str) -> list[float]:
        """Validation loss over FP8 master weights in the same scenario, per seed, in nats."""
        own, base = self.courses[scenario][arm], self.courses[scenario][BASELINE]
        return [a.val_loss - b.val_loss for a, b in zip(own, base, strict=True)]

    def spikes(self, scenario: Scenario, arm: str) -> list[float] | None:
        """Worst training loss after the event over that of FP8 master weights, per seed; None without an event."""
        if scenario.event is None:
            return None
        own, base = self.courses[scenario.name][arm], self.courses[scenario.name][BASELINE]
        at = scenario.event
        return [a.worst_after(at) - b.worst_after(at) for a, b in zip(own, base, strict=True)]

    def table(self) -> Table:
        """One line an arm and scenario."""
        from rich.table import Table

        table = Table(title="validation loss over FP8 master weights, in nats, one number a seed")
        for column in ("scenario", "injection"):
            table.add_column(column)
        for column in ("final loss", "worst after the event", "largest momentum"):
            table.add_column(column, justify="right")
        for scenario in SCENARIOS:
            for arm, courses in self.courses.get(scenario.name, {}).items():
                sizes = [course.largest_momentum for course in courses]
                cells = [_signed(self.gaps(scenario.name, arm)), _signed(self.spikes(scenario, arm))]
                largest = " ".join("-" if size is None else f"{size:.2g}" for size in sizes)
                table.add_row(scenario.name, arm, *cells, largest, end_section=arm == list(arms_of(scenario))[-1])
        return table


def run(
    directory: Path,
    *,
    seeds: Sequence[int] = (0, 1),
    scenarios: Sequence[Scenario] = SCENARIOS,
    eval_windows: int = 2048,
) -> Result:
    """Run the study, or what is missing of it in `directory`.

    Args:
        directory: finished courses are read from there, not repeated; `finetune`'s pretrained weights too.
        seeds: seeds of weights and batches.
        scenarios: which ones.
        eval_windows: held-out sequences of the final validation.
    """
    settings = finetune.Settings()
    courses: dict[str, dict[str, list[Course]]] = {}
    for seed in seeds:
        home = directory / f"seed-{seed}"
        weights = finetune.pretrain(home / "pretrained", settings, seed=seed)
        data = DataConfig(seq_len=settings.seq_len, batch=settings.batch)
        config = TrainConfig(data=data, run=RunConfig(directory=home / "pretrained", seed=seed))
        with open_ranks(EngineConfig()) as ranks:
            text = open_text(config, ranks)
            for scenario, (arm, recipe) in _pairs(scenarios):
                path = home / scenario.name / f"{arm.replace(', ', '-').replace(' ', '-')}.json"
                if not path.exists():
                    start = None if scenario.fresh else weights
                    course = _course(scenario, recipe, start, text, ranks, seed=seed + 1000, eval_windows=eval_windows)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(json.dumps(dataclasses.asdict(course)), encoding="utf-8")
                course = Course(**json.loads(path.read_text(encoding="utf-8")))
                courses.setdefault(scenario.name, {}).setdefault(arm, []).append(course)
    return Result(seeds=tuple(seeds), courses=courses)


def _pairs(scenarios: Sequence[Scenario]) -> list[tuple[Scenario, tuple[str, Recipe]]]:
    return list(itertools.chain.from_iterable(itertools.product([s], arms_of(s).items()) for s in scenarios))


def _course(
    scenario: Scenario, recipe: Recipe, weights: Path | None, text: Text, ranks: Ranks, *, seed: int, eval_windows: int
) -> Course:
    """One arm through one scenario, on one process."""
    settings = finetune.Settings()
    model = Llama(llama_config(settings.preset, vocabulary=text.vocabulary), seed=seed)
    if weights is not None:
        load_plain_weights(model, weights)
    single.prepare(model, recipe)
    sampler = WindowSampler(windows=text.train.windows, batch=settings.batch, seed=seed)
    options = OptimizerConfig(beta1=scenario.betas[0], beta2=scenario.betas[1])
    optimizer: ECOOptimizer = build_optimizer(model, options, seed=seed)
    losses = []
    for step in range(scenario.steps):
        if step == scenario.reset_at:
            optimizer = build_optimizer(model, options, seed=seed)
        inputs, targets = text.train.batch(sampler.next_batch())
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        if scenario.idle and scenario.idle[0] <= step < scenario.idle[1]:
            _idle_rows(model.parameters())
        for group in optimizer.param_groups:
            group["lr"] = scenario.lr(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    evaluate = Evaluator(
        text.heldout, wanted=eval_windows, batch=settings.batch, ranks=ranks, compute=contextlib.nullcontext
    )
    return Course(losses=losses, val_loss=evaluate(model), largest_momentum=_largest_momentum(optimizer))


def _idle_rows(parameters: Any) -> None:
    """Take the gradient of every other row of the block matrices away."""
    for parameter in parameters:
        if isinstance(parameter, QuantizedWeight) and parameter.grad is not None:
            parameter.grad[1::2] = 0


def _largest_momentum(optimizer: ECOOptimizer) -> float | None:
    moments: list[Tensor] = [
        state["exp_avg"] for parameter, state in optimizer.state.items() if isinstance(parameter, QuantizedWeight)
    ]
    if any(moment.dtype is torch.uint8 for moment in moments):
        return None
    return max(float(moment.abs().max()) for moment in moments)


def _signed(values: Sequence[float] | None) -> str:
    return "-" if values is None else " ".join(f"{value:+.4f}" for value in values)
