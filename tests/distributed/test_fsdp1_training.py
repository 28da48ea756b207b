"""The training program under FSDP1: the data, metrics, memory report and checkpoints of any other run."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eco_dist.training import Summary, load_config, train
from eco_dist.training.metrics import read_metrics
from tests.distributed.ranks import run_ranks

STEPS = 6
TEXT = "".join(f"{i} green bottles hanging on the wall, and if one should fall\n" for i in range(300))


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "song.txt").write_text(TEXT)
    return [
        f"data.path={folder / 'song.txt'}",
        "model=nano",
        "data.seq_len=32",
        "data.batch=8",
        "optimizer.lr=5e-3",
        f"run.steps={STEPS}",
        "run.log_every=2",
        "run.eval_every=3",
        "run.plot=false",
    ]


def one_run(overrides: list[str], fault: str = "") -> Summary | str:
    """A run of this rank and its peers, or what stopped it."""
    os.environ["ECO_DIST_FAULT"] = fault
    try:
        return train(load_config(None, overrides))
    except (OSError, ValueError) as error:
        return str(error)
    finally:
        del os.environ["ECO_DIST_FAULT"]


@pytest.mark.parametrize(
    "options", [["recipe=fp8", "run.accumulate=2"], ["recipe=fp8-8bit", "engine.compute=bf16", "optimizer.clip=null"]]
)
def test_a_run_has_what_a_run_has(options: list[str], common: list[str], tmp_path: Path) -> None:
    """Loss falls as under FSDP2, predicted memory is measured on every rank, and every file is there."""
    losses = {}
    for engine in ("fsdp1", "fsdp2"):
        folder = tmp_path / engine
        summary, _ = run_ranks(2, one_run, [*common, f"engine={engine}", f"run.directory={folder}", *options])
        assert isinstance(summary, Summary), summary
        losses[engine] = [line["loss"] for line in read_metrics(folder)]
    lines = read_metrics(tmp_path / "fsdp1")
    assert losses["fsdp1"] == pytest.approx(losses["fsdp2"], abs=2e-2)
    assert losses["fsdp1"][-1] < losses["fsdp1"][0] - 0.3
    assert all(line["grad_norm"] > 0 and line["moved_share"] > 0 for line in lines)
    memory = json.loads((tmp_path / "fsdp1" / "memory.json").read_text())
    assert memory["measured"]["engine"] == "fsdp1"
    assert len(memory["measured"]["holdings"]) == len(memory["planned"]["holdings"])
    for one, other in zip(memory["measured"]["holdings"], memory["planned"]["holdings"], strict=True):
        assert one["by_category"] == other["by_category"]
    weights = load_file(tmp_path / "fsdp1" / "weights.safetensors")
    shapes = {name: weight.shape for name, weight in weights.items()}
    assert shapes == {n: w.shape for n, w in load_file(tmp_path / "fsdp2" / "weights.safetensors").items()}


def test_a_run_that_broke_off_goes_on(common: list[str], tmp_path: Path) -> None:
    """To the same end on as many ranks, and nearly so in one process."""
    options = [*common, "recipe=fp8", "run.save_every=2", "run.resume=true"]
    whole, _ = run_ranks(2, one_run, [*options, "engine=fsdp1", f"run.directory={tmp_path / 'whole'}"])
    broken = [*options, f"run.directory={tmp_path / 'broken'}"]
    assert "no space left" in run_ranks(2, one_run, [*broken, "engine=fsdp1"], "train:step-5:raise")[0]
    again, _ = run_ranks(2, one_run, [*broken, "engine=fsdp1"])
    assert again.val_loss == whole.val_loss
    first, second = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    shutil.copytree(tmp_path / "broken", tmp_path / "alone", ignore=shutil.ignore_patterns(f"step-{STEPS:08d}"))
    (alone,) = run_ranks(1, one_run, [*options, "engine=single", f"run.directory={tmp_path / 'alone'}"])
    assert isinstance(alone, Summary), alone
    assert alone.val_loss == pytest.approx(whole.val_loss, abs=0.02)


def test_mistakes_are_one_sentence(common: list[str], tmp_path: Path) -> None:
    fresh = [*common, "engine=fsdp1", f"run.directory={tmp_path}"]
    assert "expected a recipe with codes" in run_ranks(1, one_run, [*fresh, "recipe=fp32-master"])[0]
    assert "expected a preset without experts" in run_ranks(1, one_run, [*fresh, "model=smoe-tiny"])[0]
