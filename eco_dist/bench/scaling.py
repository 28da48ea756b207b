"""The step over sizes and threads: time of `fp8` beside torch's fused AdamW and beside the bytes alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eco_dist.bench import step
from eco_dist.training.plot import PALETTE, canvas

if TYPE_CHECKING:
    from rich.table import Table

ELEMENTS = (1 << 17, 1 << 20, 1 << 23, 1 << 26)
RECIPES = ("fp8", "fp8-8bit")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Time of a recipe's step with fp32 gradients, fused fp32 AdamW = 1, for a size and a number of threads."""

    elements: int
    threads: int
    recipe: str
    ratio: float


def run(*, rounds: int = 9, elements: Sequence[int] = ELEMENTS, threads: Sequence[int] | None = None) -> list[Point]:
    """Time every size with every number of threads; 1 and all there are unless told otherwise."""
    before = torch.get_num_threads()
    points = []
    try:
        for count in threads or sorted({1, before}):
            torch.set_num_threads(count)
            for size in elements:
                timings = {timing.name: timing for timing in step.run(elements=size, rounds=rounds, recipes=RECIPES)}
                for recipe in RECIPES:
                    ratio = timings[f"{recipe}, fp32 gradients"].ratio
                    points.append(Point(elements=size, threads=count, recipe=recipe, ratio=ratio))
    finally:
        torch.set_num_threads(before)
    return points


def table(points: Sequence[Point]) -> Table:
    """A line a size, a column a recipe and number of threads."""
    from rich.table import Table

    table = Table(title="time of a step, torch AdamW fused fp32 = 1")
    columns = sorted({(point.recipe, point.threads) for point in points})
    table.add_column("parameters", justify="right")
    for recipe, threads in columns:
        table.add_column(f"{recipe}, {threads} thread{'s' * (threads > 1)}", justify="right")
    for size in sorted({point.elements for point in points}):
        ratios = {(point.recipe, point.threads): point.ratio for point in points if point.elements == size}
        table.add_row(f"{size:,}", *(f"{ratios[column]:.2f}" for column in columns))
    return table


def plot(points: Sequence[Point], path: Path) -> None:
    """The same as a picture (extra `plot`).

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure, axes = canvas()
    for recipe, threads in sorted({(point.recipe, point.threads) for point in points}):
        line = sorted((p.elements, p.ratio) for p in points if (p.recipe, p.threads) == (recipe, threads))
        style = "-" if threads == 1 else "--"
        color = PALETTE[RECIPES.index(recipe)]
        label = f"{recipe}, {threads} thread{'s' * (threads > 1)}"
        axes.plot(*zip(*line, strict=True), style, marker="o", color=color, label=label)
    axes.axhline(1.0, color="0.5", linewidth=1)
    axes.set(xscale="log", xlabel="parameters", ylabel="time, fused fp32 AdamW = 1", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
