"""Codes and scales of tensors: shapes, error bounds, edge cases, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eco_dist.numerics import (
    Format,
    Granularity,
    Stream,
    codec,
    codes_scale_shape,
    codes_shape,
    decode,
    encode,
    encode_checked,
    fake_quantize,
    random_halves,
)
from tests.reference import grids

GRANULARITIES = ("row", "block", "tensor")
COMBINATIONS = [(name, granularity) for name in grids.SCALED for granularity in GRANULARITIES] + [("bf16", None)]
combinations = pytest.mark.parametrize(("name", "granularity"), COMBINATIONS)

FP32_SLACK = 2e-6
"""Relative slack on bounds: x * (1/scale) and code * scale are rounded to fp32, three roundings in all."""

TINY = float(np.finfo(np.float32).tiny)

shapes = st.one_of(
    st.tuples(st.integers(1, 5), st.sampled_from([1, 2, 5, 127, 128, 129, 200, 257])),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 140)),
)


def enums(name: str, granularity: str | None) -> tuple[Format, Granularity | None]:
    return Format(name), None if granularity is None else Granularity(granularity)


def random_values(shape: tuple[int, ...], seed: int, exponent: float) -> torch.Tensor:
    """Normal values spread over binades, with some zeros and one all-zero row."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-8, 3, shape, generator=generator).float())
    values = torch.randn(shape, generator=generator) * spread * 10.0**exponent
    values[torch.rand(shape, generator=generator) < 0.05] = 0
    values.view(-1, shape[-1])[0] *= float(seed % 5 > 0)
    return values


@settings(max_examples=12)
@given(shape=shapes, seed=st.integers(0, 10**6), exponent=st.integers(-30, 30), stochastic=st.booleans())
@combinations
def test_error_is_at_most_half_a_step_and_codes_are_the_looked_up_ones(
    name: str, granularity: str | None, shape: tuple[int, ...], seed: int, exponent: int, stochastic: bool
) -> None:
    """|x - x-hat| <= step/2 to nearest (< 1 step stochastic) with the step at x in its group, on every shape; away
    from ties the codes equal those of a float64 table lookup.
    """
    format, per = enums(name, granularity)
    x = random_values(shape, seed, exponent)
    halves = random_halves(Stream(seed=seed, tensor=0, step=1), shape) if stochastic else None
    codes, scales = encode(x, format, per, halves=halves)
    assert codes.shape == codes_shape(shape, format)
    assert scales.shape == codes_scale_shape(shape, format, per)
    decoded = decode(codes, scales, format, per, shape[-1]).double().numpy()
    exact = x.double().numpy()
    scale = grids.scales(exact, name, granularity) if granularity else np.ones(shape)
    unit = exact / scale
    below, above = grids.neighbours(unit, name)
    gap = np.where(above > below, above - below, 0)
    slack = FP32_SLACK * np.abs(unit) + FP32_SLACK * grids.step_at(unit, name)
    error = np.abs(decoded / scale - unit)
    assert (error <= gap * (1 if stochastic else 0.5) + slack).all()
    if not stochastic:
        untied = np.abs(np.abs(unit - below) - gap / 2) > slack
        expected = (grids.nearest(unit, name) * scale)[untied]
        np.testing.assert_allclose(decoded[untied], expected, rtol=FP32_SLACK, atol=0)


@combinations
def test_decoded_values_encode_to_themselves(name: str, granularity: str | None) -> None:
    """What was stored is stored again without loss (fp32 scales may move by an ulp)."""
    format, per = enums(name, granularity)
    x = random_values((6, 300), 3, -2)
    codes, scales = encode(x, format, per)
    again, drifted = encode(decode(codes, scales, format, per, 300), format, per)
    assert torch.equal(again, codes)
    torch.testing.assert_close(drifted, scales, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7, 300), (3, 5, 131), (1, 900)])
@combinations
def test_a_large_weight_is_decoded_run_by_run(
    name: str, granularity: str | None, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    format, per = enums(name, granularity)
    codes, scales = encode(random_values(shape, 3, -2), format, per)
    out, sizes = torch.full(shape, torch.nan, dtype=dtype), []
    monkeypatch.setattr(codec, "decoded_at_once", lambda device: 2 * 300)
    monkeypatch.setattr(codec, "decode", lambda *args: sizes.append(args[0].numel()) or decode(*args))
    codec.decode_into(out, codes, scales, format, per)
    assert torch.equal(out, decode(codes, scales, format, per, shape[-1]).to(dtype))
    assert len(sizes) > 1 or shape[0] == 1  # a row is never cut


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", grids.SCALED)
def test_an_all_zero_group_has_scale_one_and_code_zero(name: str, granularity: str) -> None:
    format, per = enums(name, granularity)
    codes, scales = encode(torch.zeros(3, 130), format, per)
    assert bool((scales == 1).all())
    assert bool((codes == 0).all())
    assert bool((decode(codes, scales, format, per, 130) == 0).all())


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", grids.SCALED)
@pytest.mark.parametrize("absmax", [1e-45, 1e-40, TINY, 1e-30, 1e30, 3.4e38, float(np.finfo(np.float32).max)])
def test_tiny_and_huge_groups_stay_finite(name: str, granularity: str, absmax: float) -> None:
    """Denormal groups keep a normal scale with a finite reciprocal; the largest fp32 number decodes to a finite one."""
    format, per = enums(name, granularity)
    x = torch.tensor([[absmax, -absmax, absmax / 3, 0.0]])
    codes, scales = encode(x, format, per)
    decoded = decode(codes, scales, format, per, 4)
    assert bool(torch.isfinite(decoded).all())
    assert bool((scales >= TINY).all())
    assert bool(torch.isfinite(scales.reciprocal()).all())
    if absmax > 1e-35:
        torch.testing.assert_close(decoded[0, :2], x[0, :2], rtol=1e-6, atol=0)
    else:  # the scale is the smallest normal number, and half a step of it remains
        step = torch.from_numpy(grids.step_at((x / TINY).double().numpy(), name)).float() * TINY
        assert bool(((decoded - x).abs() <= step / 2 * 1.001).all())


def test_a_group_only_follows_its_own_elements() -> None:
    """Changing one element changes the scale of its group alone, for ragged last blocks too."""
    x = random_values((4, 300), 8, 0)
    for per, touched in ((Granularity.ROW, 1), (Granularity.BLOCK, 1), (Granularity.TENSOR, 1)):
        _, before = encode(x, Format.E4M3, per)
        changed = x.clone()
        changed[2, 299] = 1000.0
        _, after = encode(changed, Format.E4M3, per)
        assert int((before != after).sum()) == touched
        assert after.flatten()[{4: 2, 12: 8, 1: 0}[after.numel()]] == np.float32(1000) / np.float32(448)


@combinations
@pytest.mark.parametrize("shape", [(0, 5), (0, 128), (2, 0, 7)])
def test_no_rows_give_no_codes(name: str, granularity: str | None, shape: tuple[int, ...]) -> None:
    format, per = enums(name, granularity)
    codes, scales = encode_checked(torch.zeros(shape), format, per)
    assert codes.numel() == 0
    assert decode(codes, scales, format, per, shape[-1]).shape == shape


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@combinations
def test_nan_and_infinity_are_refused(name: str, granularity: str | None, bad: float) -> None:
    x = torch.ones(2, 4)
    x[1, 2] = bad
    with pytest.raises(ValueError, match=r"got 1 NaN or infinite of 8; repair the weights"):
        encode_checked(x, *enums(name, granularity))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.int8, torch.bool, torch.complex64])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match=f"expected a float32, bfloat16 or float16 tensor to quantize, got {dtype}"):
        encode_checked(torch.ones(2, 4, dtype=dtype), Format.E4M3, Granularity.ROW)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_encodes_as_its_fp32_value(dtype: torch.dtype) -> None:
    x = random_values((3, 40), 1, 0).to(dtype)
    for one, two in zip(
        encode_checked(x, Format.E4M3, Granularity.ROW), encode(x.float(), Format.E4M3, Granularity.ROW), strict=True
    ):
        assert torch.equal(one, two)


def test_a_scalar_has_no_groups() -> None:
    with pytest.raises(ValueError, match="at least one dimension, got a 0-dimensional tensor; keep it unquantized"):
        encode(torch.tensor(1.0), Format.E4M3, Granularity.ROW)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_an_agreed_absmax_replaces_the_own_one(granularity: str) -> None:
    """Halves of a tensor encoded with the whole tensor's absmax give the codes of the whole."""
    per = Granularity(granularity)
    x = random_values((6, 130), 2, 0)
    codes, scales = encode(x, Format.E4M3, per)
    for rows in (slice(0, 2), slice(2, 6)):
        absmax = scales * 448 if per is Granularity.TENSOR else scales[rows] * 448
        part, _ = encode(x[rows], Format.E4M3, per, absmax=absmax)
        assert torch.equal(part, codes[rows])


@combinations
def test_encode_leaves_its_input_alone(name: str, granularity: str | None) -> None:
    x = random_values((3, 130), 5, 0)
    before = x.clone()
    encode(x, *enums(name, granularity), halves=torch.zeros(x.shape, dtype=torch.int32))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fake_quantize_keeps_dtype_and_equals_decode_of_encode(dtype: torch.dtype) -> None:
    x = random_values((3, 130), 5, 0).to(dtype)
    codes, scales = encode(x.float(), Format.E4M3, Granularity.ROW)
    expected = decode(codes, scales, Format.E4M3, Granularity.ROW, 130).to(dtype)
    assert torch.equal(fake_quantize(x, Format.E4M3, Granularity.ROW), expected)
