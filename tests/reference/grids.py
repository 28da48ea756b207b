"""Every representable number of a format, and rounding by looking the nearest one up. numpy float64, no torch.

Numbers are built from bit fields, so nothing here shares a formula with the code under test.
"""

from __future__ import annotations

import functools

import numpy as np

FORMATS = ("e4m3", "e5m2", "int8", "int4", "bf16")
SCALED = ("e4m3", "e5m2", "int8", "int4")


@functools.cache
def codes(name: str) -> np.ndarray:
    """Codes of all finite values, as unsigned bit patterns (bf16, floats) or as signed integers (int8, int4)."""
    if name == "int8":
        return np.arange(-127, 128)
    if name == "int4":
        return np.arange(-7, 8)
    patterns = np.arange(2**16 if name == "bf16" else 2**8)
    return patterns[np.isfinite(_from_bits(name, patterns))]


@functools.cache
def values(name: str) -> np.ndarray:
    """Values of `codes(name)`, in units of the scale."""
    return codes(name).astype(np.float64) if name.startswith("int") else _from_bits(name, codes(name))


@functools.cache
def magnitudes(name: str) -> np.ndarray:
    """Non-negative representable numbers, ascending: position i is the code of magnitude i."""
    return np.unique(np.abs(values(name)))


def largest(name: str) -> float:
    """Largest representable number."""
    return float(magnitudes(name)[-1])


def _from_bits(name: str, patterns: np.ndarray) -> np.ndarray:
    exponent_bits, mantissa_bits = {"e4m3": (4, 3), "e5m2": (5, 2), "bf16": (8, 7)}[name]
    bias = 2 ** (exponent_bits - 1) - 1
    sign = np.where(patterns >> (exponent_bits + mantissa_bits), -1.0, 1.0)
    exponent = (patterns >> mantissa_bits) & (2**exponent_bits - 1)
    fraction = (patterns & (2**mantissa_bits - 1)) / 2**mantissa_bits
    subnormal = np.ldexp(fraction, 1 - bias)
    normal = np.ldexp(1 + fraction, exponent - bias)
    result = sign * np.where(exponent == 0, subnormal, normal)
    if name == "e4m3":  # no infinities, one NaN a sign
        return np.where((patterns & 0x7F) == 0x7F, np.nan, result)
    return np.where(exponent == 2**exponent_bits - 1, np.nan, result)


def neighbours(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Largest representable number <= x and smallest >= x; both the largest one beyond the range."""
    grid = np.unique(values(name))
    x = np.clip(np.asarray(x, np.float64), grid[0], grid[-1])
    below = grid[np.searchsorted(grid, x, side="right") - 1]
    above = grid[np.searchsorted(grid, x, side="left")]
    return below, above


def nearest(x: np.ndarray, name: str) -> np.ndarray:
    """Nearest representable number, ties to the even code, saturating."""
    x = np.asarray(x, np.float64)
    grid = magnitudes(name)
    below, above = neighbours(np.abs(x), name)
    to_below, to_above = np.abs(x) - below, above - np.abs(x)
    even_below = np.searchsorted(grid, below) % 2 == 0
    down = (to_below < to_above) | ((to_below == to_above) & even_below)
    return np.copysign(np.where(down | (np.abs(x) > grid[-1]), below, above), x)


def step_at(x: np.ndarray, name: str) -> np.ndarray:
    """Distance between the neighbours of |x|, or of the gap above a representable |x| (below for the largest)."""
    grid = magnitudes(name)
    position = np.clip(np.searchsorted(grid, np.abs(x), side="right") - 1, 0, len(grid) - 2)
    return grid[position + 1] - grid[position]


def groups(shape: tuple[int, ...], granularity: str) -> np.ndarray:
    """Number of the scale group of each element."""
    index = np.arange(int(np.prod(shape))).reshape(shape)
    columns = shape[-1]
    row, column = index // max(columns, 1), index % max(columns, 1)
    if granularity == "tensor":
        return np.zeros_like(index)
    if granularity == "row":
        return row
    return row * (-(-columns // 128)) + column // 128


def scales(x: np.ndarray, name: str, granularity: str) -> np.ndarray:
    """Scale of each element's group in float64: absmax / max, 1 for an all-zero group."""
    group = groups(x.shape, granularity).ravel()
    absmax = np.zeros(group.max() + 1 if group.size else 0)
    np.maximum.at(absmax, group, np.abs(x.astype(np.float64)).ravel())
    per_group = np.where(absmax == 0, 1.0, absmax / largest(name))
    return per_group[group].reshape(x.shape)
