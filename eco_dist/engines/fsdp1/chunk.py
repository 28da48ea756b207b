"""What one rank holds of a flat parameter in the place of FSDP1's fp32 chunk, and how it fills that chunk."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.engines.flat.shards import PlannedWeight, WeightShard
from eco_dist.engines.fsdp1.geometry import CutUnit, Geometry, Member, Tail


@dataclasses.dataclass(frozen=True, kw_only=True)
class Borrowed:
    """The unit whose tail begins this rank's chunk; another rank owns it.

    Attributes:
        planned: the weight.
        cut: the unit.
        tail: which part of it is here.
        codes: its codes, `[1, columns]`.
        scales: its scales; the shard's own where the weight has one.
    """

    planned: PlannedWeight
    cut: CutUnit
    tail: Tail
    codes: Tensor
    scales: Tensor


class Chunk:
    """Codes and high-precision elements of one rank.

    Attributes:
        geometry: of the flat parameter.
        rank: number of the chunk.
        device: where it lies.
        shards: the units it owns, by the number of the member.
        plain: its fp32 elements of the other members, by number.
        borrowed: a unit that begins on a rank before; None if none does.
    """

    def __init__(self, geometry: Geometry, rank: int, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Allocate, uninitialized.

        Args:
            geometry: of the flat parameter.
            rank: number of the chunk.
            device: where it lies.
            group: ranks with the other chunks; None if there are none.
        """
        self.geometry = geometry
        self.rank = rank
        self.device = device
        self.shards: dict[int, WeightShard] = {}
        self.plain: dict[int, Tensor] = {}
        for number, member in enumerate(geometry.members):
            if member.planned is None:
                self.plain[number] = torch.empty(geometry.piece(member, rank)[1], device=device)
                continue
            units, run = member.planned.units, geometry.run(member, rank)
            codes = torch.empty(units.codes_shape(run.units), dtype=units.codes_dtype, device=device)
            # Whatever the number of units, a weight's only scale is on every rank.
            scales = torch.empty(units.scales_shape(max(run.units, int(units.has_one_scale))), device=device)
            self.shards[number] = WeightShard(member.planned, run, codes, scales, group)
        self.borrowed = self._borrow(device)
        self._gaps = tuple(self._padding())

    @property
    def _start(self) -> int:
        return self.rank * self.geometry.chunk

    def _borrow(self, device: torch.device) -> Borrowed | None:
        for cut in self.geometry.cut_units:
            for tail in cut.tails:
                if tail.rank == self.rank:
                    shard = self.shards[cut.member]
                    units = shard.plan.units
                    scales = torch.empty(units.scales_shape(1), device=device)
                    return Borrowed(
                        planned=shard.plan,
                        cut=cut,
                        tail=tail,
                        codes=torch.empty(units.codes_shape(1), dtype=units.codes_dtype, device=device),
                        scales=shard.weight.scales if units.has_one_scale else scales,
                    )
        return None

    def _padding(self) -> Iterator[slice]:
        """Elements of the chunk that no member has."""
        position = 0
        for member in self.geometry.members:
            start, count = self.geometry.piece(member, self.rank)
            if count:
                first = member.offset + start - self._start
                yield slice(position, first)
                position = first + count
        yield slice(position, self.geometry.chunk)

    # --- values -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def assign(self, flat: Tensor) -> None:
        """Take everything from the whole flat parameter's values.

        Raises:
            ValueError: if a weight that becomes codes holds NaN or infinity.
        """
        for number, member in enumerate(self.geometry.members):
            values = _of_member(flat, member)
            if number in self.plain:
                self.plain[number].copy_(self._mine(values, member))
                continue
            self.shards[number].assign(values)
            if self.borrowed is not None and self.borrowed.cut.member == number:
                units, unit = self.borrowed.planned.units, self.borrowed.cut.unit
                codes, scales = units.encode(values)
                self.borrowed.codes.copy_(codes[unit : unit + 1])
                if not units.has_one_scale:
                    self.borrowed.scales.copy_(scales[unit : unit + 1])

    @torch.no_grad()
    def assign_changed(self, flat: Tensor, before: Tensor) -> None:
        """Take over what differs from the stored values; other units keep their codes, the borrowed one is not touched.

        Args:
            flat: whole flat parameter in any floating dtype.
            before: its stored values in that dtype.
        """
        for number, member in enumerate(self.geometry.members):
            values = _of_member(flat, member)
            if number in self.shards:
                self.shards[number].assign_changed(values, _of_member(before, member))
                continue
            stored, mine = self.plain[number], self._mine(values, member)
            stored.copy_(torch.where(stored.to(mine.dtype) == mine, stored, mine.float()))

    def _mine(self, values: Tensor, member: Member) -> Tensor:
        start, count = self.geometry.piece(member, self.rank)
        return values[start : start + count]

    @torch.no_grad()
    def fill(self, out: Tensor) -> None:
        """Write the stored values over a chunk in any floating dtype, zeros over padding."""
        for gap in self._gaps:
            out[gap].zero_()
        for number, tensor in self.plain.items():
            if tensor.numel():
                first, _ = self._place(number)
                out[first : first + tensor.numel()].copy_(tensor)
        for number, shard in self.shards.items():
            if shard.run.units:
                self._fill_from(out, number, shard)
        if self.borrowed is not None:
            unit = out.new_empty(1, self.borrowed.planned.units.columns)
            self.borrowed.planned.units.decode_into(unit, self.borrowed.codes, self.borrowed.scales)
            tail = self.borrowed.tail
            out[: tail.count].copy_(unit[0, tail.first : tail.first + tail.count])

    def _fill_from(self, out: Tensor, number: int, shard: WeightShard) -> None:
        units, weight = shard.plan.units, shard.weight
        first, whole = self._place(number)
        rows = out[first : first + whole * units.columns].view(whole, units.columns)
        units.decode_into(rows, weight.codes[:whole], weight.scales if units.has_one_scale else weight.scales[:whole])
        if whole < shard.run.units:  # the last one is cut
            unit = out.new_empty(1, units.columns)
            units.decode_into(
                unit, weight.codes[whole:], weight.scales if units.has_one_scale else weight.scales[whole:]
            )
            begun = first + whole * units.columns
            out[begun:].copy_(unit[0, : len(out) - begun])

    def _place(self, number: int) -> tuple[int, int]:
        """Where a member's elements (units) begin in the chunk, and how many units are whole in it."""
        member = self.geometry.members[number]
        if number in self.plain:
            return member.offset + self.geometry.piece(member, self.rank)[0] - self._start, 0
        shard = self.shards[number]
        columns = shard.plan.units.columns
        first = member.offset + shard.run.first * columns - self._start
        return first, min(shard.run.units, (self.geometry.chunk - first) // columns)

    # --- gradients --------------------------------------------------------------------------------------------------

    def gradient(self, number: int, grad: Tensor, tails: Mapping[int, list[Tensor]]) -> Tensor:
        """The gradient of a member's units or elements on this rank; a view of the chunk's, unless a unit is cut.

        Args:
            number: of the member.
            grad: of the chunk.
            tails: gradients of the tails of this rank's cut units, by the number of the member.
        """
        first, _ = self._place(number)
        if number in self.plain:
            return grad[first : first + self.plain[number].numel()]
        shard = self.shards[number]
        columns = shard.plan.units.columns
        if not shard.run.units:
            return grad.new_empty(0, columns)
        own = grad[first : first + shard.run.units * columns]  # ends with the chunk
        if number in tails:
            own = torch.cat([own, *(tail.to(grad.dtype) for tail in tails[number])])
        return own.view(shard.run.units, columns)


def _of_member(flat: Tensor, member: Member) -> Tensor:
    return flat[member.offset : member.offset + member.elements]
