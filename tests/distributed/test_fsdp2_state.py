"""State, refusals and bytes of a sharded model on two gloo ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from eco_dist import ECOAdamW, QuantizedWeight, measure, shard_model
from eco_dist.memory import Category, WireMeter
from eco_dist.optim.shard import local
from tests.distributed.models import batch, build, loss_of, sharded, train
from tests.distributed.ranks import run_ranks

STEPS = 4


def on_two_ranks(function):
    """Run a module-level function on two ranks and hand both results to the test."""
    return run_ranks(2, function)


def optimizer_for(model: nn.Module, **options: float) -> ECOAdamW:
    return ECOAdamW(model.parameters(), lr=3e-3, **options)


def resumed(recipe: str) -> tuple[list[float], list[float], set[torch.dtype]]:
    model, optimizer, _ = sharded(recipe, steps=2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, 2, first=2)
    other, fresh, _ = sharded(recipe, steps=1)
    other.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    dtypes = {local(value).dtype for state in fresh.state.values() for value in state.values()}
    return expected, train(other, fresh, 2, first=2), dtypes


@pytest.mark.parametrize("recipe", ["fp8", "fp8-8bit", "fp8-bf16"])
def test_state_dicts_resume_bit_equal(recipe: str) -> None:
    for expected, continued, dtypes in run_ranks(2, resumed, recipe):
        assert continued == expected
        assert (torch.uint8 in dtypes) == (recipe == "fp8-8bit")


def full_state_difference() -> float:
    model, _, _ = sharded("fp8", steps=2)
    full = get_model_state_dict(model)
    weight = model.blocks[0].up.weight.full_tensor()
    assert isinstance(full["blocks.0.up.weight"]._local_tensor, QuantizedWeight)
    gathered = [torch.empty(0)] * 2
    dist.all_gather_object(gathered, local(model.blocks[0].up.weight).decode())
    return (weight.decode() - torch.cat(gathered)).abs().max().item()


def test_full_tensor_gathers_codes_of_uneven_shards() -> None:
    assert on_two_ranks(full_state_difference) == [0.0, 0.0]


def stock_optimizer(name: str) -> tuple[bool, str]:
    model = build()
    shard_model(model, "fp8")
    loss_of(model, batch(0)).backward()
    before = [local(p).codes.clone() for p in model.parameters() if isinstance(local(p), QuantizedWeight)]
    optimizer = {
        "foreach": torch.optim.AdamW(model.parameters(), foreach=True),
        "loop": torch.optim.AdamW(model.parameters(), foreach=False),
        "fused": torch.optim.AdamW(model.parameters(), fused=True),
        "sgd": torch.optim.SGD(model.parameters(), lr=0.1),
    }[name]
    message = ""
    try:
        optimizer.step()
    except NotImplementedError as error:
        message = str(error)
    after = [local(p).codes for p in model.parameters() if isinstance(local(p), QuantizedWeight)]
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), message


@pytest.mark.parametrize("name", ["foreach", "loop", "fused", "sgd"])
def test_stock_optimizers_are_refused_and_nothing_is_lost(name: str) -> None:
    for unchanged, message in run_ranks(2, stock_optimizer, name):
        assert unchanged
        assert "ECOAdamW" in message


def wire(recipe: str) -> tuple[int, int]:
    """All-gather bytes this rank sends in a step, and elements of the blocks' matrices."""
    model = build(width=128, hidden=256, layers=3)
    elements = sum(block.up.weight.numel() + block.down.weight.numel() for block in model.blocks)
    shard_model(model, recipe)
    optimizer = optimizer_for(model)
    train(model, optimizer, 1)
    with WireMeter() as meter:
        train(model, optimizer, 1)
    return meter.bytes["all_gather"], elements


def test_the_all_gather_carries_one_byte_a_parameter() -> None:
    """Forward and backward gather the blocks: against fp32 each saves 3 B a parameter, less the scales."""
    (fp8, elements), _ = run_ranks(2, wire, "fp8")
    (fp32, _), _ = run_ranks(2, wire, "fp32-master")
    saved_per_element = (fp32 - fp8) / (elements / 2) / 2
    assert saved_per_element == pytest.approx(3 - 4 / 128, rel=0.01)


def resident_master() -> list[str]:
    model, optimizer, _ = sharded("fp8-8bit", steps=2)
    categories = measure(model, optimizer).ranks[dist.get_rank()].by_category()
    return [category.value for category in categories if category is Category.MASTER]


def test_no_master_weights_are_resident() -> None:
    assert on_two_ranks(resident_master) == [[], []]
