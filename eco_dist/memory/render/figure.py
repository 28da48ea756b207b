"""A report as a picture: the same bars and timeline as the page, for slides and issues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eco_dist.memory.categories import Category
from eco_dist.memory.render.page import COLOURS, Bar, Page
from eco_dist.memory.report import format_bytes

_INK, _SOFT = "#1c2430", "#5c6675"


def write_png(page: Page, file: Path) -> None:
    """Draw the page into a PNG.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "expected matplotlib to draw the memory report, found none; pip install 'eco-dist[plot]'"
        ) from None
    beside, ranks, timelines = page.beside_baseline(), page.of_ranks(), page.timelines()
    heights = [0.5 + 0.45 * len(beside), 0.5 + 0.45 * len(ranks)] + [3.2] * len(timelines)
    figure = Figure(figsize=(11, 1.9 + sum(heights) + 0.5 * len(heights)), dpi=120, layout="constrained")
    figure.suptitle(f"{page.title}\n{_wrapped(page.verdict())}", x=0.01, ha="left", fontsize=11, color=_INK)
    panels = figure.subplots(len(heights), 1, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    _draw_bars(panels[0], beside, "worst rank between steps")
    _draw_bars(panels[1], ranks, "rank by rank")
    for axes, (report, moments) in zip(panels[2:], timelines, strict=True):
        _draw_timeline(axes, moments, is_model=report.source == "planned")
    drawn = [*beside, *ranks, *(bar for _, moments in timelines for bar in moments)]
    shown = {category for bar in drawn for category, _ in bar.parts}
    handles = [_patch(category) for category in Category if category in shown]
    figure.legend(handles=handles, loc="outside lower left", ncols=5, frameon=False, fontsize=9)
    figure.savefig(file)


def _draw_bars(axes: Any, bars: Sequence[Bar], title: str) -> None:
    longest = max((bar.total for bar in bars), default=1) or 1
    for row, bar in enumerate(bars):
        left = 0
        for category, count in bar.parts:
            axes.barh(row, count, left=left, color=COLOURS[category], height=0.7)
            left += count
        axes.text(bar.total + longest * 0.01, row, format_bytes(bar.total), va="center", fontsize=9, color=_INK)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.14)
    axes.set_xticks([])
    _plain(axes, title)


def _draw_timeline(axes: Any, bars: Sequence[Bar], *, is_model: bool) -> None:
    places = range(len(bars))
    base = [0] * len(bars)
    for category in Category:
        counts = [dict(bar.parts).get(category, 0) for bar in bars]
        if any(counts):
            upper = [low + count for low, count in zip(base, counts, strict=True)]
            axes.fill_between(places, base, upper, step="mid", color=COLOURS[category], linewidth=0)
            base = upper
    highest = max(bars, key=lambda bar: bar.total)
    axes.axhline(highest.total, color=_INK, linewidth=0.8, linestyle="--")
    axes.text(0, highest.total * 1.015, f"peak {format_bytes(highest.total)} at '{highest.label}'", fontsize=9)
    axes.set_ylim(0, highest.total * 1.12)
    axes.set_xlim(0, max(len(bars) - 1, 1))
    axes.set_yticks([])
    axes.set_xticks([0, len(bars) - 1], [bars[0].label, bars[-1].label], fontsize=9)
    _plain(axes, "over one step" + (", a model" if is_model else ", measured"))


def _plain(axes: Any, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, color=_SOFT)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _patch(category: Category) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=COLOURS[category], label=category.value)


def _wrapped(text: str, width: int = 120) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))
