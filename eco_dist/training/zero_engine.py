"""DeepSpeed's ZeRO as a run's engine: `deepspeed.initialize` with the JSON that follows from the configuration."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from eco_dist.memory import MemoryReport
from eco_dist.optim import ECOOptimizer
from eco_dist.optim.step import StepStats
from eco_dist.recipe import Recipe
from eco_dist.training.config import TrainConfig
from eco_dist.training.engine import RunEngine, Saved, parameter_groups
from eco_dist.training.ranks import Ranks
from eco_dist.weights import plan_conversion

__all__ = ["ZeroEngine", "import_deepspeed"]

LATEST = "latest"
"""File in which DeepSpeed names its newest checkpoint, written when that is complete."""


def import_deepspeed(device_type: str) -> Any:
    """The package, with ECO optimizers known to it, for ranks that compute on this kind of device.

    Raises:
        ValueError: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    os.environ.setdefault("LOCAL_RANK", "0")  # one rank without a launcher
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError(
            "expected the package deepspeed for engine.name=deepspeed, found none; pip install 'eco-dist[deepspeed]'"
        ) from error
    import eco_dist.deepspeed  # noqa: F401

    deepspeed.utils.logger.setLevel("WARNING")
    if device_type == "cpu":
        # A reduction for inference, which every start would else compile for half a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class ZeroEngine(RunEngine):
    """ZeRO stage 1, 2 or 3, with codes or, for a recipe without a format, with DeepSpeed's own fp32 masters."""

    def __init__(
        self, model: nn.Module, recipe: Recipe, config: TrainConfig, settings: dict[str, Any], ranks: Ranks
    ) -> None:
        """Hand a plain model to DeepSpeed, with the JSON of `deepspeed_json`."""
        deepspeed = import_deepspeed(ranks.device.type)
        self._ranks = ranks
        self.conversion = plan_conversion(model, recipe, also_skip=config.model.keep)
        self._engine = deepspeed.initialize(
            model=model, model_parameters=parameter_groups(model, config.optimizer), config=settings
        )[0]
        self.model = self._engine
        # What the JSON named; ECO's step takes over what a schedule changes in its groups.
        self.optimizer = cast(Optimizer, self._engine.basic_optimizer)
        stepper = self._engine.optimizer.optimizer
        self._stepper = stepper if isinstance(stepper, ECOOptimizer) else None

    def backward(self, loss: Tensor) -> None:
        """As `RunEngine.backward`; DeepSpeed divides by the number of micro-batches."""
        self._engine.backward(loss)
        if not self._engine.is_gradient_accumulation_boundary():
            self._engine.step()  # counts the micro-batch

    def step(self) -> float:
        """As `RunEngine.step`."""
        before = self._engine.skipped_steps
        if self._stepper is not None:
            self._stepper.stats = StepStats() if self.collect_stats else None
        self._engine.step()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # else a schedule warns that nothing was stepped
        if self._engine.skipped_steps > before:
            if self._stepper is not None:
                self._stepper.stats = None
            return math.nan
        norm = self._engine.get_global_grad_norm()
        return math.nan if norm is None else float(norm)

    @property
    def stats(self) -> StepStats | None:
        """As `RunEngine.stats`."""
        return None if self._stepper is None else self._stepper.stats

    @property
    def skipped_steps(self) -> int:
        """As `RunEngine.skipped_steps`."""
        return int(self._engine.skipped_steps)

    def measure(self, *, strict: bool) -> MemoryReport:
        """As `RunEngine.measure`."""
        from eco_dist.deepspeed import measure

        return measure(self._engine, strict=strict)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `RunEngine.weights`; the fp32 masters where there are any."""
        from deepspeed.utils import safe_get_full_fp32_param

        for name, parameter in self._engine.module.named_parameters():
            yield name, safe_get_full_fp32_param(parameter)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def _held(self) -> tuple[nn.Module, Any]:
        return self._engine.module, self._engine.optimizer

    def _set_skipped_steps(self, count: int) -> None:
        self._engine.skipped_steps = count

    def save(self, root: Path, *, step: int, extra: dict[str, Any], keep: int) -> None:
        """As `RunEngine.save`; masters go into DeepSpeed's own checkpoint, written before this returns."""
        if self._stepper is not None:
            super().save(root, step=step, extra=extra, keep=keep)
            return
        self._engine.save_checkpoint(str(root), tag=_tag(step), client_state={"run": {**extra, "step": step}})
        if self._ranks.is_first:
            for old in sorted(root.glob(_tag("*")))[:-keep]:
                shutil.rmtree(old)

    def resume(self, root: Path) -> Saved | None:
        """As `RunEngine.resume`; with masters, on as many ranks as saved it."""
        found = self._ranks.on_first(lambda: _newest(root, has_masters=self._stepper is None))
        if self._stepper is not None:
            return super().resume(root)
        if found is None:
            return None
        _, client_state = self._engine.load_checkpoint(str(root), tag=found.name)
        extra = client_state["run"]
        return Saved(where=found, step=extra.pop("step"), extra=extra)


def _tag(step: int | str) -> str:
    return f"step-{step:08d}" if isinstance(step, int) else f"step-{step}"


def _newest(root: Path, *, has_masters: bool) -> Path | None:
    """The folder of the newest of DeepSpeed's own checkpoints.

    Raises:
        ValueError: the checkpoints here are not of the kind that this run writes.
    """
    file = root / LATEST
    if file.is_file() != has_masters and root.is_dir() and any(root.iterdir()):
        raise ValueError(
            f"expected checkpoints {'with' if has_masters else 'without'} DeepSpeed's masters in {root}, found others; "
            "resume with the engine and recipe that saved them, or start anew with run.resume=false"
        )
    return root / file.read_text(encoding="utf-8").strip() if has_masters and file.is_file() else None
