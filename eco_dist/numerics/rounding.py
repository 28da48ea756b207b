"""Rounding onto a grid: nearest (ties to even) and stochastic (unbiased).

Stochastic rounding adds centred noise of one grid step and rounds to nearest. Two pitfalls are avoided here:

* the step is that of the value's own binade, before the noise. Adding noise and then casting rounds in the binade the
  noise landed in, whose step may be half as large: biased next to powers of two;
* values are saturated before any cast, because the cast of an overflowing value to E4M3 is NaN, and infinity becomes
  448 without a word. Finiteness must be checked before rounding, never after.

With h uniform in [-32768, 32767] the noise is (2h+1)/2^17 steps: symmetric, never +-1/2, so a value that is already on
the grid stays there, and the probability of rounding up is right to 2^-17.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

from eco_dist.numerics.formats import Format, grid_step

NOISE_UNIT = 2.0**-17


class Rounding(enum.Enum):
    """How a value between two representable numbers is rounded."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


def round_to_grid(values: Tensor, format: Format, halves: Tensor | None = None) -> Tensor:
    """Round to representable numbers, saturating at the largest.

    Args:
        values: fp32, any shape, finite, in units of the scale.
        format: the grid.
        halves: int32 tensor of the same shape in [-32768, 32767] for stochastic rounding; None rounds to nearest.

    Returns:
        fp32 tensor of the same shape holding representable numbers. A zero keeps the sign of what was rounded.
    """
    largest = format.grid.max
    if format is Format.BF16:
        rounded = values.to(torch.bfloat16).float() if halves is None else _truncate_with_noise(values, halves)
        return rounded.clamp_(-largest, largest)
    values = values.clamp(-largest, largest)
    step = grid_step(values, format)
    if halves is not None:
        values = values + (2 * halves + 1) * (step * NOISE_UNIT)
    return (values / step).round_().mul_(step).clamp_(-largest, largest)


def square_root(values: Tensor) -> Tensor:
    """Correctly rounded square root of fp32 values, as hardware gives it.

    torch's own on the CPU comes from a vector library and is one ulp off for about one value in a hundred. The root in
    fp64, rounded to fp32, is exact: 53 bits are more than twice 24 and two.
    """
    return values.double().sqrt_().float()


def _truncate_with_noise(values: Tensor, halves: Tensor) -> Tensor:
    """Stochastic rounding to BF16: add 16 random bits below the kept mantissa and cut them off.

    The centred noise above needs a 17th bit that fp32 does not have below a BF16 mantissa. Adding h + 32768 in
    [0, 65535] to the magnitude's bit pattern rounds up with exactly the right probability.
    """
    bits = values.view(torch.int32) + (halves + 32768)
    return bits.bitwise_and_(-65536).view(torch.float32)
