"""How an engine's flat partitions and our scale groups fit together.

[Note: units]
DeepSpeed and FSDP1 cut a run of flat elements wherever the number of ranks says. No border of ours ever falls inside a
scale group, an 8-bit moment's block or a row of random bits: a weight is counted in *units*, and every border falls
between two. A unit is a block of 128 where rows are whole blocks, and a row otherwise. A run of units is then an
ordinary shard whose rows are units: element numbers of the random bits, scale groups and moment blocks are those of the
whole weight, so that any number of ranks, any stage and any other engine compute the same bits.

* Stage 1, 2: parameters with equal units share a parameter group, whose flat length is padded to units x ranks.
* Stage 3: every parameter is padded to units x ranks by itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eco_dist.numerics import BLOCK_SIZE, Granularity, codes_scale_shape, codes_shape, decode_into, encode_checked
from eco_dist.recipe import Recipe


def unit_columns(shape: Sequence[int], recipe: Recipe) -> int:
    """Elements of a unit of a weight of this global shape."""
    whole_blocks = shape[-1] % BLOCK_SIZE == 0 and recipe.granularity is not Granularity.ROW
    return BLOCK_SIZE if whole_blocks else shape[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Units:
    """A weight, or a part of one, as a matrix `[units, columns]`.

    Attributes:
        recipe: how it is stored; it has a format.
        columns: elements of a unit.
    """

    recipe: Recipe
    columns: int

    @classmethod
    def of(cls, shape: Sequence[int], recipe: Recipe) -> Units:
        """Units of a weight of this global shape."""
        return cls(recipe=recipe, columns=unit_columns(shape, recipe))

    def count(self, elements: int) -> int:
        """Units in so many elements."""
        assert elements % self.columns == 0, (elements, self.columns)
        return elements // self.columns

    def codes_shape(self, units: int) -> tuple[int, ...]:
        """Shape of the codes of some units."""
        assert self.recipe.format is not None
        return codes_shape((units, self.columns), self.recipe.format)

    def scales_shape(self, units: int) -> tuple[int, ...]:
        """Shape of the scales of some units."""
        assert self.recipe.format is not None
        return codes_scale_shape((units, self.columns), self.recipe.format, self.recipe.granularity)

    @property
    def has_one_scale(self) -> bool:
        """Whether all units of a weight share a scale."""
        return self.recipe.granularity is Granularity.TENSOR

    @property
    def codes_dtype(self) -> torch.dtype:
        """Dtype of the codes."""
        assert self.recipe.format is not None
        return self.recipe.format.grid.storage_dtype

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and scales of a whole weight, rounded to nearest.

        Args:
            values: fp32, bf16 or fp16 in its global shape, finite.

        Returns:
            Codes and scales as rows of units.

        Raises:
            ValueError: if a value is NaN or infinite.
        """
        assert self.recipe.format is not None
        matrix = values.detach().reshape(-1, self.columns)
        return encode_checked(matrix, self.recipe.format, self.recipe.granularity)

    def decode_into(self, out: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Write the stored values of some units over `out`, `[units, columns]` in any dtype."""
        assert self.recipe.format is not None
        decode_into(out, codes, scales, self.recipe.format, self.recipe.granularity)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A run of one weight's units inside one rank's partition.

    Attributes:
        rank: rank of the partition in its process group.
        row: number of its first unit in that partition.
        first: number of its first unit in the weight.
        units: how many; may be 0.
    """

    rank: int
    row: int
    first: int
    units: int


def runs_of_flat(offset: int, units: int, per_rank: int, ranks: int) -> list[Run]:
    """Runs of a weight in a flat group that is cut into equal partitions, one for each rank, empty ones included.

    Args:
        offset: number of the weight's first unit in the group.
        units: units of the weight.
        per_rank: units of a partition.
        ranks: number of partitions.
    """
    runs = []
    for rank in range(ranks):
        start = min(max(rank * per_rank, offset), offset + units)
        end = max(min((rank + 1) * per_rank, offset + units), start)
        row = start - rank * per_rank if end > start else 0
        runs.append(Run(rank=rank, row=row, first=start - offset, units=end - start))
    return runs


def padded_group_length(lengths: Sequence[int], columns: int, ranks: int) -> int:
    """Elements of a flat group of weights once every rank's partition is a whole and even number of units."""
    quantum = math.lcm(2, columns) * ranks
    return -(-sum(lengths) // quantum) * quantum
