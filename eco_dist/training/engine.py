"""Who shards the weights of a run, as the training loop sees it: gradients in, a step, weights and checkpoints out.

`TorchEngine` is one process or FSDP2; FSDP1 is in `eco_dist.training.fsdp1_engine`, ZeRO in `zero_engine`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from eco_dist.checkpoint import AsyncSaver, latest, load
from eco_dist.engines import fsdp2, single
from eco_dist.memory import MemoryReport, measure
from eco_dist.memory.report import Moment
from eco_dist.memory.track import StepTracker
from eco_dist.optim import ECOSGD, ECOAdamW, ECOOptimizer
from eco_dist.optim.step import StepStats
from eco_dist.recipe import Recipe
from eco_dist.training.batch import BatchSplit
from eco_dist.training.config import OptimizerConfig, TrainConfig
from eco_dist.training.plain_weights import plain_weight
from eco_dist.training.ranks import Ranks
from eco_dist.weights import ConversionReport

__all__ = ["COMPUTE_DTYPES", "RunEngine", "Saved", "TorchEngine", "build_optimizer", "parameter_groups"]

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint that was loaded says.

    Attributes:
        where: its folder.
        step: it was taken after.
        extra: what was saved beside weights and optimizer.
    """

    where: Path
    step: int
    extra: Mapping[str, Any]


class RunEngine(abc.ABC):
    """A sharded model with its optimizer. All methods are collective.

    Attributes:
        model: as it is called, in training and in validation.
        optimizer: whose groups the schedule moves.
        conversion: what was quantized and what was not.
        collect_stats: set before a step to have `stats` after it.
    """

    model: nn.Module
    optimizer: Optimizer
    conversion: ConversionReport
    collect_stats: bool = False
    _ranks: Ranks

    def compute_context(self) -> AbstractContextManager[object]:
        """Context of a forward pass, for its dtype."""
        return nullcontext()

    @abc.abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Gradients of one micro-batch's loss, as its share of a step."""

    @abc.abstractmethod
    def step(self) -> float:
        """Clip, step, and drop the gradients; their norm before clipping, NaN if the step was skipped."""

    @property
    @abc.abstractmethod
    def stats(self) -> StepStats | None:
        """Sums over this rank's quantized weights in the last step, if they were asked for."""

    @property
    @abc.abstractmethod
    def skipped_steps(self) -> int:
        """Steps left out because a gradient was not finite."""

    @abc.abstractmethod
    def measure(self, *, strict: bool) -> MemoryReport:
        """What every rank holds between steps; see `eco_dist.memory.measure`."""

    def track(self) -> AbstractContextManager[object]:
        """Context of a step whose transients are measured; see `timeline`."""
        return nullcontext()

    def timeline(self) -> tuple[Moment, ...]:
        """Transients of the tracked step on this rank; empty if none was tracked."""
        return ()

    @abc.abstractmethod
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every stored weight, whole, with its name."""

    # --- checkpoints ------------------------------------------------------------------------------------------------

    _saver: AsyncSaver | None = None

    @property
    @abc.abstractmethod
    def _held(self) -> tuple[nn.Module, Any]:
        """The model and whatever steps it, as `eco_dist.checkpoint` knows them."""

    @abc.abstractmethod
    def _set_skipped_steps(self, count: int) -> None:
        """Count on from here."""

    def save(self, root: Path, *, step: int, extra: dict[str, Any], keep: int) -> None:
        """Save below `root` in the background, and keep the newest `keep` checkpoints."""
        if self._saver is None:
            self._saver = AsyncSaver(root, keep=keep)
        self._saver.save(*self._held, step=step, extra={**extra, "skipped_steps": self.skipped_steps})

    def finish_saving(self, within_s: float | None = None) -> None:
        """Wait for the last save; TimeoutError if that takes longer."""
        if self._saver is not None:
            self._saver.wait(within_s)

    def resume(self, root: Path) -> Saved | None:
        """Load the newest checkpoint below `root`, of any engine and number of ranks; None if there is none.

        Raises:
            ValueError: it does not fit this run.
        """
        newest = self._ranks.on_first(lambda: latest(root))
        if newest is None:
            return None
        manifest = load(newest, *self._held)
        self._set_skipped_steps(manifest.extra["skipped_steps"])
        return Saved(where=newest, step=manifest.step, extra=manifest.extra)


class TorchEngine(RunEngine):
    """One process, or FSDP2: the parameters are stepped by `ECOAdamW` or `ECOSGD` themselves."""

    optimizer: ECOOptimizer

    def __init__(self, model: nn.Module, recipe: Recipe, config: TrainConfig, split: BatchSplit, ranks: Ranks) -> None:
        """Convert and place a plain model."""
        self._config, self._ranks = config.engine, ranks
        self._accumulate = split.accumulate
        self._tracker: StepTracker | None = None
        model.to(ranks.device)
        self._convert(model, recipe, config)

    def _convert(self, model: nn.Module, recipe: Recipe, config: TrainConfig) -> None:
        """Make `model`, `conversion` and `optimizer` of a plain model on its device."""
        if config.engine.name == "fsdp2":
            self.conversion = fsdp2.shard_model(
                model,
                recipe,
                compute_dtype=COMPUTE_DTYPES[config.engine.computes],
                also_skip=config.model.keep,
                expert_parallel=config.engine.expert_parallel,
            )
        else:
            self.conversion = single.prepare(model, recipe, also_skip=config.model.keep)
        self.model = model
        self.optimizer = build_optimizer(model, config.optimizer, seed=config.run.seed)

    def compute_context(self) -> AbstractContextManager[object]:
        """Autocast on one process; FSDP2's own policy casts on a sharded model."""
        if self._config.name == "single" and self._config.computes == "bf16":
            return torch.autocast(self._ranks.device.type, dtype=COMPUTE_DTYPES["bf16"])
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """As `RunEngine.backward`."""
        (loss / self._accumulate).backward()

    def step(self) -> float:
        """As `RunEngine.step`."""
        self.optimizer.collect_stats = self.collect_stats
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        norm = self.optimizer.grad_norm
        return math.nan if norm is None else norm

    @property
    def stats(self) -> StepStats | None:
        """As `RunEngine.stats`."""
        return self.optimizer.stats

    @property
    def skipped_steps(self) -> int:
        """As `RunEngine.skipped_steps`."""
        return self.optimizer.skipped_steps

    def measure(self, *, strict: bool) -> MemoryReport:
        """As `RunEngine.measure`."""
        return measure(self.model, self.optimizer, strict=strict)

    def track(self) -> AbstractContextManager[object]:
        """As `RunEngine.track`."""
        self._tracker = StepTracker(self.model, self.optimizer)
        return self._tracker

    def timeline(self) -> tuple[Moment, ...]:
        """As `RunEngine.timeline`."""
        return () if self._tracker is None else self._tracker.timeline

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `RunEngine.weights`."""
        return ((name, plain_weight(parameter)) for name, parameter in self.model.named_parameters())

    @property
    def _held(self) -> tuple[nn.Module, Any]:
        return self.model, self.optimizer

    def _set_skipped_steps(self, count: int) -> None:
        self.optimizer.skipped_steps = count


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The parameters that train: matrices, and vectors, which decay only if the configuration says so."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    vector_decay = config.weight_decay if config.decay_norms else 0.0
    return [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2]},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": vector_decay},
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig, *, seed: int) -> ECOAdamW | ECOSGD:
    """`ECOAdamW` or `ECOSGD` over the `parameter_groups` of a model.

    Args:
        model: converted and, if it is to be, sharded.
        config: learning rate, moments, decay, clipping.
        seed: of the stochastic rounding.
    """
    groups = parameter_groups(model, config)
    clip = math.inf if config.clip is None else config.clip  # the norm is measured either way
    decay = config.weight_decay
    if config.name == "sgd":
        return ECOSGD(groups, config.lr, config.momentum, decay, seed=seed, max_grad_norm=clip)
    betas = (config.beta1, config.beta2)
    return ECOAdamW(groups, config.lr, betas, config.eps, decay, seed=seed, max_grad_norm=clip)
