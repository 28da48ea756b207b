"""Checkpoints of FSDP1: replicas, frozen weights, refusals. The way to other engines: `test_checkpoint_engines.py`."""

from pathlib import Path

import torch
from torch.distributed.fsdp import ShardingStrategy

from eco_dist.checkpoint import CheckpointError, load, save
from eco_dist.checkpoint.dcp import dcp_state
from eco_dist.checkpoint.reader import CheckpointReader
from tests.distributed.deepspeed_ranks import Probe, Probes
from tests.distributed.fsdp1_models import converted
from tests.distributed.ranks import run_ranks


def frozen_and_replicated(root: str) -> dict[str, str]:
    """Replicas write once, a frozen weight comes along, and what does not fit is refused."""
    model = Probes()
    model.probes["odd"].requires_grad_(False)
    wrapped, optimizer = converted(model, "fp8", {Probe}, sharding_strategy=ShardingStrategy.NO_SHARD)
    save(root, wrapped, optimizer, step=0)
    answers = {}
    for name, attempt in {
        "recipe": lambda: load(root, *converted(Probes(), "int4", {Probe})),
        "DCP": lambda: dcp_state(wrapped, optimizer),
    }.items():
        try:
            attempt()
        except (CheckpointError, TypeError) as error:
            answers[name] = str(error)
    return answers


def test_replicas_frozen_weights_and_refusals(tmp_path: Path) -> None:
    for answers in run_ranks(2, frozen_and_replicated, str(tmp_path)):
        assert "convert the model with the recipe of the checkpoint" in answers["recipe"]
        assert "use eco_dist.checkpoint.save" in answers["DCP"]
    reader = CheckpointReader(tmp_path)
    assert torch.equal(reader.tensor("probes.odd.weight"), Probes().probes["odd"].weight)
    assert all(len(tensor.runs) == 1 for tensor in reader.manifest.tensors.values())
