"""What a person sees of a run: a progress bar on a terminal, plain lines elsewhere, and tables in both."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from eco_dist.training.metrics import StepMetrics

__all__ = ["Display", "describe"]

PLAIN_WIDTH = 120


def describe(metrics: StepMetrics) -> str:
    """One line a person can read: loss, validation loss, learning rate, speed, quantization error, moved share."""
    parts = [f"loss {metrics.loss:.4f}"]
    if metrics.val_loss is not None:
        parts.append(f"val {metrics.val_loss:.4f}")
    parts += [f"lr {metrics.lr:.2e}", f"{metrics.tokens_per_second:,.0f} tok/s", f"grad {metrics.grad_norm:.2f}"]
    if metrics.rms_quantization_error is not None:
        parts.append(f"rms error {metrics.rms_quantization_error:.2%}")
    if metrics.moved_share is not None:
        parts.append(f"moved {metrics.moved_share:.1%}")
    parts.append(f"skipped {metrics.skipped_steps}")
    return "  ".join(parts)


class Display:
    """Shows the progress of a run; silent on every rank but the first. Use it as a context manager.

    Args:
        name: of the run, such as its recipe.
        steps: how many there will be.
        shown: whether this rank shows anything.
    """

    def __init__(self, name: str, steps: int, *, shown: bool) -> None:
        """Choose between bar and lines."""
        console = Console(quiet=not shown)
        # without a terminal rich assumes 80 columns, which wraps every line of ours
        self.console = console if console.is_terminal else Console(quiet=not shown, width=PLAIN_WIDTH)
        self._name, self._steps = name, steps
        self._bar = self._progress() if self.console.is_terminal and shown else None
        self._task = self._bar.add_task(name, total=steps, details="") if self._bar else None
        self._val_loss: float | None = None

    def _progress(self) -> Progress:
        columns = (TextColumn("[bold]{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        return Progress(*columns, *times, TextColumn("{task.fields[details]}"), console=self.console)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def print(self, content: RenderableType) -> None:
        """Print a line or a table, above the bar if there is one."""
        self.console.print(content, soft_wrap=isinstance(content, str), highlight=False)

    def advance(self) -> None:
        """One more step is done."""
        if self._bar and self._task is not None:
            self._bar.advance(self._task)

    def show(self, metrics: StepMetrics) -> None:
        """Show a log step: in the bar on a terminal, as a line elsewhere."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, details=describe(metrics))
        else:
            self.print(f"{self._name}  step {metrics.step}/{self._steps}  {describe(metrics)}")
