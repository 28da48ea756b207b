"""A memory report: bytes per rank, tensor and category. Planned and measured reports are the same object."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from eco_dist.memory.categories import Category

if TYPE_CHECKING:
    from rich.table import Table

SCHEMA_VERSION = 1
_RANKS_SHOWN = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMemory:
    """Bytes of one category that one parameter (or buffer) holds on one rank."""

    name: str
    category: Category
    bytes: int


def tensor_entries(name: str, counts: Iterable[tuple[Category, int]]) -> list[TensorMemory]:
    """One entry a category that holds anything, from counts in any order."""
    total: Counter[Category] = Counter()
    for category, count in counts:
        total[category] += count
    return [
        TensorMemory(name=name, category=category, bytes=total[category]) for category in Category if total[category]
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one rank holds.

    Attributes:
        rank: its number.
        tensors: one entry a tensor and category.
        quantized_bytes: static bytes that belong to quantized weights (codes, scales, moments, residual or master),
            padding and counters left out.
        quantized_parameters: elements of quantized weights this rank owns.
    """

    rank: int
    tensors: tuple[TensorMemory, ...]
    quantized_bytes: int
    quantized_parameters: int

    def by_category(self) -> dict[Category, int]:
        """Sum of bytes for every category that occurs."""
        total: Counter[Category] = Counter()
        for tensor in self.tensors:
            total[tensor.category] += tensor.bytes
        return {category: total[category] for category in Category if category in total}

    @property
    def static_bytes(self) -> int:
        """Bytes resident between steps."""
        return sum(tensor.bytes for tensor in self.tensors if tensor.category.is_static)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory of all ranks.

    Attributes:
        source: "planned" or "measured".
        engine: "single" or "fsdp2"; "" for a measured report, which walks whatever is there.
        recipe: name of the recipe; "" for a measured report.
        parameters: elements of the whole model.
        ranks: one entry a rank.
    """

    source: str
    engine: str
    recipe: str
    parameters: int
    ranks: tuple[RankMemory, ...]

    def static_bytes(self, rank: int) -> int:
        """Bytes resident on a rank between steps."""
        return self.ranks[rank].static_bytes

    def bytes_per_parameter(self) -> float:
        """Static bytes of all ranks together over the parameters of the model."""
        return sum(rank.static_bytes for rank in self.ranks) / max(self.parameters, 1)

    def quantized_bytes_per_parameter(self) -> float | None:
        """Static bytes of quantized weights over their elements, scales included, padding not; None without any."""
        elements = sum(rank.quantized_parameters for rank in self.ranks)
        return sum(rank.quantized_bytes for rank in self.ranks) / elements if elements else None

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary; bytes are raw integers."""
        return {
            "schema_version": SCHEMA_VERSION,
            "source": self.source,
            "engine": self.engine,
            "recipe": self.recipe,
            "parameters": self.parameters,
            "bytes_per_parameter": self.bytes_per_parameter(),
            "ranks": [
                {
                    "rank": rank.rank,
                    "static_bytes": rank.static_bytes,
                    "quantized_bytes": rank.quantized_bytes,
                    "quantized_parameters": rank.quantized_parameters,
                    "by_category": {category.value: count for category, count in rank.by_category().items()},
                    "tensors": [
                        {"name": tensor.name, "category": tensor.category.value, "bytes": tensor.bytes}
                        for tensor in rank.tensors
                    ],
                }
                for rank in self.ranks
            ],
        }

    def table(self) -> Table:
        """Bytes per category, a column a rank (the extremes where there are many)."""
        from rich.table import Table

        shown = shown_ranks(self.ranks)
        table = Table(title=f"{self.source} static memory, {self.recipe or 'live'}")
        table.add_column("category")
        for rank in shown:
            table.add_column(f"rank {rank.rank}", justify="right")
        for category in categories_of(shown):
            table.add_row(category.value, *(format_bytes(rank.by_category().get(category, 0)) for rank in shown))
        table.add_section()
        table.add_row("static, in all", *(format_bytes(rank.static_bytes) for rank in shown))
        return table


def compare_table(planned: MemoryReport, measured: MemoryReport, baseline: MemoryReport | None = None) -> Table:
    """Planned beside measured bytes, per rank and category, with the difference.

    Args:
        planned: what was predicted.
        measured: what is held.
        baseline: plan of what the recipe replaces, for a last column and line.
    """
    from rich.table import Table

    table = Table(title=f"static memory, recipe {planned.recipe}: predicted and measured")
    table.add_column("rank", justify="right")
    table.add_column("category")
    for column in ("predicted", "measured", "difference"):
        table.add_column(column, justify="right")
    if baseline is not None:
        table.add_column(baseline.recipe, justify="right")
    for rank in shown_ranks(planned.ranks):
        other = measured.ranks[rank.rank]
        reference = baseline.ranks[rank.rank] if baseline else None
        involved = [rank, other] if reference is None else [rank, other, reference]
        for category in categories_of(involved):
            counts = [item.by_category().get(category, 0) for item in involved]
            table.add_row(str(rank.rank), category.value, *_cells(counts))
        table.add_row(str(rank.rank), "[bold]in all[/]", *_cells([item.static_bytes for item in involved]))
        table.add_section()
    per_parameter = [report.bytes_per_parameter() for report in (planned, measured)]
    last = [] if baseline is None else [f"{baseline.bytes_per_parameter():.3f}"]
    difference = f"{per_parameter[1] - per_parameter[0]:.3f}"
    table.add_row("all", "bytes per parameter", *(f"{value:.3f}" for value in per_parameter), difference, *last)
    return table


def _cells(counts: Sequence[int]) -> list[str]:
    predicted, measured, *baseline = counts
    difference = measured - predicted
    style = "green" if difference == 0 else "bold red"
    return [
        format_bytes(predicted),
        format_bytes(measured),
        f"[{style}]{difference:+,} B[/]" if difference else f"[{style}]0 B[/]",
        *(format_bytes(count) for count in baseline),
    ]


def shown_ranks(ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """All ranks while they are few, else the one with the most and the one with the least."""
    if len(ranks) <= _RANKS_SHOWN:
        return list(ranks)
    return [max(ranks, key=lambda rank: rank.static_bytes), min(ranks, key=lambda rank: rank.static_bytes)]


def categories_of(ranks: Sequence[RankMemory]) -> list[Category]:
    """Static categories that occur on any of these ranks, in their natural order."""
    present = {category for rank in ranks for category in rank.by_category()}
    return [category for category in Category if category in present and category.is_static]


def format_bytes(count: int) -> str:
    """Bytes in binary units, as in every table of this package."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{count:,} B" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    return f"{value:,.2f} GiB"
