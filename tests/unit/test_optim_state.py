"""Optimizer state: what is saved, that a resumed run continues bit for bit, and refusals that change nothing."""

from __future__ import annotations

import copy
import io
import itertools

import pytest
import torch
from torch import nn

from eco_dist.numerics import MomentFormat
from eco_dist.optim import ECOSGD, ECOAdamW
from eco_dist.recipe import RECIPES, Recipe
from eco_dist.weights import quantize_weights_
from tests.unit.snapshots import assert_equal, everything

ALL = {
    **RECIPES,
    "dynamic moments": Recipe().replace(moments="dynamic8"),
    "displacement": Recipe().replace(injection="displacement"),
    "residual fp32": Recipe().replace(compensation="residual", residual="fp32"),
    "nearest": Recipe().replace(rounding="nearest"),
    "int8": Recipe().replace(format="int8"),
}
every_recipe = pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
both_optimizers = pytest.mark.parametrize("optimizer_class", [ECOAdamW, ECOSGD])


def build(recipe: Recipe, optimizer_class: type = ECOAdamW, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(133, 12), nn.LayerNorm(12), nn.Linear(12, 5))
    quantize_weights_(model, recipe)
    return model, optimizer_class(model.parameters(), lr=0.02, weight_decay=0.1, seed=3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.param_groups[0]["lr"] = 0.02 / (1 + step % 4)
        optimizer.step()


def through_a_file(thing: dict) -> dict:
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@both_optimizers
@every_recipe
def test_a_resumed_run_continues_bit_for_bit(recipe: Recipe, optimizer_class: type) -> None:
    """Model and optimizer through torch.save into fresh ones; dtypes of 8-bit states are kept."""
    model, optimizer = build(recipe, optimizer_class)
    train(model, optimizer, range(5))
    saved = through_a_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    other, resumed = build(recipe, optimizer_class, seed=9)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert_equal(everything(model, optimizer), everything(other, resumed))
    train(model, optimizer, range(5, 10))
    train(other, resumed, range(5, 10))
    assert_equal(everything(model, optimizer), everything(other, resumed))


@every_recipe
def test_a_resumed_run_without_the_first_moment_would_differ(recipe: Recipe) -> None:
    """exp_avg carries weight information: codes alone are not a checkpoint."""
    model, optimizer = build(recipe)
    train(model, optimizer, range(5))
    other, fresh = build(recipe, seed=9)
    other.load_state_dict(model.state_dict())
    train(model, optimizer, range(5, 8))
    train(other, fresh, range(5, 8))
    assert not torch.equal(model[1].weight, other[1].weight)


@both_optimizers
@every_recipe
def test_state_tensors_are_those_of_the_recipe(recipe: Recipe, optimizer_class: type) -> None:
    """Exactly the bytes the recipe says, nothing weight-sized beside them."""
    model, optimizer = build(recipe, optimizer_class)
    train(model, optimizer, range(2))
    weight = model[0].weight
    state = dict(optimizer.state[weight])
    assert float(state.pop("step")) == 2
    moments = recipe.moments if recipe.quantizes else MomentFormat.FP32
    for key in ("exp_avg", "exp_avg_sq")[: 2 if optimizer_class is ECOAdamW else 1]:
        assert state.pop(key).dtype == moments.storage_dtype
        if moments.has_scales:
            assert state.pop(f"{key}_scale").shape == (12, 2)
    if recipe.quantizes and recipe.compensation.value == "residual":
        assert state.pop("residual").dtype == getattr(torch, {"fp32": "float32"}.get(recipe.residual.value, "int8"))
    if recipe.quantizes and recipe.compensation.value == "master":
        assert state.pop("master").shape == weight.shape
    assert all(value.ndim == 0 for value in state.values()), f"unexpected {sorted(state)}"


DIFFERENT = (
    # recipes whose stored state differs in meaning, pair by pair; other formats and roundings share theirs
    *("fp8", "fp8-bf16", "fp8-8bit", "fp8-residual", "fp8-residual-8bit", "paper", "fp8-master", "fp8-naive"),
    *("dynamic moments", "displacement", "residual fp32"),
)


@pytest.mark.parametrize(("saved", "loaded"), list(itertools.permutations(DIFFERENT, 2)))
def test_state_of_another_recipe_is_refused_and_nothing_changes(saved: str, loaded: str) -> None:
    """Also where keys, shapes or dtypes agree by chance: E4M3 bytes are not dynamic-map bytes, a momentum in weight
    units is not one in gradient units.
    """
    model, optimizer = build(ALL[saved])
    train(model, optimizer, range(3))
    state = through_a_file(optimizer.state_dict())
    other, target = build(ALL[loaded], seed=1)
    train(other, target, range(2))
    before = everything(other, target)
    with pytest.raises(ValueError, match="load state that was saved with the same recipe"):
        target.load_state_dict(state)
    assert_equal(before, everything(other, target))
    train(other, target, range(2, 3))


@pytest.mark.parametrize("saved_class", [ECOAdamW, ECOSGD])
def test_state_of_the_other_optimizer_is_refused(saved_class: type) -> None:
    model, optimizer = build(Recipe(), saved_class)
    train(model, optimizer, range(3))
    other, target = build(Recipe(), ECOSGD if saved_class is ECOAdamW else ECOAdamW)
    train(other, target, range(2))
    before = everything(other, target)
    with pytest.raises(ValueError, match="same recipe and optimizer"):
        target.load_state_dict(optimizer.state_dict())
    assert_equal(before, everything(other, target))


def test_state_of_another_model_is_refused() -> None:
    _, optimizer = build(Recipe())
    other = ECOAdamW([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="parameter group"):
        other.load_state_dict(optimizer.state_dict())


def test_plain_state_of_torch_adamw_loads() -> None:
    """High-precision parameters have the state keys of torch.optim.AdamW."""
    weight = nn.Parameter(torch.ones(4))
    theirs = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.arange(4.0)
    theirs.step()
    ours = ECOAdamW([weight], lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.state[weight]["exp_avg"], theirs.state[weight]["exp_avg"])
    ours.step()


@pytest.mark.parametrize("recipe", [ALL["fp8"], ALL["fp8-residual-8bit"]], ids=["fp8", "fp8-residual-8bit"])
def test_a_deep_copy_continues_bit_for_bit(recipe: Recipe) -> None:
    """Model and optimizer copied together, as early stopping and some trainers do."""
    model, optimizer = build(recipe)
    train(model, optimizer, range(3))
    other, twin = copy.deepcopy((model, optimizer))
    assert twin.param_groups[0]["params"][0] is other[0].weight
    train(model, optimizer, range(3, 5))
    train(other, twin, range(3, 5))
    assert_equal(everything(model, optimizer), everything(other, twin))


def test_equal_names_in_one_optimizer_draw_different_bits() -> None:
    """Blocks converted one by one repeat names; equal streams would round them alike."""
    blocks = [nn.Linear(64, 64, bias=False) for _ in range(2)]
    blocks[1].weight.data.copy_(blocks[0].weight.data)
    for block in blocks:
        quantize_weights_(block, "fp8")
    assert blocks[0].weight.tensor_id == blocks[1].weight.tensor_id
    optimizer = ECOAdamW([{"params": [block.weight]} for block in blocks], lr=0.01)
    for block in blocks:
        block.weight.grad = torch.ones(64, 64)
    optimizer.step()
    assert not torch.equal(blocks[0].weight.codes, blocks[1].weight.codes)


@pytest.mark.parametrize("seeds", [(0, 0), (0, 1)])
def test_the_seed_alone_decides_the_rounding(seeds: tuple[int, int]) -> None:
    """torch's global generator plays no part."""
    results = []
    for number, seed in enumerate(seeds):
        model, _ = build(Recipe())
        optimizer = ECOAdamW(model.parameters(), lr=0.02, seed=seed)
        torch.manual_seed(number)
        train(model, optimizer, range(3))
        results.append(model[0].weight.codes)
    assert torch.equal(*results) == (seeds[0] == seeds[1])
