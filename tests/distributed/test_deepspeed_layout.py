"""Given the same gradients, any stage on any number of ranks holds the bits of one process."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from eco_dist import ECOAdamW, Recipe, quantize_weights_
from eco_dist.weights import QuantizedWeight
from tests.distributed.deepspeed_ranks import Probes, config, contents, engine_of, run_ranks, train_probes

pytest.importorskip("deepspeed")

STEPS = 3
RECIPES = {
    "fp8": {"recipe": "fp8"},
    "fp8-8bit": {"recipe": "fp8-8bit"},
    "paper": {"recipe": "paper"},
    "int4": {"recipe": "int4"},
    "bf16": {"recipe": "bf16"},
    "residual": {"recipe": "fp8-residual-8bit"},
    "changed": {"recipe": "fp8", "overrides": {"granularity": "row", "moments": "dynamic8", "format": "int8"}},
}


def one_process(eco: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    """What FSDP2 and a single process hold (`test_fsdp2_step.py` shows that these two agree)."""
    model = Probes()
    quantize_weights_(model, Recipe.from_name(eco["recipe"]).replace(**eco.get("overrides", {})))
    optimizer = ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1, seed=7)
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), model.gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return {
        name: {"codes": p.codes, "scales": p.scales, **optimizer.state[p]}
        for name, p in model.named_parameters()
        if isinstance(p, QuantizedWeight)
    }


def hold(stage: int, eco: dict[str, Any], zero: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
    engine = engine_of(Probes(), config(stage, eco=eco, zero=zero))
    train_probes(engine, STEPS)
    return contents(engine)


def assert_equal_bits(parts: list[dict[str, dict[str, Tensor]]], expected: dict[str, dict[str, Tensor]]) -> None:
    for name, tensors in expected.items():
        ordered = sorted((part[name] for part in parts if part[name]["codes"].numel()), key=lambda t: int(t["first"]))
        for key, whole in tensors.items():
            pieces = [part[key] for part in ordered]
            if whole.ndim == 0 or pieces[0].numel() == whole.numel() or whole.numel() == 0:
                assert all(torch.equal(piece.flatten(), whole.flatten()) for piece in pieces), (name, key)
            else:
                assert torch.equal(torch.cat([piece.flatten() for piece in pieces]), whole.flatten()), (name, key)


@pytest.mark.parametrize(("recipe", "stage"), [("fp8", 1), *itertools.product(RECIPES, (2, 3))])
def test_two_ranks_hold_the_bits_of_one_process(recipe: str, stage: int) -> None:
    eco = RECIPES[recipe]
    parts = run_ranks(2, hold, stage, eco, {})
    assert_equal_bits(parts, one_process(eco))


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stage", [2, 3])
def test_any_number_of_ranks_holds_the_same_bits(world: int, stage: int) -> None:
    eco = RECIPES["fp8-8bit"]
    assert_equal_bits(run_ranks(world, hold, stage, eco, {}), one_process(eco))


@pytest.mark.parametrize("zero", [{"round_robin_gradients": True}, {"overlap_comm": True}, {"sub_group_size": 5000}])
def test_options_of_zero_change_no_bit(zero: dict[str, Any]) -> None:
    eco = RECIPES["fp8"]
    stage = 3 if "sub_group_size" in zero else 2
    assert_equal_bits(run_ranks(2, hold, stage, eco, zero), one_process(eco))
