"""Several finished runs side by side: one table and one plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from eco_dist.training.metrics import read_metrics
from eco_dist.training.plot import plot_losses
from eco_dist.training.summary import Summary, read_summary

__all__ = ["compare_runs", "comparison_table"]

BASELINE = "fp32-master"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def compare_runs(directories: Sequence[Path], plot: Path | None = None) -> Table:
    """Read finished runs, draw their losses into ``plot`` if it is given, and return the table.

    Raises:
        FileNotFoundError: a directory holds no finished run.
        ValueError: none is given, or there is no matplotlib to draw with.
    """
    if not directories:
        raise ValueError("expected at least one run directory, got none; name the run.directory of a finished run")
    summaries = {directory: read_summary(directory) for directory in directories}
    labels = _labels(summaries)
    if plot is not None:
        plot_losses({labels[directory]: read_metrics(directory) for directory in directories}, plot)
    return comparison_table([(labels[directory], summary) for directory, summary in summaries.items()])


def comparison_table(runs: Sequence[tuple[str, Summary]]) -> Table:
    """One row a run: losses, static bytes a parameter predicted and measured, bytes on the wire, saving.

    The saving is measured against the first run of recipe ``fp32-master``: 1 - bytes / its bytes, over the quantized
    weights of a run and their counterparts alike, that is, over the whole model.

    Args:
        runs: label and summary of each.
    """
    baseline = next((summary for _, summary in runs if summary.recipe == BASELINE), None)
    table = Table(title="Runs compared", caption=_caption(runs, baseline), caption_justify="left")
    table.add_column("recipe", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    numbers = (
        "steps",
        "train loss",
        "val loss",
        "B/param\npredicted",
        "B/param\nmeasured",
        "difference\nbytes",
        "quantized\nB/param",
        "all-gather\na step",
        "gradients\na step",
        "static memory\nsaved",
    )
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    for label, summary in runs:
        table.add_row(label, *_cells(summary, baseline))
    return table


def _cells(summary: Summary, baseline: Summary | None) -> tuple[str, ...]:
    differences = zip(summary.measured_static_bytes, summary.planned_static_bytes, strict=True)
    quantized = summary.measured_quantized_bytes_per_parameter
    difference = sum(abs(measured - planned) for measured, planned in differences)
    return (
        summary.engine,
        f"{summary.steps:,}",
        f"{summary.loss:.4f}",
        f"{summary.val_loss:.4f}",
        f"{summary.planned_bytes_per_parameter:.3f}",
        f"{summary.measured_bytes_per_parameter:.3f}",
        f"{difference:,}",
        "-" if quantized is None else f"{quantized:.3f}",
        _wire(summary, "gather"),
        _wire(summary, "reduce"),
        _saving(summary, baseline),
    )


def _wire(summary: Summary, operation: str) -> str:
    """Bytes one rank, the busiest, contributes a step to collectives of this kind; a dash in one process."""
    if summary.world_size == 1:
        return "-"
    return format_bytes(
        max(sum(count for name, count in rank.items() if operation in name) for rank in summary.wire_bytes_per_step)
    )


def format_bytes(count: int) -> str:
    """Bytes in the largest unit that leaves at least one, such as ``1.50 MiB``."""
    value = float(count)
    for unit in UNITS:
        if value < 1024 or unit == UNITS[-1]:
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"


def _saving(summary: Summary, baseline: Summary | None) -> str:
    if baseline is None:
        return "-"
    if summary is baseline:
        return "baseline"
    return f"{1 - summary.measured_bytes_per_parameter / baseline.measured_bytes_per_parameter:.1%}"


def _caption(runs: Sequence[tuple[str, Summary]], baseline: Summary | None) -> str:
    worlds = sorted({(summary.engine, summary.world_size) for _, summary in runs})
    where = "; ".join(f"{engine} on {size} rank{'s' * (size > 1)}" for engine, size in worlds)
    against = f"saved against {BASELINE}" if baseline else f"no {BASELINE} run to compare memory with"
    return f"{where}; B/param is static memory of the whole model; wire bytes are what one rank contributes; {against}"


def _labels(summaries: dict[Path, Summary]) -> dict[Path, str]:
    """The recipe of each run; runs that share one are told apart by their engine, or else by their directory."""
    recipes = [summary.recipe for summary in summaries.values()]
    engines = [(summary.recipe, summary.engine) for summary in summaries.values()]

    def label(directory: Path, summary: Summary) -> str:
        if recipes.count(summary.recipe) == 1:
            return summary.recipe
        is_alone = engines.count((summary.recipe, summary.engine)) == 1
        return f"{summary.recipe} ({summary.engine if is_alone else directory.name})"

    return {directory: label(directory, summary) for directory, summary in summaries.items()}
