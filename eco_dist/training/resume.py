"""Checkpoints of a training run: when they are written, and going on from the newest one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from eco_dist.training.config import TrainConfig
from eco_dist.training.engine import RunEngine
from eco_dist.training.heartbeat import LostRanksError
from eco_dist.training.sampler import WindowSampler

__all__ = ["CHECKPOINTS", "RunCheckpoints"]

CHECKPOINTS = "checkpoints"
"""Folder of a run's checkpoints, below its directory."""
LOST_S = 1.0
"""In which the thread that saves notices that a rank has died."""


class RunCheckpoints:
    """Saves a run as its configuration says, and resumes it.

    Args:
        config: when to save, how many to keep, whether to resume, how long to wait for others.
        engine, scheduler, sampler: what goes on from a checkpoint.
    """

    def __init__(self, config: TrainConfig, engine: RunEngine, scheduler: LambdaLR, sampler: WindowSampler) -> None:
        """Remember what to save."""
        self._config, self._engine = config.run, engine
        self._timeout_s = float(config.engine.timeout_s)
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
            self._engine.save(self._root, step=step, extra=self._extra(), keep=self._config.keep)

    def finish(self) -> None:
        """Wait for the last save; collective."""
        self._engine.finish_saving()

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """At the end of a run that fails: finish the save under way, from which the next start resumes.

        Its thread must not outlive the process group either. Without the lost ranks it cannot be finished.
        """
        if error is not None:
            with suppress(Exception):  # it may fail with the run
                self._engine.finish_saving(LOST_S if isinstance(error, LostRanksError) else self._timeout_s)

    def _extra(self) -> dict[str, Any]:
        schedule = {key: value for key, value in self._scheduler.state_dict().items() if key != "lr_lambdas"}
        return {
            "sampler": self._sampler.state_dict(),
            "scheduler": {**schedule, "lr_lambdas": [None] * len(self._scheduler.lr_lambdas)},
        }
