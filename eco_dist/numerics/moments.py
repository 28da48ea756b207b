"""Storage formats of Adam's moments.

| format     | bytes | first moment            | second moment                       |
|------------|-------|-------------------------|-------------------------------------|
| `fp32`     | 4     | as is                   | as is                               |
| `bf16`     | 2     | nearest                 | nearest                             |
| `fp8`      | 1     | E4M3, blocks of 128     | E4M3 of the square root             |
| `dynamic8` | 1     | dynamic map, signed     | dynamic map of the square root      |

Both 8-bit forms keep one fp32 scale per block of 128 along the last dimension, whatever the granularity of the codes,
so their layout follows from the global shape. The second moment goes through its square root because that is what the
step divides by, and because it doubles the range in decades; a positive one never becomes zero, since the step would
then divide by eps.

Rounding is to nearest or stochastic; the second moment is rounded as its square root.

The dynamic map (Dettmers et al., "8-bit optimizers via block-wise quantization", ICLR 2022, section 2.3) spends its
256 codes on seven decades with the finest spacing in the highest.
"""

from __future__ import annotations

import enum
import functools

import torch
from torch import Tensor

from eco_dist.numerics.codec import SMALLEST_SCALE, decode, encode
from eco_dist.numerics.formats import Format
from eco_dist.numerics.groups import Granularity, expand_to_elements, group_absmax
from eco_dist.numerics.rounding import NOISE_UNIT, round_to_grid, square_root

DECADES = 7


class MomentFormat(enum.Enum):
    """How a moment is stored: `fp32`, `bf16`, `fp8` or `dynamic8`."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP8 = "fp8"
    DYNAMIC8 = "dynamic8"

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the stored tensor."""
        return {"fp32": torch.float32, "bf16": torch.bfloat16}.get(self.value, torch.uint8)

    @property
    def has_scales(self) -> bool:
        """Whether block scales are stored beside the codes."""
        return self in (MomentFormat.FP8, MomentFormat.DYNAMIC8)


@functools.cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 ascending values in [-1, 1] (or [0, 1]) that dynamic 8-bit codes stand for."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        items = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1.0, items + 1, dtype=torch.float64)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - DECADES + 1)
        values += means.tolist()
        if signed:
            values += (-means).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


def encode_moment(
    values: Tensor, format: MomentFormat, *, second: bool, halves: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Stored form of a moment.

    Args:
        values: fp32 `[..., columns]`; the second moment is non-negative.
        format: storage format.
        second: whether this is the second moment.
        halves: random integers for stochastic rounding (`random_halves`); None rounds to nearest.

    Returns:
        The stored tensor and its block scales (None for fp32 and bf16).
    """
    if format is MomentFormat.FP32:
        return values, None
    if format is MomentFormat.BF16:
        rounded = values if halves is None else round_to_grid(values, Format.BF16, halves)
        return rounded.to(torch.bfloat16), None
    if second:
        values = square_root(values)
    if format is MomentFormat.FP8:
        codes, scales = encode(values, Format.E4M3, Granularity.BLOCK, halves=halves)
        codes = codes & 0x7F if second else codes  # noise may leave a zero with a sign
    else:
        codes, scales = _encode_dynamic(values, halves, signed=not second)
    if second:
        codes = torch.where(values > 0, codes.clamp(min=1), codes)
    return codes, scales


def decode_moment(stored: Tensor, scales: Tensor | None, format: MomentFormat, *, second: bool) -> Tensor:
    """fp32 values of a stored moment, in a tensor of their own."""
    if scales is None:
        return stored.to(torch.float32, copy=True)
    columns = stored.shape[-1]
    if format is MomentFormat.FP8:
        values = decode(stored, scales, Format.E4M3, Granularity.BLOCK, columns)
    else:
        table = dynamic_map(not second).to(stored.device)
        values = table[stored.long()] * expand_to_elements(scales, columns, Granularity.BLOCK)
    return values.square_() if second else values


def _encode_dynamic(values: Tensor, halves: Tensor | None, *, signed: bool) -> tuple[Tensor, Tensor]:
    table = dynamic_map(signed).to(values.device)
    absmax = group_absmax(values, Granularity.BLOCK)
    scales = torch.where(absmax == 0, torch.ones_like(absmax), absmax.clamp(min=SMALLEST_SCALE))
    unit = values * expand_to_elements(scales.reciprocal(), values.shape[-1], Granularity.BLOCK)
    if halves is None:
        return torch.bucketize(unit, (table[1:] + table[:-1]) / 2).to(torch.uint8), scales
    below = (torch.bucketize(unit, table, right=True) - 1).clamp_(0, len(table) - 2)
    share = (unit - table[below]) / (table[below + 1] - table[below])
    return (below + (share > (2 * halves + 65537) * NOISE_UNIT)).to(torch.uint8), scales
