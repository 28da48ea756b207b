"""The modelled peak of a step with experts, replicas and checkpointing, held against live FSDP2 ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh

from eco_dist import ECOAdamW, measure, shard_model
from eco_dist.memory.activations import Batch
from eco_dist.memory.baselines import resolve
from eco_dist.memory.plan import mesh_for, plan_shape
from eco_dist.memory.tensors import module_shape
from eco_dist.models import build_transformer, model_config
from eco_dist.models.llama import Block
from eco_dist.training.memory_report import transformer_shape
from eco_dist.weights import DEFAULT_SKIP
from tests.distributed.peaks import tracked_step
from tests.distributed.ranks import run_ranks

VOCABULARY = 512
SMALL, LARGE = Batch(length=16, compute_bytes=4), Batch(sequences=4, length=64, compute_bytes=4)


def peak_ratio(preset: str, recipe: str, batch: Batch, ep: int = 1, shards: int | None = None) -> float:
    """Planned over measured bytes at the peak; `shards` is given for HSDP."""
    config = model_config(preset, vocabulary=VOCABULARY)
    model = build_transformer(config, seed=0)
    shape = module_shape(model, resolve(recipe), skip=DEFAULT_SKIP, transformer=transformer_shape(config))
    world = dist.get_world_size()
    arrangement = mesh_for("fsdp2", world, shards=shards, ep=ep)
    planned = plan_shape(shape, engine="fsdp2", mesh=arrangement, batch=batch, backend="gloo")
    mesh = (
        None
        if shards is None
        else init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replicate", "shard"))
    )
    if batch.checkpoints:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    shard_model(model, recipe, mesh=mesh, expert_parallel=ep)
    optimizer = ECOAdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(dist.get_rank())

    timeline = tracked_step(model, optimizer, vocabulary=VOCABULARY, sequences=batch.sequences, length=batch.length)
    measured = measure(model, optimizer, check=False, timeline=timeline)
    assert measured.static_bytes(0) == planned.static_bytes(0)
    found, expected = measured.ranks[0].peak_bytes, planned.ranks[0].peak_bytes
    assert found is not None
    assert expected is not None
    return expected / found


@pytest.mark.parametrize(
    ("world", "ep", "recipe", "batch"),
    [
        (2, 1, "fp8", SMALL),
        (2, 2, "fp8", SMALL),
        (2, 2, "fp32-master", LARGE),
        (4, 2, "fp8", LARGE),
        (4, 2, "fp32-master", SMALL),
    ],
)
def test_experts(world: int, ep: int, recipe: str, batch: Batch) -> None:
    assert run_ranks(world, peak_ratio, "smoe-tiny", recipe, batch, ep) == pytest.approx([1] * world, abs=0.1)


def test_replicas() -> None:
    assert run_ranks(4, peak_ratio, "tiny", "fp8", SMALL, 1, 2) == pytest.approx([1] * 4, abs=0.1)


@pytest.mark.parametrize("recipe", ["fp8", "fp32-master"])
def test_checkpointing(recipe: str) -> None:
    batch = dataclasses.replace(LARGE, checkpoints=True)
    assert run_ranks(2, peak_ratio, "tiny", recipe, batch) == pytest.approx([1] * 2, abs=0.1)
