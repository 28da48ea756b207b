"""Codes and scales of several weights as one run of bytes a rank, so that one all-gather moves them all.

Float8 never meets a collective: everything travels as uint8. A rank's run holds the scales of all weights, then their
codes, and every rank's run is laid out alike.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.engines.flat.units import Units

_ALIGNMENT = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """What one rank sends of one weight, or of one flat group of weights.

    Attributes:
        units: how it is stored.
        count: units on every rank, padding included.
        scale_rows: rows of the scales: `count`, or the number of weights where each has one scale.
    """

    units: Units
    count: int
    scale_rows: int

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """Shape of the codes."""
        return self.units.codes_shape(self.count)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Shape of the scales."""
        return (self.scale_rows, *self.units.scales_shape(self.count)[1:])


class WireLayout:
    """Where codes and scales of some sections lie in a rank's run of bytes."""

    def __init__(self, sections: Sequence[Section]) -> None:
        """Lay sections out."""
        self.sections = tuple(sections)
        self._scales: list[int] = []
        self._codes: list[int] = []
        end = 0
        for section in self.sections:
            self._scales.append(end)
            end += 4 * math.prod(section.scales_shape)
        end = _aligned(end)
        for section in self.sections:
            self._codes.append(end)
            end = _aligned(end + math.prod(section.codes_shape) * section.units.codes_dtype.itemsize)
        self.bytes = end

    def views(self, run: Tensor, index: int) -> tuple[Tensor, Tensor]:
        """Codes and scales of a section as views of a rank's run."""
        section, scales, codes = self.sections[index], self._scales[index], self._codes[index]
        code_bytes = math.prod(section.codes_shape) * section.units.codes_dtype.itemsize
        scale_bytes = 4 * math.prod(section.scales_shape)
        return (
            run[codes : codes + code_bytes].view(section.units.codes_dtype).view(section.codes_shape),
            run[scales : scales + scale_bytes].view(torch.float32).view(section.scales_shape),
        )

    def empty(self, ranks: int, device: torch.device) -> Tensor:
        """Room for the runs of some ranks, `[ranks, bytes]`, zeros."""
        return torch.zeros((ranks, self.bytes), dtype=torch.uint8, device=device)


def all_gather_runs(
    everyone: Tensor, mine: Tensor, group: dist.ProcessGroup, *, async_op: bool = False
) -> dist.Work | None:
    """Collect the runs of all ranks: uint8 `[bytes]` into `[ranks, bytes]`, which may contain `mine`."""
    work: dist.Work | None = dist.all_gather_into_tensor(everyone.view(-1), mine, group=group, async_op=async_op)
    return work


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
