"""A memory report: bytes per rank, tensor and category. Planned and measured reports are the same object.

Ranks that hold the same are one `Holding`, shared: a report of 16,384 ranks is as large as its distinct holdings.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from eco_dist.memory.categories import Category

if TYPE_CHECKING:
    from rich.table import Table


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorMemory:
    """Bytes of one category that one parameter (or buffer) holds on one rank.

    Attributes:
        name: the parameter's; layer numbers are `*` where tensors that differ only in them share an entry.
        category: what the bytes are for.
        bytes: of all of them together.
        count: tensors that share the entry.
    """

    name: str
    category: Category
    bytes: int
    count: int = 1


def tensor_entries(name: str, counts: Iterable[tuple[Category, int]], *, count: int = 1) -> list[TensorMemory]:
    """One entry a category that holds anything, from counts in any order."""
    total: Counter[Category] = Counter()
    for category, number in counts:
        total[category] += number
    return [
        TensorMemory(name=name, category=category, bytes=total[category], count=count)
        for category in Category
        if total[category]
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """A point of a step, and the transient bytes that are there besides the static ones."""

    name: str
    bytes: Mapping[Category, int]

    @property
    def total(self) -> int:
        """Transient bytes."""
        return sum(self.bytes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Holding:
    """What a rank holds.

    Attributes:
        tensors: one entry a tensor and category.
        quantized_bytes: static bytes that belong to quantized weights (codes, scales, moments, residual or master),
            padding and counters left out.
        quantized_parameters: elements of quantized weights this rank owns.
        timeline: transient bytes over a step, in order; empty where they were neither modelled nor measured.
    """

    tensors: tuple[TensorMemory, ...]
    quantized_bytes: int
    quantized_parameters: int
    timeline: tuple[Moment, ...] = ()

    @functools.cached_property
    def by_category(self) -> dict[Category, int]:
        """Sum of bytes for every category that occurs."""
        total: Counter[Category] = Counter()
        for tensor in self.tensors:
            total[tensor.category] += tensor.bytes
        return {category: total[category] for category in Category if category in total}

    @functools.cached_property
    def static_bytes(self) -> int:
        """Bytes resident between steps."""
        return sum(count for category, count in self.by_category.items() if category.is_static)

    @functools.cached_property
    def peak(self) -> Moment | None:
        """The moment with the most bytes; None without a timeline."""
        return max(self.timeline, key=lambda moment: moment.total, default=None)

    @property
    def peak_bytes(self) -> int | None:
        """Static and transient bytes at the peak; None without a timeline."""
        return None if self.peak is None else self.static_bytes + self.peak.total


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unattributed:
    """A live tensor that belongs to no parameter, state, gradient or buffer.

    Attributes:
        description: dtype, shape and whatever holds it.
        bytes: of its storage.
        is_weight_sized: whether it is floating point, at least fp32, and as large as a quantized weight: a master copy.
    """

    description: str
    bytes: int
    is_weight_sized: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessMemory:
    """What the process itself says, to hold against the sum over tensors.

    Attributes:
        source: "cuda allocator" or "resident set".
        bytes: what it holds.
        tensor_bytes: what the live tensors found in it add up to.
        margin: how far the two may be apart before something is unaccounted for; the report says why.
    """

    source: str
    bytes: int
    tensor_bytes: int
    margin: int

    @property
    def unexplained(self) -> int:
        """Bytes beyond tensors and margin: something holds memory that no tensor of Python's shows."""
        return max(0, self.bytes - self.tensor_bytes - self.margin)

    def __str__(self) -> str:
        """In words."""
        said = f"{self.source} {format_bytes(self.bytes)}, live tensors {format_bytes(self.tensor_bytes)}"
        word = f"{format_bytes(self.unexplained)} UNEXPLAINED beyond" if self.unexplained else "within"
        return f"{said}, {word} the margin of {format_bytes(self.margin)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one rank holds, and how that was checked.

    Attributes:
        rank: its number.
        holding: what it holds, shared with the ranks that hold the same.
        unattributed: live tensors the measurement could not attribute.
        process: what the process says; None for a plan.
    """

    rank: int
    holding: Holding
    unattributed: tuple[Unattributed, ...] = ()
    process: ProcessMemory | None = None

    @property
    def tensors(self) -> tuple[TensorMemory, ...]:
        """One entry a tensor and category."""
        return self.holding.tensors

    def by_category(self) -> dict[Category, int]:
        """Sum of bytes for every category that occurs."""
        return self.holding.by_category

    @property
    def static_bytes(self) -> int:
        """Bytes resident between steps."""
        return self.holding.static_bytes

    @property
    def peak_bytes(self) -> int | None:
        """Bytes at the peak of a step; None where it was neither modelled nor measured."""
        return self.holding.peak_bytes

    @property
    def needed_bytes(self) -> int:
        """What a device must have: the peak where it is known, else the static bytes."""
        return self.static_bytes if self.peak_bytes is None else self.peak_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory of all ranks.

    Attributes:
        source: "planned" or "measured".
        engine: name of the engine; "" for a measured report, which walks whatever is there.
        recipe: name of the recipe or baseline; "" for a measured report.
        parameters: elements of the whole model.
        ranks: one entry a rank.
        model: what it is called; "" if it has no name.
        mesh: the ranks in words.
        optimizer: name of the optimizer.
        versions: package -> version it was made with.
        assumptions: what the numbers rest on, a sentence each.
        budget: bytes a device has; None if nobody asked.
    """

    source: str
    engine: str
    recipe: str
    parameters: int
    ranks: tuple[RankMemory, ...]
    model: str = ""
    mesh: str = ""
    optimizer: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    assumptions: tuple[str, ...] = ()
    budget: int | None = None

    def static_bytes(self, rank: int) -> int:
        """Bytes resident on a rank between steps."""
        return self.ranks[rank].static_bytes

    @functools.cached_property
    def groups(self) -> tuple[tuple[Holding, tuple[int, ...]], ...]:
        """Distinct holdings, each with the ranks that hold it, in the order of their first rank."""
        found: dict[int, tuple[Holding, list[int]]] = {}
        for rank in self.ranks:
            found.setdefault(id(rank.holding), (rank.holding, []))[1].append(rank.rank)
        return tuple((holding, tuple(ranks)) for holding, ranks in found.values())

    @functools.cached_property
    def worst(self) -> RankMemory:
        """The rank that needs the most; the first of several."""
        return max(self.ranks, key=lambda rank: rank.needed_bytes)

    @functools.cached_property
    def imbalance(self) -> float:
        """Static bytes of the fullest rank over the mean, minus 1."""
        mean = self._total / len(self.ranks)
        return max(holding.static_bytes for holding, _ in self.groups) / mean - 1 if mean else 0.0

    @functools.cached_property
    def _total(self) -> int:
        return sum(holding.static_bytes * len(ranks) for holding, ranks in self.groups)

    @property
    def fits(self) -> bool | None:
        """Whether the worst rank stays within the budget; None without one."""
        return None if self.budget is None else self.worst.needed_bytes <= self.budget

    def bytes_per_parameter(self) -> float:
        """Static bytes of all ranks together over the parameters of the model."""
        return self._total / max(self.parameters, 1)

    def quantized_bytes_per_parameter(self) -> float | None:
        """Static bytes of quantized weights over their elements, scales included, padding not; None without any."""
        elements = sum(holding.quantized_parameters * len(ranks) for holding, ranks in self.groups)
        total = sum(holding.quantized_bytes * len(ranks) for holding, ranks in self.groups)
        return total / elements if elements else None

    def to_json(self) -> dict[str, object]:
        """Plain dictionary; bytes are raw integers. `eco_dist.memory.schema.read_report` reads it back."""
        from eco_dist.memory.schema import to_json

        return to_json(self)

    def table(self) -> Table:
        """Bytes per category, a column a rank (the extremes where there are many)."""
        from eco_dist.memory.tables import report_table

        return report_table(self)


def categories_of(holdings: Sequence[Holding]) -> list[Category]:
    """Static categories that occur in any of these, in their natural order."""
    present = {category for holding in holdings for category in holding.by_category}
    return [category for category in Category if category in present and category.is_static]


def format_bytes(count: int) -> str:
    """Bytes in binary units, as in every table of this package."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{count:,} B" if unit == "B" else f"{value:,.2f} {unit}"
        value /= 1024
    return f"{value:,.2f} TiB"
