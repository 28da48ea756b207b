"""Experts that sleep: why their idle scale groups are left alone, and that conversion sees to it."""

import pytest
import torch

from eco_dist import ECOAdamW, Recipe, quantize_weights_
from eco_dist.experiments.idle import SLEEPS, open_loop
from eco_dist.moe import MoEConfig, MoELayer, Routing
from eco_dist.recipe import Idle
from eco_dist.weights import QuantizedWeight

SHAPE = {"width": 128, "hidden": 16, "experts": 4, "top_k": 1, "backend": "native"}


@pytest.mark.parametrize("sleep", SLEEPS, ids=lambda sleep: sleep.name)
def test_under_nearest_rounding_sleepers_drift_unless_they_are_skipped(sleep) -> None:
    """The paper's form hoards error in a momentum that never decays, and pays it out again and again."""
    distances = {
        idle: open_loop(Recipe(rounding="nearest", idle=idle), sleep, lr=1e-4, beta2=0.95, steps=400, seed=0)
        for idle in ("step", "skip")
    }
    naive = open_loop(
        Recipe(rounding="nearest", compensation="none", idle="step"), sleep, lr=1e-4, beta2=0.95, steps=400, seed=0
    )
    assert distances["step"] > 2 * naive, "worse than no compensation at all"
    assert distances["skip"] < naive
    assert distances["skip"] < 0.3 * distances["step"]


@pytest.mark.parametrize("injection", ["auto", "displacement"])
def test_under_stochastic_rounding_the_pending_error_comes_back(injection: str) -> None:
    recipe = Recipe(injection=injection, idle="skip")
    assert open_loop(recipe, SLEEPS[1], lr=1e-4, beta2=0.95, steps=400, seed=0) < 0.7


def test_experts_are_converted_so_and_nothing_else_is() -> None:
    layer = MoELayer(MoEConfig(**SHAPE, shared_hidden=16))
    holder = torch.nn.ModuleDict({"moe": layer, "attention": torch.nn.Linear(128, 128)})
    quantize_weights_(holder, "fp8")
    idle = {n: p.recipe.idle for n, p in holder.named_parameters() if isinstance(p, QuantizedWeight)}
    assert {n for n, rule in idle.items() if rule is Idle.SKIP} == {f"moe.experts.mlp.{n}" for n in ("w1", "w2", "v1")}
    assert "attention.weight" in idle


@pytest.mark.parametrize("recipe", ["paper", "int4", "fp32-master"])
def test_recipes_that_stay_as_they_are(recipe: str) -> None:
    """As printed in the paper; one scale for all experts; no codes at all."""
    layer = MoELayer(MoEConfig(**SHAPE))
    quantize_weights_(layer, recipe)
    weight = layer.experts.mlp.w1
    assert not isinstance(weight, QuantizedWeight) or weight.recipe.idle is Idle.STEP


def test_one_can_ask_for_the_other_rule() -> None:
    layer = MoELayer(MoEConfig(**SHAPE))
    quantize_weights_(layer, "fp8", skip_idle_experts=False)
    assert layer.experts.mlp.w1.recipe == Recipe()


def test_an_expert_asleep_does_not_move_and_wakes_where_it_was() -> None:
    layer = MoELayer(MoEConfig(**SHAPE))
    quantize_weights_(layer, "fp8")
    optimizer = ECOAdamW(layer.parameters(), lr=1e-2, weight_decay=0.1)

    def step(expert: int) -> None:
        """All tokens to one expert."""
        x = torch.randn(8, 128)
        chosen = torch.full((8, 1), expert)
        counts = torch.bincount(chosen.flatten(), minlength=4)
        nothing = torch.zeros(())
        routing = Routing(torch.ones(8, 1), chosen, counts, nothing, nothing, nothing, nothing)
        layer.experts(x, routing).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def held() -> list[torch.Tensor]:
        """Codes, scales and moments of expert 0."""
        weight = layer.experts.mlp.w1
        state = [value for value in optimizer.state[weight].values() if value.ndim]
        return [tensor[:16].clone() for tensor in (weight.codes, weight.scales, *state)]

    for _ in range(3):
        step(0)
    before = held()
    for _ in range(5):
        step(1)
    assert all(torch.equal(a, b) for a, b in zip(before, held(), strict=True))
    step(0)
    assert not torch.equal(before[0], held()[0])
