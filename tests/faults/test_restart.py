"""kill -9 of a worker in the middle of a run: the launcher starts it again, and it ends with the same weights."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.integration.test_launchers import ROOT, command_of, dry_run, settings

STEPS = ("run.steps=9", "run.save_every=3", "run.resume=true", "recipe=fp8-8bit")


def launch(directory: Path, *more: str, restarts: int = 0, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", *_module(command_of(dry_run("torchrun.sh", *settings(directory, *STEPS, *more))))]
    command.insert(3, f"--max-restarts={restarts}")
    variables = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=280, check=False)


def _module(command: list[str]) -> list[str]:
    assert command[0] == "torchrun"
    return ["torch.distributed.run", *(word.replace("per-node=1", "per-node=2") for word in command[1:])]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    run = launch(directory)
    assert run.returncode == 0, run.stderr
    return directory


@pytest.mark.parametrize("fault", ["train:step-5:kill:1", "save:mid-shard:kill:0", "train:step-8:term:0"])
def test_a_restarted_run_ends_with_the_same_weights(fault: str, undisturbed: Path, tmp_path: Path) -> None:
    once = {"ECO_DIST_FAULT": fault, "ECO_DIST_FAULT_ONCE": str(tmp_path / "struck")}
    run = launch(tmp_path / "run", restarts=1, **once)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "struck").exists()
    expected, got = (load_file(folder / "weights.safetensors") for folder in (undisturbed, tmp_path / "run"))
    assert expected.keys() == got.keys()
    assert all(bool((expected[name] == tensor).all()) for name, tensor in got.items())


def test_more_steps_go_on_where_a_run_has_ended(undisturbed: Path, tmp_path: Path) -> None:
    """Asked again for what is done, it says so."""
    run = launch(undisturbed)
    assert run.returncode != 0
    assert "expected run.steps > 9" in run.stderr
