"""Codes of all ranks at stage 1 and 2: this rank's own run is always there, the others once they are gathered."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.engines.deepspeed.wire import WireLayout, all_gather_runs
from eco_dist.engines.flat.shards import PlannedWeight, WeightShard
from eco_dist.engines.flat.units import Run, runs_of_flat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Location:
    """Where a weight lies in the runs of all ranks.

    Attributes:
        section: number of its section.
        runs: one for every rank.
        scale_row: row of its scale where each weight has one, else None.
    """

    section: int
    runs: tuple[Run, ...]
    scale_row: int | None


class Replicas:
    """The codes that the ranks of one process group hold of a model.

    Attributes:
        own: this rank's run of bytes.
    """

    def __init__(self, layout: WireLayout, group: dist.ProcessGroup, device: torch.device, *, resident: bool) -> None:
        """Allocate.

        Args:
            layout: layout of a run.
            group: ranks that share the weights.
            device: where.
            resident: whether the runs of the other ranks stay between gathers; `own` is then a part of them.
        """
        self._layout = layout
        self._group = group
        self._resident = resident
        self._everyone: Tensor | None = layout.empty(group.size(), device) if resident else None
        self.own = layout.empty(1, device)[0] if self._everyone is None else self._everyone[group.rank()]

    def place(self, section: int, number: int, planned: PlannedWeight, offset: int) -> tuple[WeightShard, Location]:
        """A weight's shard on this rank, uninitialized, and where all of it lies.

        Args:
            section: number of its section.
            number: its number in the section.
            planned: the weight.
            offset: units before it in the runs of all ranks, one behind the other.
        """
        units, per_rank = planned.units, self._layout.sections[section].count
        runs = runs_of_flat(offset, units.count(planned.elements), per_rank, self._group.size())
        location = Location(section=section, runs=tuple(runs), scale_row=number if units.has_one_scale else None)
        run = runs[self._group.rank()]
        codes, scales = self.part(location, run, self.own)
        return WeightShard(planned, run, codes, scales, self._group), location

    def part(self, location: Location, run: Run, source: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a run, as views of that rank's bytes."""
        codes, scales = self._layout.views(source, location.section)
        rows = slice(run.row, run.row + run.units)
        one = location.scale_row
        return codes[rows], scales[rows] if one is None else scales[one : one + 1]

    def gather(self) -> None:
        """Collect the runs of all ranks. Collective."""
        if self._group.size() == 1:
            self._everyone = self.own.view(1, -1)
            return
        if self._everyone is None:
            self._everyone = self._layout.empty(self._group.size(), self.own.device)
        all_gather_runs(self._everyone, self.own, self._group)

    def others(self) -> list[Tensor]:
        """Runs of the other ranks that are here now."""
        if self._everyone is None:
            return []
        return [run for rank, run in enumerate(self._everyone) if rank != self._group.rank()]

    def drop(self) -> None:
        """Free what others hold, unless it is to stay."""
        if not self._resident:
            self._everyone = None

    def decode_into(self, location: Location, out: Tensor) -> None:
        """Write a weight's stored values over `out`, a contiguous tensor of its size; after `gather`."""
        assert self._everyone is not None
        units = self._layout.sections[location.section].units
        rows = out.view(-1, units.columns)
        for run in location.runs:
            if run.units:
                codes, scales = self.part(location, run, self._everyone[run.rank])
                units.decode_into(rows[run.first : run.first + run.units], codes, scales)
