"""A report as Markdown, for a pull request or a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from eco_dist.memory.render.page import Bar, Page
from eco_dist.memory.report import format_bytes

_BAR = 40


def to_markdown(page: Page) -> str:
    """The page; bars are text."""
    lines = [f"# Memory of {page.title}", "", page.verdict()]
    saving = page.saving()
    if saving:
        lines += ["", f"**{saving}**"]
    lines += ["", *_table(["", ""], page.facts())]
    lines += ["", "## Worst rank", "", *_categories(page)]
    lines += ["", "## Ranks", "", *_bars(page)]
    for report, bars in page.timelines():
        lines += ["", f"## Over a step, {report.source}", "", *_timeline(bars)]
    if page.peak_check():
        lines += ["", str(page.peak_check())]
    lines += ["", "## Largest tensors of the worst rank", "", *_tensors(page)]
    strays = page.strays()
    if strays:
        rows = [(str(rank), description, format_bytes(count)) for rank, description, count in strays]
        lines += ["", "## Not attributed", "", *_table(["rank", "tensor", "bytes"], rows)]
    lines += ["", "## Assumptions", "", *(f"- {sentence}" for sentence in page.notes()), ""]
    return "\n".join(lines)


def _categories(page: Page) -> list[str]:
    rows = []
    for name, counts, difference in page.categories():
        cells = [name, *(format_bytes(count or 0) for count in counts)]
        rows.append([*cells, f"{difference:+,} B"] if difference is not None else cells)
    heads = ["category", *page.columns(), *(["measured - planned"] if page.measured is not None else [])]
    return _table(heads, rows)


def _bars(page: Page) -> list[str]:
    bars = page.of_ranks()
    longest = max((bar.total for bar in bars), default=1) or 1
    rows = [(bar.label, format_bytes(bar.total), f"`{'#' * round(_BAR * bar.total / longest)}`") for bar in bars]
    return _table(["", "static", ""], rows)


def _timeline(bars: Sequence[Bar]) -> list[str]:
    highest = max(bars, key=lambda bar: bar.total)
    step = max(1, len(bars) // 16)
    shown = [bar for number, bar in enumerate(bars) if number % step == 0 or bar is highest]
    rows = [
        (bar.label, format_bytes(bar.total), f"`{'#' * round(_BAR * bar.total / max(highest.total, 1))}`")
        for bar in shown
    ]
    return _table(["moment", "bytes", ""], rows)


def _tensors(page: Page) -> list[str]:
    rows = [(f"`{name}`", str(n), kinds, format_bytes(count)) for name, n, kinds, count in page.largest_tensors()]
    return _table(["tensor", "number", "holds", "bytes"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(heads), _row(["---"] * len(heads)), *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
