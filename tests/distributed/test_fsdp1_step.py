"""Given the same gradients, FSDP1 on any number of ranks holds the bits of one process, wherever it cuts."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy

from eco_dist import ECOAdamW, Recipe, quantize_weights_
from eco_dist.weights import QuantizedWeight
from tests.distributed.deepspeed_ranks import Probe, Probes
from tests.distributed.fsdp1_models import BF16, contents, converted
from tests.distributed.ranks import run_ranks

STEPS = 3
RECIPES = {
    "fp8": Recipe.from_name("fp8"),
    "fp8-8bit": Recipe.from_name("fp8-8bit"),
    "paper": Recipe.from_name("paper"),
    "int4": Recipe.from_name("int4"),
    "bf16": Recipe.from_name("bf16"),
    "residual": Recipe.from_name("fp8-residual-8bit"),
    "tensor": Recipe.from_name("fp8").replace(granularity="tensor", injection="auto", moments="dynamic8"),
}
Bits = dict[str, dict[str, Tensor]]


def one_process(recipe: Recipe, *, rounded: bool = False, micro: int = 1) -> Bits:
    """What a single process holds; `rounded` gradients have come through bf16, and are sums over micro-batches."""
    model = Probes()
    quantize_weights_(model, recipe)
    optimizer = ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1, seed=7)
    for step in range(STEPS):
        parts = [model.gradients(micro * step + part) for part in range(micro)]
        for parameter, *gradients in zip(model.parameters(), *parts, strict=True):
            parameter.grad = sum(g.bfloat16().float() if rounded else g for g in gradients)
        optimizer.step()
    result = {}
    for name, p in model.named_parameters():
        stored = {"codes": p.codes, "scales": p.scales} if isinstance(p, QuantizedWeight) else {"codes": p.detach()}
        result[name] = {**stored, **optimizer.state[p]}
    return result


def hold(recipes: tuple[str, ...], by_probe: bool, options: dict[str, Any]) -> list[Bits]:
    """What this rank holds after the steps, for each recipe."""
    if options.pop("hybrid", False):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        options.update(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    if options.pop("grad_op", False):
        options["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
    if options.pop("mixed", False):
        options["mixed_precision"] = BF16
    result = []
    for recipe in recipes:
        model, optimizer = converted(Probes(), RECIPES[recipe], {Probe} if by_probe else set(), **options)
        for step in range(STEPS):
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        result.append(contents(optimizer))
    return result


def accumulate(use_orig_params: bool, quietly: bool) -> Bits:
    """Two micro-batches a step, reduced each or, under `no_sync`, together."""
    model, optimizer = converted(Probes(), RECIPES["fp8"], {Probe}, use_orig_params=use_orig_params)
    for step in range(STEPS):
        with model.no_sync() if quietly else contextlib.nullcontext():
            model(2 * step).backward()
        model(2 * step + 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return contents(optimizer)


def assert_equal_bits(parts: list[Bits], expected: Bits) -> None:
    for name, tensors in expected.items():
        ordered = sorted((part[name] for part in parts if part[name]["codes"].numel()), key=lambda t: int(t["first"]))
        for key, whole in tensors.items():
            pieces = [part[key] for part in ordered]
            if whole.ndim == 0 or pieces[0].numel() == whole.numel() or whole.numel() == 0:
                assert all(torch.equal(piece.flatten(), whole.flatten()) for piece in pieces), (name, key)
            else:
                assert torch.equal(torch.cat([piece.flatten() for piece in pieces]), whole.flatten()), (name, key)


@pytest.mark.parametrize("by_probe", [False, True], ids=["one flat parameter", "one for each weight"])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_number_of_ranks_holds_the_bits_of_one_process(world: int, by_probe: bool) -> None:
    """Alone, small weights are cut into chunks that are shorter than a unit."""
    parts = run_ranks(world, hold, ("fp8-8bit",), by_probe, {})
    assert_equal_bits([part[0] for part in parts], one_process(RECIPES["fp8-8bit"]))


def test_every_recipe_holds_the_bits_of_one_process() -> None:
    parts = run_ranks(3, hold, tuple(RECIPES), False, {})
    for number, recipe in enumerate(RECIPES.values()):
        assert_equal_bits([part[number] for part in parts], one_process(recipe))


@pytest.mark.parametrize(
    ("world", "options"),
    [
        (3, {"use_orig_params": True}),
        (2, {"grad_op": True}),
        (2, {"grad_op": True, "use_orig_params": True}),
        (2, {"mixed": True}),
        (2, {"mixed": True, "use_orig_params": True}),
        (1, {"mixed": True}),
        (1, {"use_orig_params": True}),
    ],
    ids=str,
)
def test_options_of_fsdp_change_no_bit(world: int, options: dict[str, Any]) -> None:
    parts = run_ranks(world, hold, ("fp8",), True, options)
    assert_equal_bits([part[0] for part in parts], one_process(RECIPES["fp8"], rounded=options.get("mixed", False)))


def test_replicas_hold_the_same_bits() -> None:
    parts = [part[0] for part in run_ranks(4, hold, ("fp8",), False, {"hybrid": True})]
    assert_equal_bits(parts[:2], one_process(RECIPES["fp8"]))
    assert_equal_bits(parts[2:], one_process(RECIPES["fp8"]))


@pytest.mark.parametrize("quietly", [False, True])
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_accumulate(use_orig_params: bool, quietly: bool) -> None:
    assert_equal_bits(run_ranks(2, accumulate, use_orig_params, quietly), one_process(RECIPES["fp8"], micro=2))
