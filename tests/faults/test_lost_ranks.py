"""A rank dies or hangs in a step: the others are told within the time limit, and the last checkpoint is whole."""

import datetime
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from eco_dist import ECOAdamW, shard_model
from eco_dist.checkpoint import faults, load, save
from tests.distributed.models import batch, build, loss_of, train
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import contents, prepared

TIMEOUT_SECONDS = 4.0


def lose_a_rank(action: str, root: str) -> None:
    """Save, then rank 1 comes to the fault in its backward pass. Rank 0 notes what it meets."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_SECONDS))
    model = build()
    shard_model(model, "fp8-8bit", mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    train(model, optimizer, 2)
    save(root, model, optimizer, step=2)
    torch.save(contents(model, optimizer), f"{root}/expected-{dist.get_rank()}")
    pids: list[int] = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    os.environ.update(ECO_DIST_FAULT=f"step:backward:{action}:1", RANK=str(dist.get_rank()))
    model.blocks[0].register_full_backward_hook(lambda *_: faults.point("step:backward"))
    started = time.monotonic()
    try:
        loss_of(model, batch(2)).backward()
        optimizer.step()
    except RuntimeError as error:
        told = {"seconds": time.monotonic() - started, "said": str(error)}
        Path(root, "told.json").write_text(json.dumps(told))
    finally:
        del os.environ["ECO_DIST_FAULT"], os.environ["RANK"]
        os.kill(pids[1], signal.SIGKILL)  # a stopped worker, which this test started


def resume(root: str) -> list[bool]:
    model, optimizer = prepared("fp8-8bit", seed=7)
    load(root, model, optimizer)
    expected = torch.load(f"{root}/expected-{dist.get_rank()}")
    return [torch.equal(value, expected[name]) for name, value in contents(model, optimizer).items()]


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_the_others_are_told(action: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(2, lose_a_rank, action, str(tmp_path), pool="faults")
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["seconds"] < TIMEOUT_SECONDS + 2
    assert ("imed out" in told["said"]) if action == "stop" else told["said"]
    for same in run_ranks(2, resume, str(tmp_path), pool="faults"):
        assert all(same)
