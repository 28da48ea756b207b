"""Plans of any model on any cluster: exact sums, public models, baselines, what would fit, and clear refusals."""

from __future__ import annotations

import math
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn

from eco_dist import ECOAdamW, measure, plan
from eco_dist.memory.activations import Batch
from eco_dist.memory.baselines import BASELINES, resolve
from eco_dist.memory.categories import Category
from eco_dist.memory.fit import largest_batch, parse_bytes, smallest_world
from eco_dist.memory.layouts import ENGINES, ZeroOptions, pools
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.plan import WITH_EXPERTS, mesh_for, plan_shape
from eco_dist.memory.public import PUBLIC_MODELS, find_architecture
from eco_dist.memory.report import MemoryReport
from eco_dist.memory.tensors import ModelShape
from tests.unit.memory_shapes import small

GIB = 1 << 30


def planned(model: ModelShape, engine: str, world: int, *, ep: int = 1, **options: object) -> MemoryReport:
    return plan_shape(model, engine=engine, mesh=mesh_for(engine, world, ep=ep), **options)  # type: ignore[arg-type]


# --- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["flat", "separate"])
@pytest.mark.parametrize("ep", [1, 2, 4])
@pytest.mark.parametrize("engine", WITH_EXPERTS)
def test_ranks_together_own_every_element_once(engine: str, ep: int, experts: str) -> None:
    shape = small("qwen3_moe", experts=experts).stored(resolve("fp8"))
    report = planned(shape, engine, 8, ep=ep)
    elements = sum(tensor.elements for tensor in shape.tensors if tensor.storage.is_quantized)
    assert sum(rank.holding.quantized_parameters for rank in report.ranks) == elements


def test_replicas_hold_the_same() -> None:
    shape = small("llama").stored(resolve("fp8"))
    replica = plan_shape(shape, engine="fsdp2", mesh=Mesh(world_size=12, shards=3))
    alone = planned(shape, "fsdp2", 3)
    assert [rank.static_bytes for rank in replica.ranks] == [rank.static_bytes for rank in alone.ranks] * 4


@pytest.mark.parametrize("world", [1, 4, 64])
def test_deepspeeds_formulas(world: int) -> None:
    """Stage 2: 2N + 18N/P less 6N/P of gradients. Stage 3: 16N/P, small parameters whole too if cut, and a bucket."""
    shape = find_architecture("llama-3-8b").stored(resolve("bf16-master"))  # type: ignore[union-attr]
    n = shape.parameters
    counted = planned(shape, "zero2", world).worst.by_category()
    assert counted[Category.WORKING] == 2 * n
    partition = counted[Category.MASTER] + counted[Category.MOMENTS]
    assert 0 <= partition - 12 * n / world <= 24  # padding: at most two elements
    small_ones = sum(t.elements for t in shape.tensors if t.elements <= 100_000 and world > 1)
    third = planned(shape, "zero3", world, zero=ZeroOptions(reduce_bucket=0)).worst
    assert 0 <= third.static_bytes - (16 * n / world + 2 * small_ones) <= 18 * len(shape.tensors)


@pytest.mark.parametrize("dp", [1, 8])
def test_megatrons_formulas(dp: int) -> None:
    """18 bytes, or 6 + 12/dp with its distributed optimizer: 14 or 2 + 12/dp static, gradients of 4 at the step."""
    shape = find_architecture("llama-3-8b").stored(resolve("bf16-master"))  # type: ignore[union-attr]
    n = shape.parameters
    for engine, formula in (("single", 18.0), ("zero1", 6 + 12 / dp)):
        report = planned(
            shape, engine, 1 if engine == "single" else dp, batch=Batch(), zero=ZeroOptions(reduce_bucket=0)
        )
        step = report.worst.holding.timeline[-1]
        gradients = 4 * n  # what Megatron accumulates them in; the engines here have 2 or 4
        assert step.name == "optimizer step"
        assert (report.worst.static_bytes + gradients) / n == pytest.approx(formula, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "bytes_per_parameter"),
    [
        ("bf16-master", 14),
        ("deepspeed-bf16-master", 12),
        ("deepspeed-bf16-states", 8),
        ("te-fp8-master", 14),
        ("torchao-8bit", 4 + 2 * 4 / 256),
        ("flashoptim", 5.125),
    ],
)
def test_bytes_of_a_parameter_of_the_baselines(name: str, bytes_per_parameter: float) -> None:
    model = nn.Sequential(nn.Linear(4096, 4096, bias=False))
    constant = {"torchao-8bit": 2 * 1024, "te-fp8-master": 4}.get(name, 0) + 4  # maps, a scale, the step
    assert plan(model, name).static_bytes(0) == bytes_per_parameter * 4096 * 4096 + constant
    assert name in BASELINES


def test_torchao_holds_what_is_planned() -> None:
    torchao = pytest.importorskip("torchao.optim")
    model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 63)).to(torch.bfloat16)
    expected = plan(model, "torchao-8bit")
    optimizer = torchao.AdamW8bit(model.parameters())
    model(torch.ones(1, 256, dtype=torch.bfloat16)).sum().backward()
    with torch.compiler.set_stance("force_eager"):  # compiling its step takes most of a minute
        optimizer.step()
    optimizer.zero_grad()
    assert measure(model, optimizer).static_bytes(0) == expected.static_bytes(0)


def test_torchs_own_adamw_holds_what_is_planned_for_fp32_masters() -> None:
    model = nn.Sequential(nn.Linear(31, 17), nn.Linear(17, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 31)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    measured = measure(model, optimizer).ranks[0]
    assert measured.by_category() == plan(model, "fp32-master").ranks[0].by_category()
    assert not isinstance(optimizer, ECOAdamW)


# --- size of the work -------------------------------------------------------------------------------------------------


def test_work_grows_with_shapes_not_with_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V3, 671 billion parameters on 2,048 ranks: a thousand tensors in a few distinct shards each."""
    calls = 0
    original = pools.Pool._entry

    def counted(*arguments: object) -> pools.Entry:
        nonlocal calls
        calls += 1
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pools.Pool, "_entry", counted)
    architecture = find_architecture("deepseek-v3")
    assert architecture is not None
    tracemalloc.start()
    started = time.process_time()
    shape = architecture.stored(resolve("fp8"))
    report = planned(shape, "fsdp2", 2048, ep=64, batch=Batch(checkpoints=True))
    seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(report.ranks) == 2048
    assert calls <= 3 * len(shape.tensors)
    assert len(report.groups) <= 32
    assert seconds < 10 * 6  # ten seconds on an idle machine, with tracemalloc and neighbours on this one
    assert peak < GIB


@pytest.mark.parametrize("engine", [name for name in ENGINES if name not in ("single", "zero2")])
def test_the_largest_world(engine: str) -> None:
    recipe = "bf16-master" if engine == "zero0" else "fp8"
    ep = 8 if engine in WITH_EXPERTS else 1
    report = planned(small("deepseek_v3").stored(resolve(recipe)), engine, 16_384, ep=ep)
    assert len(report.ranks) == 16_384


# --- what would fit ---------------------------------------------------------------------------------------------------


def test_smallest_world_and_largest_batch() -> None:
    shape = find_architecture("llama-3-8b").stored(resolve("fp8"))  # type: ignore[union-attr]

    def build(world: int, sequences: int = 1) -> MemoryReport:
        batch = Batch(sequences=sequences, checkpoints=True)
        return planned(shape, "fsdp2", world, batch=batch, budget=24 * GIB)

    world = smallest_world(build)
    assert world is not None
    assert build(world).fits
    assert not build(world // 2).fits
    largest = largest_batch(lambda sequences: build(64, sequences))
    assert build(64, largest).fits
    assert not build(64, largest + 1).fits


def test_nothing_fits() -> None:
    shape = small("llama").stored(resolve("fp8"))
    assert smallest_world(lambda world: planned(shape, "fsdp2", world, budget=1)) is None
    assert largest_batch(lambda size: planned(shape, "fsdp2", 2, batch=Batch(sequences=size), budget=1)) == 0


def test_stepping_in_backward_saves_the_gradients() -> None:
    shape = find_architecture("llama-3-8b").stored(resolve("fp8"))  # type: ignore[union-attr]
    usual, early = (
        planned(shape, "fsdp2", 8, batch=Batch(checkpoints=True, length=128), in_backward=flag).worst.peak_bytes
        for flag in (False, True)
    )
    assert usual is not None
    assert early is not None
    assert early < usual - 3 * shape.parameters // 8


@pytest.mark.parametrize(("text", "size"), [("80GiB", 80 * GIB), ("1.5 KiB", 1536), ("7 B", 7)])
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["80", "80GB", "GiB", "-1GiB", "x MiB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="expected a positive size with a unit"):
        parse_bytes(text)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"world_size": 0, "shards": 1}, "expected world_size of 1 or more, got 0"),
        ({"world_size": 16_385, "shards": 1}, "expected at most 16,384 ranks, got 16,385"),
        ({"world_size": 8, "shards": 3}, "expected shards to divide the world size 8, got 3"),
        ({"world_size": 8, "shards": 8, "ep": 3}, "expected ep to divide the 8 ranks that share the weights, got 3"),
    ],
)
def test_meshes_that_do_not_exist(arguments: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Mesh(**arguments)


@pytest.mark.parametrize("experts", ["flat", "stacked", "separate"])
def test_experts_that_do_not_divide(experts: str) -> None:
    shape = small("qwen3_moe", experts=experts).stored(resolve("fp8"))
    with pytest.raises(ValueError, match="expected ep to divide"):
        planned(shape, "fsdp2", 512 * 3, ep=512 * 3)


def test_hsdp_is_fsdp2s() -> None:
    with pytest.raises(ValueError, match=r"expected engine 'fsdp2' for fewer shards than ranks \(HSDP\), got 'zero1'"):
        mesh_for("zero1", 8, shards=4)


@pytest.mark.parametrize(
    ("engine", "options", "sentence"),
    [
        ("zero3", {"ep": 2}, "expected engine fsdp2, zero1, zero2 for expert parallelism, got 'zero3' with ep 2"),
        ("fsdp2", {"tp": 2}, "expected tp 1, got 2: no engine here has tensor parallelism of quantized weights"),
        ("fsdp3", {}, "expected engine to be one of single, fsdp2, fsdp1, zero0, zero1, zero2, zero3, got 'fsdp3'"),
    ],
)
def test_what_an_engine_does_not_have(engine: str, options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        mesh_for(engine, 8, **options)


def test_codes_need_a_stage_of_zero() -> None:
    with pytest.raises(ValueError, match="expected ZeRO stage 1, 2 or 3 for a recipe with codes, got 0"):
        planned(small("llama").stored(resolve("fp8")), "zero0", 2)


def test_unknown_recipe() -> None:
    with pytest.raises(ValueError, match="got 'bf16-mastr'; did you mean 'bf16-master'"):
        plan(nn.Linear(2, 2), "bf16-mastr")


def test_torchao_does_not_run_under_zero() -> None:
    with pytest.raises(ValueError, match="expected an engine without flat partitions for torchao-8bit"):
        planned(small("llama").stored(resolve("torchao-8bit")), "zero2", 2)


def test_all_public_models_plan_on_a_laptop() -> None:
    for name in PUBLIC_MODELS:
        architecture = find_architecture(name)
        assert architecture is not None
        report = planned(architecture.stored(resolve("fp8-8bit")), "fsdp2", 64)
        assert math.isclose(report.bytes_per_parameter(), 3.1, abs_tol=3.0), name


def test_the_table_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    lines = text[text.index("## Public models on clusters") :].splitlines()
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    recipes = rows[0][3:]
    assert len(rows) > 5
    for name, world, ep, *cells in rows[1:]:
        architecture = find_architecture(name)
        assert architecture is not None
        for recipe, cell in zip(recipes, cells, strict=True):
            shape = architecture.stored(resolve(recipe))
            report = planned(shape, "fsdp2", int(world.replace(",", "")), ep=int(ep), batch=Batch(checkpoints=True))
            assert report.worst.peak_bytes is not None
            computed = f"{report.worst.static_bytes / GIB:.2f} / {report.worst.peak_bytes / GIB:.1f}"
            assert cell == computed, (name, recipe)
