"""The native layer equals the mixture written out in float64, and says what it cannot do."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eco_dist import ECOAdamW, quantize_weights_
from eco_dist.moe import MoEConfig, MoELayer
from eco_dist.moe import grouped_product as grouped_module
from eco_dist.moe.dispatch import Order, exchange_rows
from eco_dist.moe.grouped import check_rows, grouped_linear
from eco_dist.moe.grouped_product import grouped_outer, grouped_product
from eco_dist.optim.step import GRADIENT_LIMIT
from eco_dist.weights import QuantizedWeight
from tests.reference.experts import mixture

SIZES = {"width": 64, "hidden": 48, "experts": 6, "top_k": 2}
TOLERANCE = 1e-6


def layer(seed: int = 0, **changes: object) -> MoELayer:
    torch.manual_seed(seed)
    built = MoELayer(MoEConfig(**{**SIZES, "backend": "native", **changes}))
    built.init_weights(std=0.2)
    return built


def relative(value: Tensor, expected: Tensor) -> float:
    value, expected = value.detach().double(), expected.detach().double()
    return float((value - expected).norm() / expected.norm())


def reference(moe: MoELayer, x: Tensor, capacity: int | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss terms summed up, and the gradients of `x` and the parameters, in float64."""
    config = moe.config
    names = {"router.layer.weight": "router", **{f"experts.mlp.{n}": n for n in ("w1", "w2", "v1")}}
    weights = {
        names[name]: (p.decode() if isinstance(p, QuantizedWeight) else p.detach()).double().requires_grad_()
        for name, p in moe.named_parameters()
        if name in names
    }
    x = x.detach().double().requires_grad_()
    y, balance, z_loss = mixture(
        x,
        weights,
        experts=config.experts,
        top_k=config.top_k,
        activation=config.activation,
        score=config.score,
        normalize=config.normalize,
        scale=config.scale,
        capacity=capacity,
    )
    (y.square().sum() + balance + z_loss).backward()
    return y, {"x": x.grad, **{name: weights[short].grad for name, short in names.items() if short in weights}}


def own(moe: MoELayer, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    x = x.detach().clone().requires_grad_()
    y, routing = moe(x)
    (y.square().sum() + routing.load_balancing_loss + routing.z_loss).backward()
    return y, {"x": x.grad, **{name: p.grad for name, p in moe.named_parameters()}}


@pytest.mark.parametrize(("glu", "score"), list(itertools.product((True, False), ("softmax", "sigmoid"))))
@pytest.mark.parametrize("recipe", [None, "fp8"])
def test_equals_the_mixture_written_out(glu: bool, score: str, recipe: str | None) -> None:
    moe = layer(glu=glu, score=score, normalize=score == "sigmoid", scale=1.5, activation="silu" if glu else "gelu")
    if recipe is not None:
        quantize_weights_(moe, recipe)
    x = torch.randn(23, 64)
    y, gradients = own(moe, x)
    expected, wanted = reference(moe, x)
    assert relative(y, expected) < TOLERANCE
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert relative(gradient, wanted[name]) < TOLERANCE, name


def test_sizes_that_the_kernel_refuses_are_looped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 30 fp32 numbers do not start at multiples of 16 bytes."""
    used = []
    kernel = torch.nn.functional.grouped_mm
    monkeypatch.setattr(grouped_module.F, "grouped_mm", lambda *a, **k: used.append(1) or kernel(*a, **k))
    for width, expected in ((64, True), (30, False)):
        used.clear()
        moe = layer(width=width)
        x = torch.randn(9, width)
        y, gradients = own(moe, x)
        wanted_y, wanted = reference(moe, x)
        assert bool(used) is expected
        assert relative(y, wanted_y) < TOLERANCE
        assert all(relative(g, wanted[name]) < TOLERANCE for name, g in gradients.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_and_loop_agree_with_empty_experts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = torch.tensor([0, 3, 0, 5, 0])
    x, matrices, right = torch.randn(8, 16).to(dtype), torch.randn(5, 16, 24).to(dtype), torch.randn(8, 24).to(dtype)
    results = []
    for kernel in (True, False):
        monkeypatch.setattr(grouped_module, "_kernel_takes", lambda *_, kernel=kernel: kernel)
        results.append((grouped_product(x, matrices, counts), grouped_outer(x, right, counts)))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=0.02 if dtype is torch.bfloat16 else 1e-6, atol=1e-5)
    assert not results[0][1][0].any(), "an expert without tokens has a gradient of zero"


def test_no_tokens_at_all() -> None:
    moe = layer()
    y, routing = moe(torch.zeros(0, 64))
    (y.sum() + routing.load_balancing_loss + routing.z_loss).backward()
    assert y.shape == (0, 64)
    assert routing.counts.sum() == 0
    assert all(not p.grad.any() for p in moe.parameters())


def test_a_gradient_expanded_from_a_scalar() -> None:
    """Torch's kernel refuses its strides of zero."""
    weight = torch.randn(2 * 8, 16, requires_grad=True)
    grouped_linear(torch.randn(4, 16), weight, torch.tensor([2, 2]), inwards=True).sum().backward()
    assert weight.grad is not None


def test_codes_stay_codes_between_forward_and_backward() -> None:
    """What autograd keeps of the experts is codes: no saved tensor has a weight's size in high precision."""
    moe = layer(hidden=512)
    quantize_weights_(moe, "fp8")
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y, _ = moe(torch.randn(5, 64))
    y.sum().backward()
    size = moe.experts.mlp.w1.numel()
    kept = [tensor for tensor in saved if tensor.numel() >= size]
    assert len(kept) == 3  # w1, v1 and w2, once each
    assert all(isinstance(tensor, QuantizedWeight) for tensor in kept)


def test_router_stays_fp32_and_experts_become_codes() -> None:
    moe = layer(shared_hidden=32)
    report = quantize_weights_(moe, "fp8")
    stored = {c.names[0]: c.recipe for c in report.conversions}
    assert stored.pop("router.layer.weight") is None
    assert all(recipe is not None for recipe in stored.values())
    assert moe.router.layer.weight.dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, routing = moe(torch.randn(4, 64))
    assert routing.weights.dtype == torch.float32
    assert y.dtype == torch.bfloat16


def test_balanced_routing_has_a_loss_of_one() -> None:
    moe = layer(experts=4, top_k=4)
    assert moe(torch.randn(8, 64))[1].load_balancing_loss.item() == pytest.approx(1.0)


def test_shared_expert_sees_every_token() -> None:
    moe = layer(shared_hidden=32)
    x = torch.randn(7, 64)
    with torch.no_grad():
        y, routing = moe(x)
        shared = moe.shared_expert(x)
        routed = moe.experts(x, routing)
    torch.testing.assert_close(y, shared + routed)


@settings(max_examples=30)
@given(tokens=st.integers(0, 12), experts=st.integers(1, 5), data=st.data())
def test_sorting_is_undone(tokens: int, experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, experts))
    chosen = torch.tensor(
        data.draw(st.lists(st.integers(0, experts - 1), min_size=tokens * top_k, max_size=tokens * top_k))
    )
    order = Order.by(chosen.long(), copies=top_k)
    x = torch.arange(tokens * 2, dtype=torch.float32).view(tokens, 2).requires_grad_()
    rows = order.sorted_rows(x)
    assert torch.equal(chosen.long()[order.order], chosen.long().sort().values)
    back = order.original_rows(rows)
    assert torch.equal(back, x.repeat_interleave(top_k, 0))
    back.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, top_k))


def test_fp8_wire_rounds_tokens_and_gradients_by_token() -> None:
    """On one rank too, so that the number of ranks changes no number."""
    x = torch.randn(11, 64)
    full, rounded = (own(layer(wire=wire), x) for wire in ("full", "fp8"))
    for name in ("y", *full[1]):
        a, b = (result[0] if name == "y" else result[1][name] for result in (full, rounded))
        assert 1e-4 < relative(b, a) < 0.1, name


def test_fp8_wire_does_not_hide_an_infinity() -> None:
    """It arrives as NaN or as a number no step accepts: the cast alone would turn it into the largest code."""
    x = torch.randn(3, 64)
    x[0, 5], x[1, 7] = torch.inf, torch.nan
    arrived = exchange_rows(x, [], [], None, "fp8")
    assert not arrived[0].abs().amax() < GRADIENT_LIMIT
    assert not arrived[1].abs().amax() < GRADIENT_LIMIT
    assert torch.isfinite(arrived[2]).all()


def test_experts_train_without_master_weights() -> None:
    moe = layer(hidden=16)
    quantize_weights_(moe, "fp8")
    target = layer(seed=1, hidden=16)
    optimizer = ECOAdamW(moe.parameters(), lr=3e-3)
    losses = []
    for step in range(40):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step))
        loss = (moe(x)[0] - target(x)[0].detach()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"top_k": 7}, "lower top_k"),
        ({"experts": 0}, "expected experts of 1 or more"),
        ({"activation": "relu"}, "silu, gelu"),
        ({"wire": "int8"}, "full, fp8"),
        ({"shared_hidden": -1}, "0 means no shared expert"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict[str, object], part: str) -> None:
    with pytest.raises(ValueError, match=part):
        MoEConfig(**{**SIZES, **changes})


def test_more_rows_than_int32_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="int32"):
        check_rows(2**31)
    x = torch.empty((2**30, 64), device="meta")
    with pytest.raises(ValueError, match="lower the batch"):
        MoELayer(MoEConfig(**{**SIZES, "backend": "native"})).to("meta").router(x)
