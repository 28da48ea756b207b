"""A rank dies or hangs in a step: the others name it within the time limit, and the last checkpoint is whole."""

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
from eco_dist.training.heartbeat import LostRanksError, naming_lost_ranks
from eco_dist.training.preflight import RankFacts
from eco_dist.training.ranks import Ranks
from tests.distributed.models import batch, build, loss_of, train
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import contents, prepared

TIMEOUT_SECONDS = 4.0
SLACK_SECONDS = 5.0
"""Named within a second of the time limit on a quiet machine; a busy one may be late."""
EVERYONE = [RankFacts(host="host", node=0, local_world_size=2, versions={}, config="")] * 2


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
    store = dist.distributed_c10d._get_default_store()
    lags = action == "lag" and dist.get_rank() == 1
    os.environ.update(ECO_DIST_FAULT="" if action == "lag" else f"step:backward:{action}:1", RANK=str(dist.get_rank()))
    model.blocks[0].register_full_backward_hook(
        lambda *_: store.wait(["told"]) if lags else faults.point("step:backward")
    )
    started = time.monotonic()
    try:
        ranks = Ranks(rank=dist.get_rank(), world_size=2, device=torch.device("cpu"))
        with naming_lost_ranks(ranks, EVERYONE, TIMEOUT_SECONDS):
            loss_of(model, batch(2)).backward()
            optimizer.step()
    except LostRanksError as error:
        told = {"seconds": time.monotonic() - started, "said": str(error), "speaks": error.speaks}
        Path(root, "told.json").write_text(json.dumps(told))
    finally:
        del os.environ["ECO_DIST_FAULT"], os.environ["RANK"]
        os.kill(pids[1], signal.SIGKILL)  # a worker that has stopped or waits, which this test started


def resume(root: str) -> list[bool]:
    model, optimizer = prepared("fp8-8bit", seed=7)
    load(root, model, optimizer)
    expected = torch.load(f"{root}/expected-{dist.get_rank()}")
    return [torch.equal(value, expected[name]) for name, value in contents(model, optimizer).items()]


@pytest.mark.parametrize("action", ["kill", "stop", "lag"])
def test_the_others_name_it(action: str, tmp_path: Path) -> None:
    """It is killed; it is stopped; or it lives, but does not come to the collective that the others wait in."""
    with pytest.raises(AssertionError, match="rank 1"):
        run_ranks(2, lose_a_rank, action, str(tmp_path), pool="faults")
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["seconds"] < TIMEOUT_SECONDS + SLACK_SECONDS
    assert told["said"].startswith("expected all ranks to stay until the end, lost rank 1 (node 0, host)")
    assert told["speaks"]
    assert ("imed out" in told["said"]) == (action != "kill")
    for same in run_ranks(2, resume, str(tmp_path), pool="faults"):
        assert all(same)
