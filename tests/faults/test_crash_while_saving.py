"""A rank is killed at every point of a save: what is left is a whole checkpoint, the one before or the new one."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eco_dist.checkpoint import latest, load, save
from tests.distributed.models import train
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import contents, prepared

PHASES = ("begin", "mid-shard", "after-data", "after-manifest", "before-rename", "before-latest", "after-latest")
ON_FIRST_RANK = PHASES[3:]
"""What rank 0 alone does."""

CASES = [(phase, rank) for phase in PHASES for rank in (0, 1) if rank == 0 or phase not in ON_FIRST_RANK]


def save_twice(root: str, fault: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Save after steps 1 and 2; the second time the fault strikes. What was held each time."""
    model, optimizer = prepared("fp8-8bit", seed=0)
    train(model, optimizer, 1)
    first = contents(model, optimizer)
    save(root, model, optimizer, step=1)
    train(model, optimizer, 1, first=1)
    second = contents(model, optimizer)
    os.environ.update(ECO_DIST_FAULT=fault, RANK=str(torch.distributed.get_rank()))
    try:
        save(root, model, optimizer, step=2)
    finally:
        del os.environ["ECO_DIST_FAULT"], os.environ["RANK"]
    return first, second


def load_again(root: str) -> tuple[int, dict[str, Tensor], list[float]]:
    model, optimizer = prepared("fp8-8bit", seed=7)
    step = load(root, model, optimizer).step
    held = contents(model, optimizer)
    save(root, model, optimizer, step=step + 1)  # what the crash left must not be in the way
    return step, held, train(model, optimizer, 2, first=step)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return run_ranks(2, save_twice, str(tmp_path_factory.mktemp("whole")), "nowhere:kill")[0]


@pytest.mark.parametrize(("phase", "rank"), CASES)
def test_a_kill_at_every_point(phase: str, rank: int, whole, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):  # the ranks are lost
        run_ranks(2, save_twice, str(tmp_path), f"save:{phase}:kill:{rank}")
    step, held, _ = run_ranks(2, load_again, str(tmp_path))[0]
    assert step == (2 if phase == "after-latest" else 1)  # until LATEST names the new one, the one before counts
    expected = whole[step - 1]
    assert held.keys() == expected.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())
    assert not list(tmp_path.glob("*.tmp"))


def test_a_lost_pointer_is_no_loss(whole, tmp_path: Path) -> None:
    """Without LATEST, or with one that names what is gone, the newest whole checkpoint is taken."""
    run_ranks(2, save_twice, str(tmp_path), "nowhere:kill")
    (tmp_path / "LATEST").unlink()
    assert latest(tmp_path) == tmp_path / "step-00000002"
    (tmp_path / "LATEST").write_text("step-00000009\n")
    assert latest(tmp_path) == tmp_path / "step-00000002"
    shutil.rmtree(tmp_path / "step-00000002")
    assert latest(tmp_path) == tmp_path / "step-00000001"
