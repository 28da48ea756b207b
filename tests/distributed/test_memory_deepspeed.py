"""Plans held against live DeepSpeed engines, ours and its own: to the byte on every rank, by category; strays named."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from eco_dist import measure, plan
from eco_dist.memory import Category, MasterCopyError, MemoryReport
from eco_dist.memory.activations import Batch
from eco_dist.memory.baselines import resolve
from eco_dist.memory.layouts import ZeroOptions
from eco_dist.memory.layouts.zero import WorkingCopy
from eco_dist.memory.plan import mesh_for, plan_shape
from eco_dist.memory.tensors import ModelTensor, module_shape
from eco_dist.memory.track import StepTracker
from eco_dist.models import Llama, llama_config, next_token_loss
from eco_dist.training.memory_report import transformer_shape
from tests.distributed.deepspeed_ranks import (
    EVEN,
    ODD,
    config,
    engine_of,
    masters_config,
    prepare_rank,
    run_ranks,
    train,
)
from tests.distributed.models import Net, build
from tests.distributed.test_deepspeed_memory import storages
from tests.distributed.test_deepspeed_moe import MoENet

pytest.importorskip("deepspeed")

BUCKET = 1000
SCALARS = 16
"""Bytes of an engine's norm and the like, which are no optimizer's."""

Case = tuple[str, int, str, dict[str, Any]]
"""Model, stage, recipe, and options of the plan."""


def json_of(stage: int, recipe: str, options: ZeroOptions) -> dict[str, Any]:
    zero = {"stage3_param_persistence_threshold": options.persistence} if stage == 3 else {}
    zero |= {"reduce_bucket_size": options.reduce_bucket, "sub_group_size": options.sub_group}
    if not recipe.startswith(("bf16-master", "deepspeed")):
        return config(stage, "bf16", eco={"recipe": recipe, "working_copy": options.working_copy}, zero=zero)
    json = masters_config(stage, "bf16", zero=zero)
    if recipe == "deepspeed-bf16-states":
        json["bf16"].update(bf16_master_weights_and_grads=True, bf16_optimizer_states=True)
    return json


def tied(**sizes: int) -> Net:
    model = build(**sizes)
    model.head.weight = model.embed.weight
    return model


def frozen(**sizes: int) -> Net:
    model = build(**sizes)
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)
    return model


MODELS = {"odd": (build, ODD), "even": (build, EVEN), "tied": (tied, ODD), "frozen": (frozen, ODD)}


def differences(planned: MemoryReport, measured: MemoryReport) -> list[dict[str, tuple[int, int]]]:
    """Static categories that differ, planned and measured, rank by rank."""
    result = []
    for one, other in zip(planned.ranks, measured.ranks, strict=True):
        held, found = one.by_category(), other.by_category()
        counts = {kind: (held.get(kind, 0), found.get(kind, 0)) for kind in Category if kind.is_static}
        result.append({kind.value: pair for kind, pair in counts.items() if pair[0] != pair[1]})
    return result


def compared(case: Case) -> tuple[list[Any], int]:
    """What differs, and bytes that appeared in the process and the report does not explain."""
    prepare_rank()
    import eco_dist.deepspeed
    from eco_dist.engines.deepspeed.config import DEEPSPEED_SKIP

    family, stage, recipe, changes = case
    make, sizes = MODELS[family]
    options = ZeroOptions(**{"reduce_bucket": BUCKET, "persistence": 0, **changes})
    world = torch.distributed.get_world_size()
    planned = plan(make(**sizes), recipe, engine=f"zero{stage}", world_size=world, skip=DEEPSPEED_SKIP, zero=options)
    before = storages()  # keeps them, so that no address is used again
    engine = engine_of(make(**sizes), json_of(stage, recipe, options))
    train(engine, 2)
    new = sum(storage.nbytes() for address, storage in storages().items() if address not in before)
    measured = eco_dist.deepspeed.measure(engine)
    assert measured.parameters == planned.parameters
    return differences(planned, measured), new - measured.static_bytes(torch.distributed.get_rank())


@pytest.fixture(scope="module", autouse=True)
def tables() -> None:
    """The first engine of a process also makes tables for decoding moments."""
    run_ranks(3, compared, ("odd", 2, "fp8-8bit", {}))


ON_ONE: list[Case] = [
    ("odd", 2, "fp8-8bit", {}),
    ("odd", 3, "fp8", {"persistence": 1000}),
    ("odd", 3, "bf16-master", {"persistence": 1000}),
]
ON_TWO: list[Case] = [
    ("odd", 1, "fp8-8bit", {}),
    *(("odd", 2, "fp8-8bit", {"working_copy": copy}) for copy in ("replica", "transient", "kept")),
    ("odd", 3, "fp8-8bit", {}),
    ("odd", 3, "fp8", {"persistence": 1000, "sub_group": 3000}),
    ("even", 2, "fp8", {}),
    ("even", 2, "paper", {}),
    ("odd", 2, "int4", {}),
    ("odd", 3, "int4", {}),
    ("odd", 1, "fp8-residual-8bit", {}),
    *(("tied", stage, "fp8-8bit", {"persistence": 1000}) for stage in (1, 3)),
    *(("frozen", stage, "fp8-8bit", {}) for stage in (2, 3)),
    *(("odd", stage, "bf16-master", {"persistence": 1000}) for stage in (0, 1, 2, 3)),
    *(("tied", stage, "bf16-master", {}) for stage in (2, 3)),
    *(("odd", stage, "deepspeed-bf16-states", {"sub_group": 3000}) for stage in (1, 2, 3)),
]
ON_THREE: list[Case] = [
    ("odd", 1, "fp8", {}),
    ("odd", 3, "fp8-8bit", {}),
    ("tied", 2, "fp8-8bit", {}),
    ("odd", 3, "bf16-master", {}),
]


@pytest.mark.parametrize(
    ("world", "case"),
    [(1, case) for case in ON_ONE] + [(2, case) for case in ON_TWO] + [(3, case) for case in ON_THREE],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else str(value),
)
def test_every_rank_holds_what_was_planned(world: int, case: Case) -> None:
    for differ, unexplained in run_ranks(world, compared, case):
        assert not any(differ)
        assert 0 <= unexplained <= SCALARS


# --- peaks ------------------------------------------------------------------------------------------------------------


def peak_of(stage: int, recipe: str, copy: WorkingCopy, preset: str, sequences: int, length: int) -> tuple[int, float]:
    """Static bytes the tracker misses, and planned over measured peak."""
    prepare_rank()
    import eco_dist.deepspeed
    from eco_dist.engines.deepspeed.config import DEEPSPEED_SKIP
    from eco_dist.engines.deepspeed.memory import ZeroMemory

    shape = llama_config(preset, vocabulary=512)
    options = ZeroOptions(working_copy=copy, reduce_bucket=100_000, persistence=1000)
    planned = plan(
        Llama(shape),
        recipe,
        engine=f"zero{stage}",
        world_size=2,
        skip=DEEPSPEED_SKIP,
        transformer=transformer_shape(shape),
        batch=Batch(sequences=sequences, length=length, compute_bytes=2),
        zero=options,
    )
    json = json_of(stage, recipe, options)
    engine = engine_of(Llama(shape), json)

    def step() -> None:
        tokens = torch.randint(0, 512, (sequences, length + 1))
        loss = next_token_loss(engine(tokens[:, :-1]), tokens[:, 1:].contiguous())
        engine.backward(loss)
        del loss
        engine.step()

    step()
    rank = torch.distributed.get_rank()
    static = eco_dist.deepspeed.measure(engine).static_bytes(rank)
    tracker = StepTracker.of_tensors(t for _, _, t in ZeroMemory(engine.optimizer, engine.module).memory_tensors())
    with tracker:
        step()
    measured = max(moment.total for moment in tracker.timeline)
    expected = planned.ranks[rank].peak_bytes
    assert expected is not None
    return planned.static_bytes(rank) - static, expected / (static + measured)


@pytest.mark.parametrize(
    ("stage", "recipe", "copy"),
    [
        (1, "fp8", "replica"),
        (2, "fp8", "replica"),
        (2, "fp8", "transient"),
        (1, "fp8", "kept"),
        (3, "fp8", "replica"),
        (0, "bf16-master", "replica"),
        (2, "bf16-master", "replica"),
        (3, "bf16-master", "replica"),
        (2, "deepspeed-bf16-states", "replica"),
        (3, "deepspeed-bf16-states", "replica"),
    ],
)
@pytest.mark.parametrize(("preset", "sequences", "length"), [("small", 1, 16), ("tiny", 4, 64)])
def test_the_modelled_peak_is_near_the_measured_one(
    stage: int, recipe: str, copy: WorkingCopy, preset: str, sequences: int, length: int
) -> None:
    """Where weights dominate and where activations do."""
    for difference, ratio in run_ranks(2, peak_of, stage, recipe, copy, preset, sequences, length):
        assert difference == 0
        assert ratio == pytest.approx(1, abs=0.1)


# --- experts ----------------------------------------------------------------------------------------------------------


def expert_bytes(stage: int, ep: int) -> list[Any]:
    prepare_rank()
    import eco_dist.deepspeed
    from eco_dist.engines.deepspeed.config import DEEPSPEED_SKIP

    whole = module_shape(MoENet(1), resolve("fp8-8bit"), skip=DEEPSPEED_SKIP)
    first = ".deepspeed_experts.0."
    tensors: list[ModelTensor] = [
        dataclasses.replace(tensor, is_expert=first in tensor.name, count=2 if first in tensor.name else 1)
        for tensor in whole.tensors
        if ".deepspeed_experts.1." not in tensor.name  # the second of two equal ones
    ]
    mesh = mesh_for(f"zero{stage}", torch.distributed.get_world_size(), ep=ep)
    shape = dataclasses.replace(whole, tensors=tuple(tensors))
    planned = plan_shape(shape, engine=f"zero{stage}", mesh=mesh, zero=ZeroOptions(reduce_bucket=BUCKET))
    options = ZeroOptions(reduce_bucket=BUCKET)
    engine = engine_of(MoENet(ep), json_of(stage, "fp8-8bit", options))
    train(engine, 1)
    return differences(planned, eco_dist.deepspeed.measure(engine))


@pytest.mark.parametrize(("stage", "ep"), [(1, 1), (2, 2)])
def test_experts_are_planned_too(stage: int, ep: int) -> None:
    for differ in run_ranks(2, expert_bytes, stage, ep):
        assert not any(differ)


# --- strays and monitors ----------------------------------------------------------------------------------------------


def planted(stage: int, where: str, width: int) -> str:
    """What strict says; no other engine of the process, which DeepSpeed keeps alive, has weights of this size."""
    engine = engine_of(build(width=width, hidden=150), json_of(stage, "fp8", ZeroOptions(reduce_bucket=BUCKET)))
    train(engine, 1)
    measure(engine.module, engine.optimizer, strict=True)  # a clean step is accepted
    name, weight = next((n, p) for n, p in engine.module.named_parameters() if n == "blocks.0.up.weight")
    whole = getattr(weight, "ds_shape", weight.shape)
    here = next(size for title, size, _ in engine.optimizer.quantized_weights() if title == name)
    stray = torch.zeros(whole if where == "module" else here)
    if where == "module":
        engine.module.blocks[0].__dict__["shadow"] = [stray]
    else:
        engine.optimizer.__dict__["masters"] = {name: stray}
    try:
        measure(engine.module, engine.optimizer, strict=True)
    except MasterCopyError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_planted_copy_is_named(stage: int) -> None:
    width = 50 + stage
    for sentence in run_ranks(2, planted, stage, "module", width, fresh=True):
        assert f"on rank 0 a float32 tensor of shape [150, {width}] held by 'shadow' of Block 'blocks.0'" in sentence
    for sentence in run_ranks(2, planted, stage, "optimizer", width + 10):
        assert "held by 'masters' of ECOZeroOptimizer" in sentence


def monitored(directory: str) -> tuple[int, float]:
    import eco_dist.deepspeed

    json = config(2, "bf16", eco={"recipe": "fp8"}, zero={"reduce_bucket_size": BUCKET})
    json["csv_monitor"] = {"enabled": True, "output_path": directory, "job_name": "run"}
    engine = engine_of(build(width=47, hidden=151), json)
    train(engine, 1)
    report = eco_dist.deepspeed.monitor_memory(engine)
    return max(rank.static_bytes for rank in report.ranks), engine.global_samples


def test_deepspeeds_monitor_gets_a_line(tmp_path: Path) -> None:
    expected, samples = run_ranks(2, monitored, str(tmp_path))[0]
    file = next(tmp_path.rglob("*static_bytes_max.csv"))
    rows = list(csv.reader(file.open()))
    assert [float(cell) for cell in rows[-1]] == [samples, expected]
