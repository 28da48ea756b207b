"""Two reports side by side: what one holds that the other does not."""

from __future__ import annotations

import dataclasses
from collections import Counter

from rich.table import Table

from eco_dist.memory.categories import Category
from eco_dist.memory.report import Holding, MemoryReport, format_bytes

_TENSORS_SHOWN = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A line of a diff: bytes of the worst rank in both reports."""

    name: str
    before: int
    after: int

    @property
    def change(self) -> int:
        """Bytes that came."""
        return self.after - self.before


def by_category(before: MemoryReport, after: MemoryReport) -> list[Difference]:
    """Static bytes of the worst ranks, category by category."""
    old, new = before.worst.by_category(), after.worst.by_category()
    return [
        Difference(name=category.value, before=old.get(category, 0), after=new.get(category, 0))
        for category in Category
        if category.is_static and (category in old or category in new)
    ]


def by_tensor(before: MemoryReport, after: MemoryReport) -> list[Difference]:
    """Static bytes of the worst ranks, tensor by tensor, the largest change first; unchanged ones left out."""
    old, new = _tensors(before.worst.holding), _tensors(after.worst.holding)
    lines = [Difference(name=name, before=old[name], after=new[name]) for name in {**old, **new}]
    return sorted((line for line in lines if line.change), key=lambda line: -abs(line.change))


def diff_table(before: MemoryReport, after: MemoryReport) -> Table:
    """Categories, totals and the tensors that changed most, of the worst rank of each report."""
    table = Table(title="worst ranks side by side")
    table.add_column("")
    for report, letter in ((before, "a"), (after, "b")):
        where = f"{report.engine or 'live'}, {report.mesh}"
        table.add_column(
            f"{letter}: {report.recipe or report.source}\n{where}\nrank {report.worst.rank}", justify="right"
        )
    table.add_column("b - a", justify="right")
    for line in by_category(before, after):
        table.add_row(line.name, *_cells(line))
    table.add_section()
    total = Difference(name="", before=before.worst.static_bytes, after=after.worst.static_bytes)
    table.add_row("[bold]static, in all[/]", *_cells(total))
    peaks = [before.worst.peak_bytes, after.worst.peak_bytes]
    if peaks[0] is not None and peaks[1] is not None:
        table.add_row("[bold]peak[/]", *_cells(Difference(name="", before=peaks[0], after=peaks[1])))
    changed = by_tensor(before, after)
    if changed:
        table.add_section()
        for line in changed[:_TENSORS_SHOWN]:
            table.add_row(line.name, *_cells(line))
        if len(changed) > _TENSORS_SHOWN:
            table.add_row(f"and {len(changed) - _TENSORS_SHOWN} more", "", "", "")
    return table


def _tensors(holding: Holding) -> Counter[str]:
    total: Counter[str] = Counter()
    for tensor in holding.tensors:
        if tensor.category.is_static:
            total[tensor.name] += tensor.bytes
    return total


def _cells(line: Difference) -> list[str]:
    sign = "+" if line.change > 0 else ""
    change = f"{sign}{format_bytes(line.change)}" if line.change else "0 B"
    return [format_bytes(line.before), format_bytes(line.after), change]
