"""Checkpoints of a training run: when they are written, and going on from the newest one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from eco_dist.checkpoint import AsyncSaver, latest, load
from eco_dist.optim import ECOOptimizer
from eco_dist.training.config import RunConfig
from eco_dist.training.ranks import Ranks
from eco_dist.training.sampler import WindowSampler

__all__ = ["CHECKPOINTS", "RunCheckpoints"]

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, below its directory."""


class RunCheckpoints:
    """Saves a run as its configuration says, in the background, and resumes it.

    Args:
        config: when to save, how many to keep, whether to resume.
        ranks: of the run.
        model, optimizer, scheduler, sampler: what goes on from a checkpoint.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        model: nn.Module,
        optimizer: ECOOptimizer,
        scheduler: LambdaLR,
        sampler: WindowSampler,
    ) -> None:
        """Open what background saves need; collective."""
        self._config, self._ranks = config, ranks
        self._model, self._optimizer = model, optimizer
        self._scheduler, self._sampler = scheduler, sampler
        self._root = Path(config.directory) / CHECKPOINTS
        self._saver = None if config.save_every is None else AsyncSaver(self._root, keep=config.keep)

    def resume(self) -> int:
        """Load the newest checkpoint if there is one and the configuration asks for it; steps done. Collective.

        Raises:
            ValueError: it does not fit this run, or has nothing left to do.
        """
        if not self._config.resume:
            return 0
        newest = self._ranks.on_first(lambda: latest(self._root))
        if newest is None:
            return 0
        manifest = load(newest, self._model, self._optimizer)
        self._sampler.load_state_dict(manifest.extra["sampler"])
        self._scheduler.load_state_dict(manifest.extra["scheduler"])
        self._optimizer.skipped_steps = manifest.extra["skipped_steps"]
        if manifest.step >= self._config.steps:
            raise ValueError(
                f"expected run.steps > {manifest.step}, the step of {newest}, got {self._config.steps}; "
                "raise run.steps or start anew with run.resume=false"
            )
        return manifest.step

    def after(self, step: int) -> None:
        """Save if it is due after this step; collective."""
        every = self._config.save_every
        if self._saver is None or every is None or (step % every and step != self._config.steps):
            return
        self._saver.save(self._model, self._optimizer, step=step, extra=self._extra())

    def finish(self) -> None:
        """Wait for the last save; collective."""
        if self._saver is not None:
            self._saver.wait()

    def _extra(self) -> dict[str, Any]:
        schedule = {key: value for key, value in self._scheduler.state_dict().items() if key != "lr_lambdas"}
        return {
            "sampler": self._sampler.state_dict(),
            "scheduler": {**schedule, "lr_lambdas": [None] * len(self._optimizer.param_groups)},
            "skipped_steps": self._optimizer.skipped_steps,
        }
