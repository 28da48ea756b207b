"""Writes that the system refuses, and two saves at once: the checkpoint before stays, and all ranks are told."""

import os
import resource
import signal
import threading
from pathlib import Path

import pytest
import torch

from eco_dist import ECOAdamW, quantize_weights_
from eco_dist.checkpoint import AsyncSaver, CheckpointError, faults, latest, load, save
from tests.distributed.models import build, train
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import contents, prepared


def meet_the_limit(root: str, limited: int) -> tuple[str, bool, float]:
    """No file of one rank may grow beyond 4 KiB, as on a disk that is full in the middle of a file."""
    model, optimizer = prepared("fp8", seed=0)
    train(model, optimizer, 1)
    before = contents(model, optimizer)
    save(root, model, optimizer, step=1)
    train(model, optimizer, 1, first=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if torch.distributed.get_rank() == limited:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        save(root, model, optimizer, step=2)
        said = "saved"
    except CheckpointError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    losses = train(model, optimizer, 1, first=2)
    load(root, model, optimizer)
    after = contents(model, optimizer)
    whole = all(torch.equal(after[name], value) for name, value in before.items())
    save(root, model, optimizer, step=3)
    return said, whole, losses[0]


@pytest.mark.parametrize("limited", [0, 1])
def test_a_file_that_cannot_grow(limited: int, tmp_path: Path) -> None:
    for said, whole, loss in run_ranks(2, meet_the_limit, str(tmp_path), limited):
        assert said.startswith(f"rank {limited}: ")
        assert "File too large" in said
        assert whole
        assert loss > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-00000001", "step-00000003"]


def test_two_saves_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save while another is under way in the background: one of them is told, the other is whole."""
    model = build()
    quantize_weights_(model, "fp8")
    optimizer = ECOAdamW(model.parameters(), lr=3e-3)
    reached, released = threading.Event(), threading.Event()
    background = threading.current_thread()

    def point(name: str) -> None:
        if name == "save:mid-shard" and threading.current_thread() is not background:
            reached.set()
            assert released.wait(60)

    monkeypatch.setattr(faults, "point", point)
    saver = AsyncSaver(tmp_path)
    saver.save(model, optimizer, step=1)
    assert reached.wait(60)
    train(model, optimizer, 1)
    expected = contents(model, optimizer)
    folder = save(tmp_path, model, optimizer, step=2)
    released.set()
    with pytest.raises(CheckpointError):
        saver.wait()
    assert latest(tmp_path) == folder
    train(model, optimizer, 1, first=1)
    load(tmp_path, model, optimizer)
    got = contents(model, optimizer)
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
