"""Predicted bytes equal measured bytes, tensor by tensor, and are what the formulas say."""

import io
import json

import pytest
import torch
from torch import nn

from eco_dist import RECIPES, ECOAdamW, Recipe, measure, plan, quantize_weights_
from eco_dist.memory import Category, MemoryReport, compare_table
from eco_dist.memory.layouts.fsdp import fsdp2
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.storage import PlainStorage
from eco_dist.memory.tensors import ModelTensor
from eco_dist.optim import ECOSGD
from tests.distributed.models import build, train
from tests.distributed.ranks import run_ranks

EXTRA = [
    Recipe(moments="fp8"),
    Recipe(format="e5m2", granularity="row"),
    Recipe(format="int8"),
    Recipe(compensation="residual", residual="fp32"),
]


def by_tensor(report: MemoryReport, rank: int) -> dict[tuple[str, Category], int]:
    """Static bytes of every tensor and category that holds any."""
    return {(t.name, t.category): t.bytes for t in report.ranks[rank].tensors if t.bytes and t.category.is_static}


@pytest.mark.parametrize("recipe", [*RECIPES.values(), *EXTRA], ids=lambda recipe: recipe.name)
def test_one_process_holds_what_was_planned(recipe: Recipe) -> None:
    model = build()
    planned = plan(model, recipe)
    quantize_weights_(model, recipe)
    optimizer = ECOAdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 1)
    assert by_tensor(measure(model, optimizer), 0) == by_tensor(planned, 0)


def measured_on_ranks(recipe: Recipe, world: int) -> list[bool]:
    from eco_dist import shard_model

    model = build()
    planned = plan(model, recipe, engine="fsdp2", world_size=world)
    shard_model(model, recipe)
    optimizer = ECOAdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 1)
    measured = measure(model, optimizer)
    return [by_tensor(measured, rank) == by_tensor(planned, rank) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("recipe", [*RECIPES.values(), *EXTRA], ids=lambda recipe: recipe.name)
def test_every_rank_holds_what_was_planned(recipe: Recipe, world: int) -> None:
    for equal in run_ranks(world, measured_on_ranks, recipe, world):
        assert equal == [True] * world


def hsdp_and_sgd() -> list[int]:
    from torch.distributed.device_mesh import init_device_mesh

    from eco_dist import shard_model

    model = build()
    planned = plan(model, "fp8-8bit", engine="fsdp2", world_size=4, shards=2, optimizer="sgd")
    shard_model(model, "fp8-8bit", mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = ECOSGD(model.parameters(), lr=1e-3)
    train(model, optimizer, 1)
    measured = measure(model, optimizer)
    return [measured.static_bytes(rank) - planned.static_bytes(rank) for rank in range(4)]


def test_hsdp_replicas_and_sgd() -> None:
    assert run_ranks(4, hsdp_and_sgd)[0] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("recipe", "bytes_per_parameter"),
    [
        ("fp8", 9 + 4 / 128),
        ("fp8-bf16", 5 + 4 / 128),
        ("fp8-8bit", 3 + 3 * 4 / 128),
        ("fp8-residual", 10 + 4 / 128),
        ("fp8-residual-8bit", 4 + 3 * 4 / 128),
        ("bf16", 10),
        ("fp8-master", 13 + 4 / 128),
    ],
)
def test_bytes_of_a_quantized_parameter(recipe: str, bytes_per_parameter: float) -> None:
    """Columns are a multiple of 128, so that every block is full."""
    model = nn.Sequential(nn.Linear(256, 384, bias=False))
    planned = plan(model, recipe)
    assert planned.quantized_bytes_per_parameter() == bytes_per_parameter
    assert RECIPES[recipe].bytes_per_parameter == bytes_per_parameter
    quantize_weights_(model, recipe)
    optimizer = ECOAdamW(model.parameters())
    model(torch.ones(1, 256)).sum().backward()
    optimizer.step()
    assert measure(model, optimizer).quantized_bytes_per_parameter() == bytes_per_parameter


def test_the_plan_needs_no_memory() -> None:
    """A model on the meta device, 512 ranks: the same numbers as a real one."""
    with torch.device("meta"):
        meta = build()
    for world in (1, 512):
        left = plan(meta, "fp8-8bit", engine="fsdp2", world_size=world)
        assert left == plan(build(), "fp8-8bit", engine="fsdp2", world_size=world)


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("rows", [1, 2, 5, 37])
def test_cuts_are_those_of_torch_chunk(rows: int, shards: int) -> None:
    tensor = ModelTensor(name="w", shape=(rows, 3), storage=PlainStorage())
    (pool,) = fsdp2([tensor], Mesh(world_size=shards, shards=shards), True)
    chunks = [chunk.shape[0] for chunk in torch.empty(rows, 1).chunk(shards)]
    chunks += [0] * (shards - len(chunks))
    held = [s.entries[0].elements // 3 for s in pool.segments() for _ in range(s.stop - s.start)]
    assert held == chunks


def test_gradients_count_while_they_live() -> None:
    model = build()
    optimizer = ECOAdamW(model.parameters())
    before = measure(model, optimizer).ranks[0].by_category()
    sum(p.sum() for p in model.parameters()).backward()
    report = measure(model, optimizer)
    assert Category.GRADIENTS not in before
    assert report.ranks[0].by_category()[Category.GRADIENTS] == 4 * report.parameters
    assert report.static_bytes(0) == sum(before.values())


def test_report_as_json_and_as_a_table() -> None:
    model = build()
    planned, baseline = plan(model, "fp8"), plan(model, "fp32-master")
    content = json.loads(json.dumps(planned.to_json()))
    assert content["schema_version"] == 2
    assert content["holdings"][0]["static_bytes"] == planned.static_bytes(0)
    assert sum(t["bytes"] for t in content["holdings"][0]["tensors"]) == planned.static_bytes(0)

    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    quantize_weights_(model, "fp8")
    optimizer = ECOAdamW(model.parameters())
    train(model, optimizer, 1)
    console.print(compare_table(planned, measure(model, optimizer), baseline))
    text = console.export_text()
    assert "0 B" in text
    assert "fp32-master" in text
    assert "12.0" in text


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"engine": "zero"}, "expected engine to be one of single, fsdp2, fsdp1, zero0, .*got 'zero'"),
        ({"world_size": 2}, "expected world_size 1 for engine 'single'"),
        ({"engine": "fsdp2", "world_size": 4, "shards": 3}, "expected shards to divide the world size 4, got 3"),
        ({"optimizer": "lion"}, "expected optimizer to be one of adamw, sgd, got 'lion'"),
    ],
)
def test_impossible_requests(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(build(), "fp8", **options)  # type: ignore[arg-type]
