"""Checkpoints of a training run: when they are written, and going on from the newest one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from eco_dist.training.config import TrainConfig
from eco_dist.training.engine import RunEngine
from eco_dist.training.sampler import WindowSampler

__all__ = ["CHECKPOINTS", "RunCheckpoints"]

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, below its directory."""


class RunCheckpoints:
    """Saves a run as its configuration says, and resumes it.

    Args:
        config: when to save, how many to keep, whether to resume, how long a rank waits for the others.
        engine, scheduler, sampler: what goes on from a checkpoint.
    """

    def __init__(self, config: TrainConfig, engine: RunEngine, scheduler: LambdaLR, sampler: WindowSampler) -> None:
        """Remember what to save."""
        self._config, self._engine = config.run, engine
        self._timeout = timedelta(seconds=config.engine.timeout_s)
        self._scheduler, self._sampler = scheduler, sampler
        self._root = Path(config.run.directory) / CHECKPOINTS

    def resume(self) -> int:
        """Load the newest checkpoint if there is one and the configuration asks for it; steps done. Collective.

        Raises:
            ValueError: it does not fit this run, or has nothing left to do.
        """
        saved = self._engine.resume(self._root) if self._config.resume else None
        if saved is None:
            return 0
        self._sampler.load_state_dict(saved.extra["sampler"])
        self._scheduler.load_state_dict(saved.extra["scheduler"])
        if saved.step >= self._config.steps:
            raise ValueError(
                f"expected run.steps > {saved.step}, the step of {saved.where}, got {self._config.steps}; "
                "raise run.steps or start anew with run.resume=false"
            )
        return saved.step

    def after(self, step: int) -> None:
        """Save if it is due after this step; collective."""
        every = self._config.save_every
        if every is not None and (step % every == 0 or step == self._config.steps):
            self._engine.save(self._root, step=step, extra=self._extra(), keep=self._config.keep, timeout=self._timeout)

    def finish(self) -> None:
        """Wait for the last save; collective."""
        self._engine.finish_saving()

    @contextmanager
    def kept_on_failure(self) -> Iterator[None]:
        """A run that fails inside does so once the save under way is done: the next start resumes from it.

        The thread that saves must not outlive the process group, and may fail with the run.
        """
        try:
            yield
        except BaseException:
            with suppress(Exception):
                self._engine.finish_saving()
            raise

    def _extra(self) -> dict[str, Any]:
        schedule = {key: value for key, value in self._scheduler.state_dict().items() if key != "lr_lambdas"}
        return {
            "sampler": self._sampler.state_dict(),
            "scheduler": {**schedule, "lr_lambdas": [None] * len(self._scheduler.lr_lambdas)},
        }
