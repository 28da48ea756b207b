"""Stochastic rounding: only the two neighbours, the grid stays put, no bias anywhere.

The noise of one element takes 65,536 values, so bias is not estimated but summed over all of them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eco_dist.numerics import Format, Stream, random_halves, round_to_grid
from tests.reference import grids

ALL_HALVES = torch.arange(-32768, 32768, dtype=torch.int32)

BIAS_LIMIT = 2.0**-16
"""Of a grid step: the probability of rounding up is right to 2^-17, and fp32 sums add less than that."""


def hard_values(name: str) -> np.ndarray:
    """Inside subnormal gaps, on both sides of powers of two, near the largest, and anywhere."""
    grid = grids.magnitudes(name)
    powers = np.flatnonzero(np.log2(np.where(grid > 0, grid, 3)) % 1 == 0)
    pick = powers if len(powers) < 20 else powers[:: len(powers) // 16]
    generator = np.random.default_rng(1)
    spots = np.concatenate(([0, 1, len(grid) - 2], pick, pick - 1, generator.integers(0, len(grid) - 1, 8)))
    spots = np.unique(np.clip(spots, 0, len(grid) - 2))
    low, high = grid[spots], grid[spots + 1]
    fractions = np.array([0.01, 0.3, 0.5, 0.97])
    return (low[:, None] + (high - low)[:, None] * fractions).ravel().astype(np.float32)


def over_all_noise(x: np.ndarray, name: str, chunk: int = 32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mean, least, greatest) result of each value over all 65,536 halves."""
    results = []
    for part in np.array_split(x, max(1, len(x) // chunk)):
        values = torch.from_numpy(part)[:, None].expand(-1, len(ALL_HALVES))
        result = round_to_grid(values.contiguous(), Format(name), ALL_HALVES.expand(len(part), -1)).double()
        results.append(torch.stack((result.mean(1), result.amin(1), result.amax(1))))
    return tuple(torch.cat(results, 1).numpy())


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("name", grids.FORMATS)
def test_mean_over_all_noise_is_the_value_and_only_neighbours_occur(name: str, sign: int) -> None:
    x = sign * hard_values(name)
    mean, least, greatest = over_all_noise(x, name)
    below, above = grids.neighbours(x, name)
    np.testing.assert_array_equal(least, below)
    np.testing.assert_array_equal(greatest, above)
    bias = (mean - x.astype(np.float64)) / (above - below)
    assert np.abs(bias).max() <= BIAS_LIMIT, f"worst at {x[np.abs(bias).argmax()]}"


def test_add_noise_then_cast_fails_this_test_next_to_powers_of_two() -> None:
    """The test has teeth: the usual shortcut is off by 1/32 of a step at 1.01, a thousand times the limit."""
    x = np.float32(1 + 0.1 / 8)
    noisy = torch.tensor(x) + (2 * ALL_HALVES + 1).double() / 2**17 * 0.125
    mean = noisy.float().to(torch.float8_e4m3fn).double().mean()
    assert abs(float(mean) - x) / 0.125 > 100 * BIAS_LIMIT


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8", "int4"])
def test_grid_values_never_move(name: str) -> None:
    """Every representable number, under all 65,536 values of the noise."""
    _, least, greatest = over_all_noise(grids.values(name).astype(np.float32), name)
    np.testing.assert_array_equal(least, grids.values(name))
    np.testing.assert_array_equal(greatest, grids.values(name))


def test_bf16_grid_values_never_move() -> None:
    """All 65,280 of them at the extremes of the noise, which adds to the bit pattern and is monotonic."""
    x = torch.from_numpy(grids.values("bf16").astype(np.float32))
    for half in (-32768, -1, 0, 32767):
        assert torch.equal(round_to_grid(x, Format.BF16, torch.full(x.shape, half, dtype=torch.int32)), x)


@pytest.mark.parametrize("name", grids.FORMATS)
def test_draws_of_the_counter_are_unbiased(name: str) -> None:
    """z-test with the bits training uses: 16,384 draws (steps) of each value. |z| < 4.5 for about 100 values."""
    x = hard_values(name)[:100]
    below, above = grids.neighbours(x, name)
    draws, up = 16_384, np.zeros(len(x))
    for step in range(draws // 128):
        halves = random_halves(Stream(seed=7, tensor=3, step=step), (len(x), 128))
        values = torch.from_numpy(x)[:, None].expand(-1, 128).contiguous()
        up += (round_to_grid(values, Format(name), halves).double().numpy() == above[:, None]).sum(1)
    share = (x.astype(np.float64) - below) / (above - below)
    z = (up - draws * share) / np.sqrt(draws * share * (1 - share))
    assert np.abs(z).max() < 4.5
    assert abs(z.mean()) < 4.5 / np.sqrt(len(z))


def test_noise_is_symmetric() -> None:
    """x and -x round alike under mirrored noise h -> -h - 1, so no sign is preferred."""
    x = torch.from_numpy(hard_values("e4m3"))
    for half in (-32768, -12345, 0, 777, 32767):
        up = round_to_grid(x, Format.E4M3, torch.full(x.shape, half, dtype=torch.int32))
        mirrored = round_to_grid(-x, Format.E4M3, torch.full(x.shape, -half - 1, dtype=torch.int32))
        assert torch.equal(up, -mirrored)
