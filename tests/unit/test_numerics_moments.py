"""Stored moments: error bounds of each format, what zero and tiny values become."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eco_dist.numerics import MomentFormat, Stream, decode_moment, encode_moment, random_halves, scale_shape
from eco_dist.numerics.groups import Granularity
from eco_dist.numerics.moments import dynamic_map
from eco_dist.optim.state import state_layout
from eco_dist.recipe import Recipe
from tests.reference import grids

FORMATS = tuple(MomentFormat)
EIGHT_BIT = (MomentFormat.FP8, MomentFormat.DYNAMIC8)
formats = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.value)
eight_bit = pytest.mark.parametrize("format", EIGHT_BIT, ids=lambda format: format.value)

SLACK = 1e-6
"""Of the block's largest: fp32 rounding of x / scale and of code * scale."""

LARGEST_GAP = {
    # widest gap between neighbouring codes, as a share of the block's largest value: half of it bounds the error
    (MomentFormat.FP8, False): 32 / 448,
    (MomentFormat.FP8, True): 32 / 448,
    (MomentFormat.DYNAMIC8, False): 2 * 0.00703125,  # -1 itself is no code: the most negative one is -0.99296875
    (MomentFormat.DYNAMIC8, True): 0.9 / 128,
}


def stored_and_back(values: torch.Tensor, format: MomentFormat, *, second: bool) -> torch.Tensor:
    stored, scales = encode_moment(values, format, second=second)
    assert stored.dtype == format.storage_dtype
    assert stored.shape == values.shape
    assert (scales is not None) == format.has_scales
    if scales is not None:
        assert scales.shape == scale_shape(values.shape, Granularity.BLOCK)
    return decode_moment(stored, scales, format, second=second)


def block_absmax(values: np.ndarray) -> np.ndarray:
    return grids.scales(values, "int8", "block") * 127 * (np.abs(values).max() > 0)


shapes = st.tuples(st.integers(1, 4), st.sampled_from([1, 3, 127, 128, 129, 260]))


@settings(max_examples=15)
@given(shape=shapes, seed=st.integers(0, 10**6), exponent=st.integers(-10, 4))
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@formats
def test_error_stays_within_half_the_widest_gap(
    format: MomentFormat, second: bool, shape: tuple[int, ...], seed: int, exponent: int
) -> None:
    """fp32 exact; bf16 2^-8 relative; 8-bit half a gap of the block's largest, for sqrt(v) where v is stored so."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator).pow(3) * 10.0**exponent
    if second:
        values = values.square()
    back = stored_and_back(values, format, second=second)
    if format is MomentFormat.FP32:
        assert torch.equal(back, values)
    elif format is MomentFormat.BF16:
        assert bool(((back - values).abs() <= values.abs() * 2.0**-8 * (1 + SLACK) + 1e-40).all())
    else:
        exact, got = values.double().numpy(), back.double().numpy()
        if second:
            exact, got = np.sqrt(exact), np.sqrt(got)
        bound = block_absmax(exact) * (LARGEST_GAP[format, second] / 2 + SLACK)
        # A positive second moment is lifted to the smallest code, which is within the bound too.
        assert (np.abs(got - exact) <= bound).all()


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@eight_bit
def test_small_values_keep_relative_precision(format: MomentFormat, second: bool) -> None:
    """Three decades below the block's largest the error is still below 18 %: why neither format is plain INT8."""
    values = torch.logspace(-2.9, 0, 128)[None]
    if second:
        values = values.square()
    back = stored_and_back(values, format, second=second)
    relative = ((back - values) / values).abs()
    assert float(relative.max()) < (0.36 if second else 0.18)


@formats
@settings(max_examples=25)
@given(exponents=st.lists(st.floats(-27, 8), min_size=1, max_size=130), zeros=st.integers(0, 3))
def test_a_positive_second_moment_never_becomes_zero(format: MomentFormat, exponents: list[float], zeros: int) -> None:
    """However large its neighbours, or the next step would divide by eps; zero itself stays exactly zero.

    Blocks whose largest is below about 1e-32 are left out: there (1e-6 sqrt(v))^2 is no fp32 number.
    """
    positive = torch.tensor([10.0**exponent for exponent in exponents])
    values = torch.cat((positive, torch.zeros(zeros)))[None]
    back = stored_and_back(values, format, second=True)
    assert bool((back[values > 0] > 0).all())
    assert bool((back[values == 0] == 0).all())
    assert bool((back >= 0).all())


@formats
@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
def test_zero_decodes_to_exactly_zero(format: MomentFormat, second: bool) -> None:
    """Beside large values and in a block of zeros."""
    values = torch.zeros(2, 130)
    values[1, :3] = torch.tensor([5.0, 0.0, 1e-3])
    back = stored_and_back(values, format, second=second)
    assert bool((back[values == 0] == 0).all())


@formats
def test_a_fresh_state_decodes_to_exactly_zero(format: MomentFormat) -> None:
    layout = state_layout((3, 130), Recipe(moments=format), second_moment=True)
    for key, second in (("exp_avg", False), ("exp_avg_sq", True)):
        tensors = {
            name: torch.full(piece.shape, piece.fill, dtype=piece.dtype)
            for name, piece in layout.items()
            if name in (key, f"{key}_scale")
        }
        back = decode_moment(tensors[key], tensors.get(f"{key}_scale"), format, second=second)
        assert torch.equal(back, torch.zeros(3, 130))


@eight_bit
@pytest.mark.parametrize("sign", [1, -1])
def test_the_first_moment_keeps_signs(format: MomentFormat, sign: int) -> None:
    values = sign * torch.logspace(-2, 2, 200)[None]
    back = stored_and_back(values, format, second=False)
    assert bool((back * sign >= 0).all())
    assert bool((back[values.abs() > 1] * sign > 0).all())


@eight_bit
def test_infinitely_small_and_large_blocks_stay_finite(format: MomentFormat) -> None:
    for magnitude in (1e-45, 1e-38, 1e38):
        for second in (False, True):
            back = stored_and_back(torch.full((1, 5), magnitude), format, second=second)
            assert bool(torch.isfinite(back).all())


def test_the_dynamic_map_has_256_ascending_values() -> None:
    """Signed: symmetric but for +1, 0 at code 127, where a fresh state puts it. Unsigned: 0 at code 0, 1 at 255."""
    signed, unsigned = dynamic_map(True), dynamic_map(False)
    for table in (signed, unsigned):
        assert table.shape == (256,)
        assert bool((table[1:] > table[:-1]).all())
        assert float(table[-1]) == 1
    assert float(signed[127]) == 0
    assert torch.equal(-signed[:127].flip(0), signed[128:-1])
    assert float(unsigned[0]) == 0
    assert float(unsigned[1]) < 1e-6


@formats
def test_decoded_moments_are_a_tensor_of_their_own(format: MomentFormat) -> None:
    """A step that is given up after the rule ran must not have touched what is stored."""
    stored, scales = encode_moment(torch.ones(2, 5), format, second=False)
    before = stored.clone()
    decode_moment(stored, scales, format, second=False).add_(1)
    assert torch.equal(stored, before)


@pytest.mark.parametrize("format", [MomentFormat.BF16, MomentFormat.FP8, MomentFormat.DYNAMIC8])
@pytest.mark.parametrize("second", [False, True])
def test_stochastic_rounding_is_unbiased_and_between_neighbours(format: MomentFormat, second: bool) -> None:
    """Of m, and of what is stored of v: its square root in 8 bits, itself in BF16."""
    draws = 4000
    values = torch.randn(128, generator=torch.Generator().manual_seed(0)).double().pow(3).float()
    values = values.abs() if second else values
    values[0] = 0
    halves = random_halves(Stream(seed=1, tensor=2, step=3, purpose=1), (draws, 128))
    decoded = decode_moment(
        *encode_moment(values.expand(draws, 128), format, second=second, halves=halves), format, second=second
    )
    through_root = second and format is not MomentFormat.BF16
    wanted, got = (values.sqrt(), decoded.sqrt()) if through_root else (values, decoded)
    assert all(len(column.unique()) <= 2 for column in decoded.T)
    low, high = got.amin(0), got.amax(0)
    between = high > low  # the others lie on the grid, or next to nothing and are kept from zero
    assert int(between.sum()) > 100
    slack = 1e-6 * wanted.abs()
    assert bool(((low - slack <= wanted) & (wanted <= high + slack))[between].all())
    deviations = (got.double().mean(0) - wanted.double()) / ((high - low).double() / draws**0.5 + 1e-300)
    assert float(deviations[between].abs().max()) < 2.5  # five standard deviations of a coin's mean
    assert not bool(decoded[:, 0].any())
