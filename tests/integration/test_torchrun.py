"""The training program under the real launcher: two ranks of torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few files of real text: the package's own source."""
    folder = tmp_path_factory.mktemp("text")
    for file in sorted((ROOT / "eco_dist").rglob("*.py")):
        (folder / file.relative_to(ROOT).as_posix().replace("/", "_")).write_bytes(file.read_bytes())
    return folder


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command += ["-m", "eco_dist", "train", "--config", "configs/quickstart.yaml", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-8bit"])
def test_two_ranks_train_and_report(recipe: str, text: Path, tmp_path: Path) -> None:
    run = torchrun(
        f"recipe={recipe}",
        "model=nano",
        f"data.path={text}",
        "run.steps=12",
        "run.eval_sequences=16",
        f"run.directory={tmp_path}",
        "run.overwrite=true",
    )
    assert run.returncode == 0, run.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["measured_static_bytes"] == summary["planned_static_bytes"]
    assert len(summary["measured_static_bytes"]) == 2
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert "difference" in run.stdout


def test_a_mistake_gives_one_sentence(text: Path, tmp_path: Path) -> None:
    run = torchrun(f"data.path={text}", f"run.directory={tmp_path}", "run.stepz=12")
    assert run.returncode != 0
    sentences = [line for line in run.stderr.splitlines() if line.startswith("eco-dist:")]
    assert len(sentences) == 1
    assert "run.stepz" in sentences[0]
    assert "did you mean" in sentences[0]
