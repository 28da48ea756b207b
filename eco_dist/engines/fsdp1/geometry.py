"""Where the units of a flat parameter lie, on every rank.

[Note: owners and borrowers]
FSDP1 lays the parameters of a wrapped module end to end and cuts this *flat parameter* into equal *chunks*, wherever
the number of ranks says. No border of ours falls inside a unit ([Note: units] in `eco_dist.engines.flat.units`), so:

* A rank *owns* the units that begin in its chunk: their codes, scales and moments are here, and it steps them.
* A border may cut one unit. The ranks behind it have its *tail* in their chunks, and *borrow* the unit: they keep its
  codes, so that they can fill their chunk without asking. A unit may be longer than the chunks of a small model.
* Before a step the borrowers send the owner the gradient of their tail; after it the owner sends them the codes.
"""

from __future__ import annotations

import dataclasses
import functools

from eco_dist.engines.flat.shards import PlannedWeight
from eco_dist.engines.flat.units import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """A parameter in a flat parameter.

    Attributes:
        name: its first name in the model.
        shape: its shape.
        offset: its first element in the flat parameter.
        elements: number of elements.
        planned: how it is stored; None in high precision.
        group: number of the optimizer's group that steps it; None if nothing does.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    elements: int
    planned: PlannedWeight | None
    group: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tail:
    """The part of a cut unit that lies at the beginning of a borrower's chunk.

    Attributes:
        rank: the borrower.
        first: its first element in the unit.
        count: number of elements.
    """

    rank: int
    first: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CutUnit:
    """A unit that borders of chunks cut.

    Attributes:
        member: number of its weight among the members.
        unit: its number in the weight.
        owner: the rank it begins on.
        tails: one for each border, in order.
    """

    member: int
    unit: int
    owner: int
    tails: tuple[Tail, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Geometry:
    """A flat parameter.

    Attributes:
        members: in order; there may be padding between and behind them.
        chunk: elements of a rank's chunk, padding included.
        ranks: number of chunks.
    """

    members: tuple[Member, ...]
    chunk: int
    ranks: int

    def piece(self, member: Member, rank: int) -> tuple[int, int]:
        """First element (counted in the member) and number of the elements that lie in a rank's chunk."""
        start = min(max(rank * self.chunk - member.offset, 0), member.elements)
        end = min(max((rank + 1) * self.chunk - member.offset, start), member.elements)
        return start, end - start

    def run(self, member: Member, rank: int) -> Run:
        """The units of a quantized member that a rank owns."""
        assert member.planned is not None
        units = member.planned.units
        first, end = (
            min(max(-(-(border * self.chunk - member.offset) // units.columns), 0), units.count(member.elements))
            for border in (rank, rank + 1)
        )
        return Run(rank=rank, row=0, first=first, units=end - first)

    @functools.cached_property
    def cut_units(self) -> tuple[CutUnit, ...]:
        """All units that a border cuts, in order; at most one for each border."""
        found: dict[tuple[int, int], list[Tail]] = {}
        for rank in range(1, self.ranks):
            border = rank * self.chunk
            for number, member in enumerate(self.members):
                if member.planned is None or not member.offset < border < member.offset + member.elements:
                    continue
                columns = member.planned.units.columns
                unit, first = divmod(border - member.offset, columns)
                if first:
                    count = min(columns - first, self.chunk)
                    found.setdefault((number, unit), []).append(Tail(rank=rank, first=first, count=count))
        return tuple(
            CutUnit(
                member=number,
                unit=unit,
                owner=(self.members[number].offset + unit * self._columns(number)) // self.chunk,
                tails=tuple(tails),
            )
            for (number, unit), tails in found.items()
        )

    def _columns(self, number: int) -> int:
        planned = self.members[number].planned
        assert planned is not None
        return planned.units.columns
