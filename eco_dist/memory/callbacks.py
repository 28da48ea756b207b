"""The memory report in other people's training loops: callbacks for Hugging Face and Lightning, events for monitors.

Both callbacks measure after the first optimizer step, write the report, and raise if a master copy survives the step.
Neither library is imported before its callback is made.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from eco_dist.memory.measure import measure
from eco_dist.memory.render import Page, write_reports
from eco_dist.memory.report import MemoryReport


def report_step(model: nn.Module, optimizer: Optimizer, directory: Path) -> MemoryReport:
    """Measure and write a report; collective, rank 0 writes.

    Args:
        model: the live model.
        optimizer: its optimizer, after a step.
        directory: where the report goes.

    Raises:
        MasterCopyError: if a master copy survives the step.
    """
    report = measure(model, optimizer, strict=True)
    if not dist.is_initialized() or dist.get_rank() == 0:
        write_reports(Page(report=report), directory)
    return report


def monitor_events(report: MemoryReport, samples: int) -> list[tuple[str, float, int]]:
    """A measured report as events of DeepSpeed's monitors: (name, value, samples so far).

    Args:
        report: of all ranks.
        samples: trained on so far, the x-axis of DeepSpeed's own events.
    """
    static = [rank.static_bytes for rank in report.ranks]
    values = {"static_bytes_max": max(static), "static_bytes_mean": sum(static) / len(static)}
    values["bytes_per_parameter"] = report.bytes_per_parameter()
    for category, count in report.worst.by_category().items():
        values[f"worst_rank/{category.value.replace(' ', '_')}"] = count
    return [(f"Train/Memory/{name}", float(value), samples) for name, value in values.items()]


def huggingface_callback(directory: Path | str) -> Any:
    """A `transformers.TrainerCallback` that measures after the first step.

    Args:
        directory: where the report goes.

    Raises:
        ImportError: transformers is missing.
    """
    try:
        from transformers import TrainerCallback
    except ImportError:
        raise ImportError("expected transformers for this callback; pip install 'eco-dist[hf]'") from None

    class MemoryCallback(TrainerCallback):
        report: MemoryReport | None = None

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            """After `optimizer.step()`, before gradients are cleared."""
            if self.report is None:
                optimizer = parts["optimizer"]
                plain = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
                self.report = report_step(parts["model"], plain, Path(directory))

    return MemoryCallback()


def lightning_callback(directory: Path | str) -> Any:
    """A Lightning `Callback` that measures after the first batch whose optimizer stepped.

    Args:
        directory: where the report goes.

    Raises:
        ImportError: lightning is missing.
    """
    try:
        callback: Any = importlib.import_module("lightning.pytorch.callbacks").Callback
    except ImportError:
        raise ImportError("expected lightning for this callback; pip install lightning") from None

    class MemoryCallback(callback):
        report: MemoryReport | None = None

        def on_train_batch_end(self, trainer: Any, module: Any, *batch: Any, **more: Any) -> None:
            """After the optimizer's step of a batch."""
            if self.report is None and trainer.global_step > 0:
                self.report = report_step(module, trainer.optimizers[0], Path(directory))

    return MemoryCallback()
