"""The memory report in other people's training loops: a callback for Hugging Face's Trainer, one for Lightning.

Both measure after the first optimizer step, write the report, and raise if a master copy survives the step. Neither
library is imported before its callback is made.
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
