"""Reports for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table

from eco_dist.memory.categories import Category
from eco_dist.memory.report import MemoryReport, RankMemory, categories_of, format_bytes

_RANKS_SHOWN = 4


def shown_ranks(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """All ranks while they are few, else the one with the most and the one with the least."""
    if len(ranks) <= _RANKS_SHOWN:
        return list(ranks)
    by_bytes = [max(ranks, key=_needed), min(ranks, key=_needed)]
    return by_bytes if _needed(by_bytes[0]) != _needed(by_bytes[1]) else by_bytes[:1]


def report_table(report: MemoryReport) -> Table:
    """Static bytes per category and the peak, a column a rank (the extremes where there are many)."""
    shown = shown_ranks(report.ranks)
    table = Table(title=f"{report.source} memory, {report.recipe or 'live'}", caption=_caption(report))
    table.add_column("category")
    for rank in shown:
        table.add_column(f"rank {rank.rank}", justify="right")
    for category in categories_of([rank.holding for rank in shown]):
        table.add_row(category.value, *(format_bytes(rank.by_category().get(category, 0)) for rank in shown))
    table.add_section()
    table.add_row("[bold]static, in all[/]", *(format_bytes(rank.static_bytes) for rank in shown))
    peaks = [rank.holding.peak for rank in shown]
    if any(peaks):
        table.add_section()
        for category in transient_categories(shown):
            counts = [0 if peak is None else peak.bytes.get(category, 0) for peak in peaks]
            table.add_row(f"{category.value} at the peak", *map(format_bytes, counts))
        label = "peak, a model" if report.source == "planned" else "peak"
        table.add_row(f"[bold]{label}[/]", *(format_bytes(rank.needed_bytes) for rank in shown))
    return table


def transient_categories(ranks: Iterable[RankMemory]) -> list[Category]:
    """Categories that occur at the peak of any of these ranks."""
    peaks = [rank.holding.peak for rank in ranks]
    present = {category for peak in peaks if peak is not None for category, count in peak.bytes.items() if count}
    return [category for category in Category if category in present]


def compare_table(planned: MemoryReport, measured: MemoryReport, baseline: MemoryReport | None = None) -> Table:
    """Planned beside measured bytes, per rank and category, with the difference.

    Args:
        planned: what was predicted.
        measured: what is held.
        baseline: plan of what the recipe replaces, for a last column and line.
    """
    table = Table(title=f"static memory, recipe {planned.recipe}: predicted and measured")
    table.add_column("rank", justify="right")
    table.add_column("category")
    for column in ("predicted", "measured", "difference"):
        table.add_column(column, justify="right")
    if baseline is not None:
        table.add_column(baseline.recipe, justify="right")
    for rank in shown_ranks(planned.ranks):
        involved = [rank, measured.ranks[rank.rank]] + ([baseline.ranks[rank.rank]] if baseline else [])
        for category in categories_of([member.holding for member in involved]):
            counts = [member.by_category().get(category, 0) for member in involved]
            table.add_row(str(rank.rank), category.value, *_cells(counts))
        table.add_row(str(rank.rank), "[bold]in all[/]", *_cells([member.static_bytes for member in involved]))
        table.add_section()
    per_parameter = [report.bytes_per_parameter() for report in (planned, measured)]
    last = [] if baseline is None else [f"{baseline.bytes_per_parameter():.3f}"]
    difference = f"{per_parameter[1] - per_parameter[0]:.3f}"
    table.add_row("all", "bytes per parameter", *(f"{value:.3f}" for value in per_parameter), difference, *last)
    return table


def _needed(rank: RankMemory) -> int:
    return rank.needed_bytes


def _caption(report: MemoryReport) -> str:
    parts = [part for part in (report.model, report.mesh) if part]
    if len(report.ranks) > _RANKS_SHOWN:
        parts.append(f"worst: rank {report.worst.rank}, {report.imbalance:.1%} above the mean")
    parts.append(f"{report.bytes_per_parameter():.3f} B a parameter over all ranks")
    return "; ".join(parts)


def _cells(counts: Sequence[int]) -> list[str]:
    predicted, measured, *baseline = counts
    difference = measured - predicted
    return [
        format_bytes(predicted),
        format_bytes(measured),
        f"[bold red]{difference:+,} B[/]" if difference else "[green]0 B[/]",
        *(format_bytes(count) for count in baseline),
    ]
