"""Pools: what an engine cuts into equal parts.

[Note: pools]
Every engine we know lays one or several tensors end to end, counts them in *units* that it never cuts (rows for FSDP2,
single elements for DeepSpeed's flat partitions, scale groups where a weight is codes), and gives each of `parts`
positions the same number of units, the last ones what is left. So an engine is described by its pools: FSDP2 has one
pool a parameter, ZeRO 1 and 2 one a parameter group, FSDP1 one a wrapped module, a single process one part of each.

Positions that hold the same form a *segment*. A pool of one tensor has at most three: full, partly filled, empty.
That is why the work of a plan grows with the distinct tensors and the distinct shapes of their shards, and not with
ranks x tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from eco_dist.memory.report import TensorMemory, tensor_entries
from eco_dist.memory.storage import Bytes
from eco_dist.memory.tensors import ModelTensor
from eco_dist.numerics import BLOCK_SIZE, Granularity
from eco_dist.recipe import Recipe

Describe = Callable[[ModelTensor, int, int], Bytes]
"""Bytes of a run of units of a tensor, stored with room for so many."""

Rest = Callable[[int], Bytes]
"""Bytes of a position's units that no tensor fills."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """What a part holds of one tensor: bytes by category, and elements if it is a quantized weight."""

    tensor: str
    memory: tuple[TensorMemory, ...]
    is_quantized: bool
    elements: int


@dataclasses.dataclass(frozen=True)
class Segment:
    """Positions `start` to `stop` of a pool, which hold the same."""

    start: int
    stop: int
    entries: tuple[Entry, ...]


class Segmented(Protocol):
    """Whatever can say what each position holds: a pool, mostly."""

    def segments(self) -> Iterator[Segment]:
        """Segments in the order of positions, in positions of the mesh."""
        ...


def unit_columns(shape: Sequence[int], recipe: Recipe) -> int:
    """Elements of a unit of codes, which engines of flat partitions never cut: a block of 128, or a row."""
    whole_blocks = shape[-1] % BLOCK_SIZE == 0 and recipe.granularity is not Granularity.ROW
    return BLOCK_SIZE if whole_blocks else shape[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pool:
    """Tensors laid end to end and cut; see the note above.

    Attributes:
        members: tensors and how many units each has.
        unit: elements of a unit, for every member.
        parts: positions.
        chunk: units a position has room for.
        describe: bytes of a run of units.
        rest: bytes of units that are left over at a position of several tensors; None if they take none.
        spread: neighbouring positions of the mesh that have the same place in this pool: `ep` for experts, else 1.
        times: equal pools this one stands for.
    """

    members: tuple[tuple[ModelTensor, int], ...]
    unit: int
    parts: int
    chunk: int
    describe: Describe
    rest: Rest | None = None
    spread: int = 1
    times: int = 1

    def segments(self) -> Iterator[Segment]:
        """Segments in the order of positions, in positions of the mesh."""
        if len(self.members) == 1:
            ranges = self._of_one_tensor()
        else:
            ranges = ((part, part + 1, runs) for part, runs in enumerate(self._of_several()))
        made: dict[tuple[int, int], Entry] = {}  # most positions hold equal runs
        for start, stop, runs in ranges:
            entries = []
            for tensor, units in runs:
                key = (id(tensor), units)
                made[key] = made[key] if key in made else self._entry(tensor, units)
                entries.append(made[key])
            free = self.chunk - sum(units for _, units in runs)
            if self.rest is not None and free:
                entries.append(_padding(self.rest(free)))
            yield Segment(start * self.spread, stop * self.spread, tuple(entries))

    def _of_one_tensor(self) -> Iterator[tuple[int, int, list[tuple[ModelTensor, int]]]]:
        tensor, units = self.members[0]
        full = min(self.parts, units // self.chunk) if self.chunk else 0
        rest = units - full * self.chunk
        bounds = [(0, full, self.chunk), (full, full + bool(rest), rest), (full + bool(rest), self.parts, 0)]
        for start, stop, held in bounds:
            if start < stop:
                yield start, stop, [(tensor, held)]

    def _of_several(self) -> Iterator[list[tuple[ModelTensor, int]]]:
        """Runs of every position; a tensor without a unit there is left out."""
        index, used = 0, 0  # the next tensor, and how many of its units are given out
        for _ in range(self.parts):
            free, runs = self.chunk, []
            while free and index < len(self.members):
                tensor, units = self.members[index]
                taken = min(free, units - used)
                if taken:
                    runs.append((tensor, taken))
                free, used = free - taken, used + taken
                if used == units:
                    index, used = index + 1, 0
            yield runs

    def _entry(self, tensor: ModelTensor, units: int) -> Entry:
        room = self.chunk if len(self.members) == 1 else units
        counts = [(category, count * self.times) for category, count in self.describe(tensor, units, room)]
        return Entry(
            tensor=tensor.name,
            memory=tuple(tensor_entries(tensor.name, counts, count=self.times)),
            is_quantized=tensor.storage.is_quantized,
            elements=units * self.unit * self.times,
        )


def _padding(counts: Bytes) -> Entry:
    memory = tuple(tensor_entries("flat partitions", counts))
    return Entry(tensor="flat partitions", memory=memory, is_quantized=False, elements=0)


def combine(pools: Sequence[Segmented], positions: int) -> Iterator[tuple[int, int, list[Entry]]]:
    """Ranges of mesh positions that hold the same of every pool, with what they hold."""
    changes: dict[int, list[tuple[int, Segment]]] = {}
    for index, pool in enumerate(pools):
        for segment in pool.segments():
            changes.setdefault(segment.start, []).append((index, segment))
    current: list[tuple[Entry, ...]] = [() for _ in pools]
    starts = sorted(changes)
    for start, stop in zip(starts, [*starts[1:], positions], strict=True):
        for index, segment in changes[start]:
            current[index] = segment.entries
        yield start, stop, [entry for entries in current for entry in entries]
