"""Bad input to the optimizers: a clear error or a documented no-op, and nothing lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eco_dist.numerics import decode_moment
from eco_dist.optim import ECOSGD, ECOAdamW
from eco_dist.recipe import RECIPES, Recipe
from eco_dist.weights import QuantizedWeight, quantize_weights_
from tests.unit.snapshots import assert_equal, everything

ALL = {
    **RECIPES,
    "fp8 moments": Recipe().replace(moments="fp8"),
    "displacement": Recipe().replace(injection="displacement"),
    "residual fp32": Recipe().replace(compensation="residual", residual="fp32"),
    "paper 8-bit": Recipe().replace(injection="paper", moments="dynamic8"),
    "paper nearest": Recipe().replace(injection="paper", rounding="nearest"),
}
every_recipe = pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
both_optimizers = pytest.mark.parametrize("optimizer_class", [ECOAdamW, ECOSGD])


def build(recipe: Recipe | str, optimizer_class: type = ECOAdamW, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(133, 12), nn.LayerNorm(12), nn.Linear(12, 5))
    quantize_weights_(model, recipe)
    return model, optimizer_class(model.parameters(), **{"lr": 0.02, "weight_decay": 0.1, **options})


def set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def assert_finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        is_quantized = isinstance(parameter, QuantizedWeight)
        assert bool(torch.isfinite(parameter.decode() if is_quantized else parameter).all())
        state = optimizer.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            if key in state and is_quantized:
                moments = parameter.recipe.moments
                second = key == "exp_avg_sq"
                value = decode_moment(state[key], state.get(f"{key}_scale"), moments, second=second)
                assert bool(torch.isfinite(value).all())
        assert all(bool(torch.isfinite(v).all()) for v in state.values() if v.dtype.is_floating_point)


@both_optimizers
@every_recipe
def test_lr_zero_changes_nothing_bit_for_bit(recipe: Recipe, optimizer_class: type) -> None:
    """Step counts included: a schedule that starts or ends at zero costs nothing and 1/lr is never formed."""
    model, optimizer = build(recipe, optimizer_class)
    train(model, optimizer, range(3))
    before = everything(model, optimizer)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, range(3, 6))
    assert_equal(before, everything(model, optimizer))
    assert optimizer.skipped_steps == 0


@every_recipe
def test_a_zero_first_step_leaves_the_run_as_if_it_had_not_been(recipe: Recipe) -> None:
    runs = []
    for first in (0, 1):
        model, optimizer = build(recipe)
        if first == 0:
            optimizer.param_groups[0]["lr"] = 0.0
            train(model, optimizer, range(1))
            optimizer.param_groups[0]["lr"] = 0.02
        train(model, optimizer, range(1, 4))
        runs.append(everything(model, optimizer))
    assert_equal(*runs)


def test_lr_zero_in_one_group_freezes_that_group_alone() -> None:
    model, _ = build("fp8")
    optimizer = ECOAdamW([{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}], lr=0.02)
    before = [module.weight.codes.clone() for module in (model[0], model[2])]
    train(model, optimizer, range(2))
    assert torch.equal(model[0].weight.codes, before[0])
    assert not torch.equal(model[2].weight.codes, before[1])


@both_optimizers
@pytest.mark.parametrize("lr", [1e-12, 1e-20])
@every_recipe
def test_a_tiny_learning_rate_stays_finite(recipe: Recipe, lr: float, optimizer_class: type) -> None:
    """From the first step on, after ordinary steps, and back at an ordinary rate; zero gradients included."""
    model, optimizer = build(recipe, optimizer_class)
    for rate in (lr, 0.02, lr, 0.02):
        optimizer.param_groups[0]["lr"] = rate
        train(model, optimizer, range(3))
        model[0].weight.grad.zero_()
        optimizer.step()
        assert_finite(model, optimizer)


BAD = [(0, float("nan")), (0, float("inf")), (3, -float("inf")), (0, 1e30), (5, 2.0**63), (5, float("nan"))]
"""(number of the parameter: the first is quantized, the others are not; value)."""


@every_recipe
def test_a_bad_gradient_anywhere_skips_the_whole_step(recipe: Recipe) -> None:
    """One element of one parameter: no weight, moment, step count or random stream moves, and it is counted."""
    model, optimizer = build(recipe)
    train(model, optimizer, range(2))
    before = everything(model, optimizer)
    for where, bad in BAD:
        set_gradients(model, 2)
        list(model.parameters())[where].grad.view(-1)[-1] = bad
        optimizer.step()
        assert_equal(before, everything(model, optimizer))
    assert optimizer.skipped_steps == len(BAD)
    train(model, optimizer, range(2, 4))
    undisturbed, its_optimizer = build(recipe)
    train(undisturbed, its_optimizer, range(4))
    assert_equal(everything(model, optimizer), everything(undisturbed, its_optimizer))


@both_optimizers
def test_nonfinite_raise_raises_and_changes_nothing(optimizer_class: type) -> None:
    model, optimizer = build("fp8", optimizer_class, nonfinite="raise")
    train(model, optimizer, range(2))
    before = everything(model, optimizer)
    set_gradients(model, 2)
    model[0].weight.grad[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="on 1 parameters of this rank; nothing was changed"):
        optimizer.step()
    assert_equal(before, everything(model, optimizer))
    train(model, optimizer, range(2, 3))


def test_a_large_but_usable_gradient_is_used() -> None:
    """Below 2^63 the square is finite, and so is everything after it."""
    model, optimizer = build("fp8")
    set_gradients(model, 0)
    model[0].weight.grad[0, 0] = 2.0**62
    optimizer.step()
    assert optimizer.skipped_steps == 0
    train(model, optimizer, range(1, 4))
    assert_finite(model, optimizer)


@pytest.mark.parametrize("compensation", ["residual", "none", "master"])
@both_optimizers
def test_beta1_zero_works_where_the_momentum_carries_nothing(optimizer_class: type, compensation: str) -> None:
    option = {"betas": (0.0, 0.95)} if optimizer_class is ECOAdamW else {"momentum": 0.0}
    model, optimizer = build(Recipe().replace(compensation=compensation), optimizer_class, **option)
    train(model, optimizer, range(3))
    assert_finite(model, optimizer)


@both_optimizers
def test_beta1_zero_is_refused_for_compensation_momentum(optimizer_class: type) -> None:
    """At construction, for a later group, and when a scheduler sets it; the sentence names the way out."""
    option = {"betas": (0.0, 0.95)} if optimizer_class is ECOAdamW else {"momentum": 0.0}
    sentence = r"expected beta1 \(SGD: momentum\) > 0 for compensation 'momentum', got 0.*recipe 'fp8-residual'"
    with pytest.raises(ValueError, match=sentence):
        build("fp8", optimizer_class, **option)
    model, optimizer = build("fp8", optimizer_class)
    train(model, optimizer, range(1))
    before = everything(model, optimizer)
    optimizer.param_groups[0].update(option)
    set_gradients(model, 1)
    with pytest.raises(ValueError, match=sentence):
        optimizer.step()
    assert_equal(before, everything(model, optimizer))
    optimizer_class([nn.Parameter(torch.ones(2))], **option)


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ({"lr": -1e-3}, "expected lr >= 0 and finite, got -0.001"),
        ({"lr": float("nan")}, "expected lr >= 0 and finite, got nan"),
        ({"lr": float("inf")}, "expected lr >= 0 and finite, got inf"),
        ({"weight_decay": -0.1}, "expected weight_decay >= 0 and finite, got -0.1"),
        ({"eps": 0.0}, "expected eps > 0, got 0.0: a zero gradient would divide 0 by 0"),
        ({"eps": -1e-8}, "expected eps > 0, got -1e-08"),
        ({"betas": (1.0, 0.9)}, r"expected beta1 in \[0, 1\), got 1.0"),
        ({"betas": (0.9, -0.1)}, r"expected beta2 in \[0, 1\), got -0.1"),
        ({"nonfinite": "ignore"}, "expected nonfinite to be 'skip' or 'raise', got 'ignore'"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(option: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        build("fp8", **option)


def test_a_refused_group_is_not_added() -> None:
    model, optimizer = build("fp8")
    with pytest.raises(ValueError, match="expected lr"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    train(model, optimizer, range(1))


@both_optimizers
@every_recipe
@pytest.mark.parametrize("shape", [(0, 8), (0, 130), (2, 0, 5)], ids=str)
def test_zero_rows_step_without_complaint(shape: tuple, recipe: Recipe, optimizer_class: type) -> None:
    values = torch.zeros(shape)
    weight = nn.Parameter(QuantizedWeight.from_values(values, recipe) if recipe.quantizes else values)
    weight.grad = torch.zeros(shape)
    optimizer = optimizer_class([weight])
    optimizer.step()
    assert float(optimizer.state[weight]["step"]) == 1


@every_recipe
def test_frozen_layers_and_missing_gradients_are_untouched(recipe: Recipe) -> None:
    """A frozen layer, and one that took no part in the loss: codes as they were, no state."""
    model, optimizer = build(recipe)
    model[0].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    untouched = everything(model[0], optimizer)
    for step in range(3):
        set_gradients(model, step)
        model[0].weight.grad = model[0].bias.grad = None
        optimizer.step()
    assert_equal(untouched, everything(model[0], optimizer))
    assert model[0].weight not in optimizer.state
    assert model[2].weight in optimizer.state


def test_an_all_zero_gradient_leaves_finite_state() -> None:
    """v stays 0, d = eps: the injection is tiny and finite."""
    model, optimizer = build("fp8-8bit", weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros(parameter.shape)
    before = model[0].weight.decode()
    for _ in range(3):
        optimizer.step()
    assert_finite(model, optimizer)
    assert torch.equal(model[0].weight.decode(), before)


STOCK = {
    "AdamW for-loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "AdamW without decay": lambda params: torch.optim.AdamW(params, weight_decay=0.0),
    "Adam": lambda params: torch.optim.Adam(params),
    "SGD for-loop": lambda params: torch.optim.SGD(params, lr=0.1, foreach=False),
    "SGD foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda params: torch.optim.SGD(params, lr=0.1, fused=True),
    "RMSprop": lambda params: torch.optim.RMSprop(params),
}


@pytest.mark.parametrize("name", STOCK)
def test_a_stock_optimizer_is_refused_and_no_code_changes(name: str) -> None:
    model, _ = build("fp8")
    set_gradients(model, 0)
    before = [(module.weight.codes.clone(), module.weight.scales.clone()) for module in (model[0], model[2])]
    with pytest.raises(NotImplementedError, match=r"step quantized weights with eco_dist.ECOAdamW or eco_dist.ECOSGD"):
        STOCK[name](model.parameters()).step()
    for module, (codes, scales) in zip((model[0], model[2]), before, strict=True):
        assert torch.equal(module.weight.codes, codes)
        assert torch.equal(module.weight.scales, scales)


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="does not support sparse gradients; use dense ones"):
        ECOAdamW(embedding.parameters()).step()
