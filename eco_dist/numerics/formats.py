"""The grids that codes live on.

A *format* is a finite set of representable numbers in units of the scale. Floating formats (E4M3, E5M2, BF16) have a
step that doubles with every binade down to a smallest, subnormal step; integer formats have the step 1 everywhere.
"""

from __future__ import annotations

import dataclasses
import enum

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grid:
    """What rounding and storage need to know of a format.

    Attributes:
        bits: bits of one code.
        max: largest representable magnitude, in units of the scale.
        mantissa_bits: explicit mantissa bits; 0 for integer formats, whose step is 1 in every binade.
        min_exponent: exponent of the smallest normal number; below it the step no longer halves.
        storage_dtype: dtype of the tensor of codes. Eight-bit floats are kept as uint8 because no collective
            library takes float8 and most float8 tensor operations do not exist.
        float_dtype: torch's own dtype with the same bit pattern, or None for integers.
    """

    bits: int
    max: float
    mantissa_bits: int
    min_exponent: int
    storage_dtype: torch.dtype
    float_dtype: torch.dtype | None = None


class Format(enum.Enum):
    """Element format of codes: `e4m3`, `e5m2`, `int8`, `int4` (two per byte), `bf16`."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    INT8 = "int8"
    INT4 = "int4"
    BF16 = "bf16"

    @property
    def grid(self) -> Grid:
        """The numbers that describe this format."""
        return _GRIDS[self]

    @property
    def is_scaled(self) -> bool:
        """Whether codes carry scales. BF16 has the exponent range of fp32 and needs none."""
        return self is not Format.BF16

    @property
    def is_integer(self) -> bool:
        """Whether the grid is uniform."""
        return self.grid.float_dtype is None


_GRIDS = {
    Format.E4M3: Grid(
        bits=8,
        max=448.0,
        mantissa_bits=3,
        min_exponent=-6,
        storage_dtype=torch.uint8,
        float_dtype=torch.float8_e4m3fn,
    ),
    Format.E5M2: Grid(
        bits=8,
        max=57344.0,
        mantissa_bits=2,
        min_exponent=-14,
        storage_dtype=torch.uint8,
        float_dtype=torch.float8_e5m2,
    ),
    # Symmetric: -128 and -8 stay unused, so that a weight and its negative have the same grid.
    Format.INT8: Grid(bits=8, max=127.0, mantissa_bits=0, min_exponent=0, storage_dtype=torch.int8),
    Format.INT4: Grid(bits=4, max=7.0, mantissa_bits=0, min_exponent=0, storage_dtype=torch.uint8),
    Format.BF16: Grid(
        bits=16,
        max=torch.finfo(torch.bfloat16).max,
        mantissa_bits=7,
        min_exponent=-126,
        storage_dtype=torch.bfloat16,
        float_dtype=torch.bfloat16,
    ),
}


def grid_step(values: torch.Tensor, format: Format) -> torch.Tensor:
    """Distance between neighbouring representable numbers in the binade of each value.

    Args:
        values: fp32, any shape, in units of the scale.
        format: the grid.

    Returns:
        fp32 tensor of the same shape: 2^(max(floor(log2 |x|), min_exponent) - mantissa_bits), or 1 for integers.
    """
    grid = format.grid
    if format.is_integer:
        return torch.ones_like(values)
    # The exponent field of fp32 is the binade: no log2, exact for every value, and the same three integer
    # operations a fused kernel uses.
    exponent = values.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=(127 + grid.min_exponent) << 23)
    if format is Format.BF16:
        # 2^(E-7) is subnormal in fp32 for the smallest binades, so it cannot be built by exponent subtraction.
        return exponent.view(torch.float32) * 2.0**-grid.mantissa_bits
    return exponent.sub_(grid.mantissa_bits << 23).view(torch.float32)
