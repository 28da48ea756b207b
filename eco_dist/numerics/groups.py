"""Which elements share a scale.

Groups follow the tensor's last dimension only, so they depend on the global shape alone and a tensor cut along
dimension 0 (FSDP2, ZeRO, expert parallelism) never cuts one, except the single group of `tensor` granularity.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_SIZE = 128
"""Elements of one block along the last dimension; the last block of a row may be shorter."""


class Granularity(enum.Enum):
    """Extent of a scale group: a whole row, a block of 128 along a row, or the whole tensor."""

    ROW = "row"
    BLOCK = "block"
    TENSOR = "tensor"


def blocks_per_row(columns: int) -> int:
    """Number of blocks that cover a row of `columns` elements."""
    return math.ceil(columns / BLOCK_SIZE)


def scale_shape(shape: Sequence[int], granularity: Granularity) -> tuple[int, ...]:
    """Shape of the scales of a tensor of `shape`: `[..., 1]`, `[..., ceil(columns/128)]` or `[1, ..., 1]`.

    Raises:
        ValueError: for a 0-dimensional tensor, which has no rows.
    """
    if len(shape) == 0:
        raise ValueError("a scale group needs at least one dimension, got a 0-dimensional tensor; keep it unquantized")
    if granularity is Granularity.TENSOR:
        return (1,) * len(shape)
    groups = 1 if granularity is Granularity.ROW else blocks_per_row(shape[-1])
    return (*shape[:-1], groups)


def group_absmax(values: Tensor, granularity: Granularity) -> Tensor:
    """Largest magnitude of each group.

    Args:
        values: fp32 `[..., columns]`; may have zero rows.
        granularity: extent of a group.

    Returns:
        fp32 tensor of shape `scale_shape(values.shape, granularity)`; 0 for a group without elements.
    """
    shape = scale_shape(values.shape, granularity)
    if values.numel() == 0:
        return values.new_zeros(shape)
    magnitude = values.abs()
    if granularity is Granularity.TENSOR:
        return magnitude.amax().reshape(shape)
    if granularity is Granularity.ROW:
        return magnitude.amax(-1, keepdim=True)
    missing = shape[-1] * BLOCK_SIZE - values.shape[-1]
    if missing:
        magnitude = torch.nn.functional.pad(magnitude, (0, missing))
    return magnitude.reshape(*shape, BLOCK_SIZE).amax(-1)


def expand_to_elements(per_group: Tensor, columns: int, granularity: Granularity) -> Tensor:
    """Spread one value per group so that it broadcasts against `[..., columns]`."""
    if granularity is not Granularity.BLOCK or per_group.shape[-1] == 1:
        return per_group
    return per_group.repeat_interleave(BLOCK_SIZE, -1)[..., :columns]
