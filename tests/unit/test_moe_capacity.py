"""Full experts: which rows are dropped, against the mixture written out and against megablocks."""

import importlib.util

import pytest
import torch

from eco_dist import quantize_weights_
from eco_dist.moe import MoEConfig, MoELayer
from eco_dist.moe.capacity import within_capacity
from tests.unit.test_moe_layer import SIZES, TOLERANCE, layer, own, reference, relative


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.5, 6.0])
@pytest.mark.parametrize("recipe", [None, "fp8"])
def test_equals_the_mixture_written_out(factor: float, recipe: str | None) -> None:
    moe = layer(capacity_factor=factor)
    if recipe is not None:
        quantize_weights_(moe, recipe)
    x = torch.randn(23, 64)
    y, gradients = own(moe, x)
    expected, wanted = reference(moe, x, capacity=int(factor * 23 * 2 / 6))
    assert relative(y, expected) < TOLERANCE
    for name, gradient in gradients.items():
        assert relative(gradient, wanted[name]) < TOLERANCE, name


def test_says_how_much_is_dropped() -> None:
    x = torch.randn(23, 64)
    shares = []
    for factor in (None, 6.0, 1.0, 0.3):
        _, routing = layer(capacity_factor=factor)(x)
        over = (routing.counts - (routing.capacity or 10**9)).clamp(min=0).sum()
        assert float(routing.dropped) == pytest.approx(float(over) / 46)
        shares.append(float(routing.dropped))
    assert shares[:2] == [0.0, 0.0]
    assert 0 < shares[2] < shares[3]


def test_a_token_whose_experts_are_full_passes_unchanged() -> None:
    """Equal tokens choose equal experts: the first capacity of them are served."""
    moe = layer(capacity_factor=1.0)
    x = torch.randn(64).repeat(12, 1).requires_grad_()
    y, routing = moe(x)
    assert routing.capacity == 4
    assert float(routing.dropped) == pytest.approx(8 / 12)
    assert bool(y[:4].any(-1).all())
    assert not y[4:].any()


def test_no_rows_at_all() -> None:
    y, routing = layer(capacity_factor=1.0)(torch.zeros(0, 64))
    assert y.shape == (0, 64)
    assert float(routing.dropped) == 0
    rows = within_capacity(torch.zeros(0, 3), torch.zeros(2, dtype=torch.int64), 1, lambda rows, _: rows)
    assert rows.shape == (0, 3)


def test_a_capacity_that_is_none() -> None:
    with pytest.raises(ValueError, match="capacity_factor above 0, got 0"):
        MoEConfig(**SIZES, capacity_factor=0.0)


@pytest.mark.skipif(importlib.util.find_spec("megablocks") is None, reason="megablocks is not installed")
@pytest.mark.parametrize("recipe", [None, "fp8"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_same_numbers_as_megablocks_layer_with_a_capacity(factor: float, recipe: str | None) -> None:
    """Its products are batched over experts and padded with zeros, so sums may differ in the last place."""
    layers = []
    for backend in ("native", "megablocks"):
        moe = layer(glu=False, activation="gelu", capacity_factor=factor, backend=backend)
        if recipe is not None:
            quantize_weights_(moe, recipe)
        layers.append(moe)
    x = torch.randn(23, 64)
    (y, expected), (other, gradients) = (own(moe, x) for moe in layers)
    assert relative(other, y) < TOLERANCE
    for name, gradient in gradients.items():
        assert relative(gradient, expected[name]) < TOLERANCE, name


@pytest.mark.skipif(importlib.util.find_spec("megablocks") is None, reason="megablocks is not installed")
def test_megablocks_has_no_gated_experts_with_a_capacity() -> None:
    with pytest.raises(ValueError, match=r"two matrices \(glu=False\).*use backend 'native'"):
        MoELayer(MoEConfig(**SIZES, backend="megablocks", capacity_factor=1.0))
