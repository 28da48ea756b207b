"""Grids and rounding to nearest: every code, every midpoint, saturation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eco_dist.numerics import Format, Granularity, decode, encode, grid_step, round_to_grid
from tests.reference import grids

FLOATS = ("e4m3", "e5m2", "bf16")


def unit_scale_absmax(name: str) -> torch.Tensor:
    """An agreed absmax that makes the scale of a one-row tensor 1, whatever its values."""
    return torch.full((1, 1), grids.largest(name))


def encode_unit(values: np.ndarray | torch.Tensor, name: str) -> torch.Tensor:
    """Codes of one row with scale 1."""
    row = torch.as_tensor(np.asarray(values), dtype=torch.float32).reshape(1, -1)
    codes, scales = encode(row, Format(name), Granularity.ROW, absmax=unit_scale_absmax(name))
    assert bool((scales == 1).all())
    return codes


def rounded(values: np.ndarray, name: str) -> np.ndarray:
    return round_to_grid(torch.from_numpy(values.astype(np.float32)), Format(name)).double().numpy()


def all_codes(name: str) -> torch.Tensor:
    """One row of all finite codes in the storage dtype (INT4: unpacked, signed)."""
    patterns = grids.codes(name)
    if name == "bf16":
        return torch.from_numpy(patterns.astype(np.uint16).view(np.int16)).view(torch.bfloat16).reshape(1, -1)
    dtype = torch.int8 if name.startswith("int") else torch.uint8
    return torch.from_numpy(patterns).to(dtype).reshape(1, -1)


@pytest.mark.parametrize(("name", "count"), [("e4m3", 254), ("e5m2", 248), ("int8", 255), ("bf16", 65280)])
def test_every_finite_code_survives_decode_and_encode(name: str, count: int) -> None:
    """Bit for bit, -0 included. Left out: 2 NaN codes of E4M3, 8 NaN/inf of E5M2, 256 of BF16, and INT8's -128."""
    codes = all_codes(name)
    assert codes.numel() == count
    values = decode(codes, torch.ones(1, 1), Format(name), Granularity.ROW, count)
    np.testing.assert_array_equal(values[0].double().numpy(), grids.values(name))
    bits = torch.int16 if name == "bf16" else codes.dtype
    assert torch.equal(encode_unit(values, name).view(bits), codes.view(bits))


@pytest.mark.parametrize("columns", [1, 2, 14, 15])
def test_int4_packs_two_codes_into_a_byte_at_every_width(columns: int) -> None:
    """Low nibble first, an odd row padded with a zero code, all 15 codes (-8 is unused)."""
    values = torch.arange(-7.0, 8.0)[:columns].repeat(3, 1)
    codes, scales = encode(values, Format.INT4, Granularity.ROW, absmax=torch.full((3, 1), 7.0))
    assert codes.shape == (3, (columns + 1) // 2)
    assert codes.dtype == torch.uint8
    nibbles = [int(value) & 0xF for value in values[0]] + [0] * (columns % 2)
    assert codes[0].tolist() == [low | high << 4 for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)]
    assert torch.equal(decode(codes, scales, Format.INT4, Granularity.ROW, columns), values)


@pytest.mark.parametrize("name", grids.FORMATS)
def test_every_midpoint_goes_to_the_even_code_and_one_ulp_beside_it_to_the_nearer(name: str) -> None:
    """Exhaustive over neighbouring pairs of both signs, subnormal ones included."""
    grid = grids.magnitudes(name)
    low, high = grid[:-1], grid[1:]
    middle = ((low + high) / 2).astype(np.float32)
    assert np.array_equal(middle.astype(np.float64), (low + high) / 2), "midpoints are exact in fp32"
    even = np.where(np.arange(len(low)) % 2 == 0, low, high)
    below, above = np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(np.inf))
    for sign in (1, -1):
        np.testing.assert_array_equal(rounded(sign * middle, name), sign * even)
        np.testing.assert_array_equal(rounded(sign * below, name), sign * low)
        np.testing.assert_array_equal(rounded(sign * above, name), sign * high)


@pytest.mark.parametrize("name", grids.FORMATS)
def test_nearest_agrees_with_looking_it_up(name: str) -> None:
    """20,000 values over all binades of the format, against the table of representable numbers."""
    generator = np.random.default_rng(0)
    high = np.log2(grids.largest(name))
    low = np.log2(grids.magnitudes(name)[1])
    exponents = generator.uniform(low - 3, min(high + 0.1, 127.99), 20_000)
    x = (np.exp2(exponents) * generator.choice([-1, 1], 20_000)).astype(np.float32)
    np.testing.assert_array_equal(rounded(x, name), grids.nearest(x, name))


@pytest.mark.parametrize("name", grids.FORMATS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_values_beyond_the_largest_saturate(name: str, stochastic: bool) -> None:
    """Never NaN, never infinity: a bare cast of 480 to E4M3 would be NaN."""
    largest = grids.largest(name)
    fp32_max = np.finfo(np.float32).max
    x = (largest * torch.tensor([1, 1.001, 1.06, torch.inf], dtype=torch.float64)).clamp(max=float(fp32_max)).float()
    halves = torch.full((4,), 32767, dtype=torch.int32) if stochastic else None
    assert round_to_grid(x, Format(name), halves).tolist() == [largest] * 4
    assert round_to_grid(-x, Format(name), halves).tolist() == [-largest] * 4


@pytest.mark.parametrize("name", FLOATS)
def test_grid_step_is_the_gap_between_neighbours(name: str) -> None:
    """At every representable number and inside every gap; the smallest normal and all subnormals share a step."""
    grid = grids.magnitudes(name)[:-1]
    gaps = np.diff(grids.magnitudes(name))
    inside = (grid + 0.75 * gaps).astype(np.float32)
    for x in (grid.astype(np.float32), inside, -inside):
        np.testing.assert_array_equal(grid_step(torch.from_numpy(x), Format(name)).double().numpy(), gaps)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_integer_formats_have_step_one(name: str) -> None:
    assert torch.equal(grid_step(torch.linspace(-7, 7, 99), Format(name)), torch.ones(99))


@pytest.mark.parametrize("name", grids.FORMATS)
def test_rounding_leaves_its_input_alone(name: str) -> None:
    x = torch.linspace(-9, 9, 77)
    before = x.clone()
    round_to_grid(x, Format(name))
    round_to_grid(x, Format(name), torch.zeros(77, dtype=torch.int32))
    assert torch.equal(x, before)
