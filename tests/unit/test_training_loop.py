"""A whole run in one process on a tiny text: the loss falls, every file is there, one seed gives one run."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eco_dist.checkpoint.write import write_rank
from eco_dist.training import Summary, load_config, read_summary, train
from eco_dist.training.evaluate import chosen_windows
from eco_dist.training.metrics import StepMetrics, read_metrics
from eco_dist.training.resume import RunCheckpoints

STEPS = 30
TEXT = "".join(f"{i} green bottles hanging on the wall, and if one should fall\n" for i in range(300))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "song.txt"
    file.write_text(TEXT)
    return file


def run(directory: Path, text: Path, *overrides: str) -> Summary:
    common = [f"data.path={text}", f"run.directory={directory}", f"run.steps={STEPS}", "model=nano", "data.seq_len=32"]
    return train(load_config(None, [*common, "data.batch=8", "run.log_every=5", "optimizer.lr=5e-3", *overrides]))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    directory = tmp_path_factory.mktemp("run")
    run(directory, text, "run.eval_every=10")
    return directory


def test_the_loss_falls(finished: Path) -> None:
    lines = read_metrics(finished)
    assert lines[0]["loss"] > 5.0  # log(256) = 5.5 at the start
    assert lines[-1]["loss"] < 3.2
    assert lines[-1]["val_loss"] < 3.4


def test_lines_have_their_fields_and_steps(finished: Path) -> None:
    lines = read_metrics(finished)
    assert all(set(line) == {part.name for part in fields(StepMetrics)} for line in lines)
    assert [line["step"] for line in lines] == [1, 5, 10, 15, 20, 25, 30]
    assert [line["step"] for line in lines if line["val_loss"] is not None] == [10, 20, 30]
    assert all(0 < line["moved_share"] <= 1 and 0 < line["rms_quantization_error"] < 1 for line in lines)
    assert lines[0]["lr"] < max(line["lr"] for line in lines) > lines[-1]["lr"]


def test_every_file_is_there_and_agrees(finished: Path) -> None:
    summary = read_summary(finished)
    memory = json.loads((finished / "memory.json").read_text())
    assert {"planned", "measured"} <= set(memory)
    assert summary.planned_static_bytes == summary.measured_static_bytes
    assert summary.val_loss == read_metrics(finished)[-1]["val_loss"]
    assert (summary.steps, summary.world_size, summary.skipped_steps) == (STEPS, 1, 0)
    assert (finished / "loss.png").exists()
    assert (finished / "config.yaml").exists()
    weights = load_file(finished / "weights.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == summary.parameters
    assert all(weight.dtype == torch.float32 for weight in weights.values())


def test_the_resolved_configuration_repeats_the_run_exactly(finished: Path, tmp_path: Path) -> None:
    again = train(load_config(finished / "config.yaml", [f"run.directory={tmp_path}"]))
    assert again.loss == read_summary(finished).loss
    first, second = (load_file(directory / "weights.safetensors") for directory in (finished, tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_accumulation_changes_only_the_rounding_of_sums(tmp_path: Path, text: Path) -> None:
    options = ("recipe=fp32-master", "run.steps=5")
    whole = run(tmp_path / "whole", text, *options)
    parts = run(tmp_path / "parts", text, *options, "run.accumulate=4")
    assert parts.loss == pytest.approx(whole.loss, rel=1e-5)
    assert parts.val_loss == pytest.approx(whole.val_loss, rel=1e-5)


def test_fine_tuning_starts_where_the_run_before_ended(finished: Path, tmp_path: Path, text: Path) -> None:
    start = f"model.init_from={finished / 'weights.safetensors'}"
    tuned = run(tmp_path, text, start, "optimizer.lr=1e-6", "run.steps=2", "recipe=fp32-master")
    assert tuned.val_loss == pytest.approx(read_summary(finished).val_loss, abs=0.02)


@pytest.mark.parametrize(
    "options", [("engine.compute=bf16",), ("optimizer=sgd", "optimizer.lr=0.1"), ("recipe=fp8-8bit",)]
)
def test_other_ways_to_train(tmp_path: Path, text: Path, options: tuple[str, ...]) -> None:
    summary = run(tmp_path, text, *options, "run.steps=8", "run.plot=false", "model.activations=fp8")
    assert summary.loss < 5.6
    assert not (tmp_path / "loss.png").exists()


def test_a_directory_with_a_run_is_not_replaced_by_accident(finished: Path, text: Path) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"run\.overwrite=true"):
        run(finished, text)
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model=small", "shape"),
        ("data.tokenizer=bpe", "vocabulary"),
    ],
)
def test_weights_of_another_model_are_refused(
    finished: Path, tmp_path: Path, text: Path, override: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(tmp_path, text, f"model.init_from={finished / 'weights.safetensors'}", override, "data.vocabulary=300")


@pytest.mark.parametrize(("windows", "wanted", "count"), [(10, 4, 4), (3, 8, 3), (7, 7, 7)])
def test_validation_windows_are_distinct_and_spread(windows: int, wanted: int, count: int) -> None:
    chosen = chosen_windows(windows, wanted).tolist()
    assert len(set(chosen)) == count
    assert chosen == sorted(chosen)
    assert chosen[0] >= 0
    assert chosen[-1] < windows


def test_a_run_that_broke_off_goes_on_to_the_same_end(
    finished: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full before step 15, while step 12 is still being written; a second start takes that up."""
    options = ("run.eval_every=10", "run.save_every=6", "run.resume=true")
    monkeypatch.setenv("ECO_DIST_FAULT", "train:step-15:raise")
    module = sys.modules["eco_dist.checkpoint.save"]  # the package has a function of that name
    monkeypatch.setattr(module, "write_rank", lambda *args: (time.sleep(1), write_rank(*args))[1])
    with pytest.raises(OSError, match="no space left"):
        run(tmp_path, text, *options)
    monkeypatch.undo()
    summary = run(tmp_path, text, *options)
    assert summary.val_loss == read_summary(finished).val_loss
    expected, got = (load_file(folder / "weights.safetensors") for folder in (finished, tmp_path))
    assert all(torch.equal(expected[name], tensor) for name, tensor in got.items())
    lines = {line["step"]: line for line in read_metrics(tmp_path)}
    assert list(lines) == [1, 5, 10, 13, 15, 20, 25, 30]
    for line in read_metrics(finished):
        if line["step"] != 15:  # whose loss is the mean since the line before, which is another one here
            assert lines[line["step"]]["loss"] == line["loss"]


def test_a_run_that_broke_off_in_its_last_checkpoint_is_resumed(
    finished: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and summary are there by then, and come out the same again."""
    options = ("run.save_every=20", "run.resume=true")
    after = RunCheckpoints.after
    monkeypatch.setattr(RunCheckpoints, "after", lambda self, step: after(self, step) if step < STEPS else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, text, *options)
    monkeypatch.undo()
    assert (tmp_path / "weights.safetensors").exists()
    assert run(tmp_path, text, *options).val_loss == read_summary(finished).val_loss
    expected, got = (load_file(folder / "weights.safetensors") for folder in (finished, tmp_path))
    assert all(torch.equal(expected[name], tensor) for name, tensor in got.items())


def test_a_new_run_does_not_take_up_an_old_checkpoint(text: Path, tmp_path: Path) -> None:
    run(tmp_path, text, "run.save_every=30")
    assert (tmp_path / "checkpoints" / "LATEST").exists()
    run(tmp_path, text, "run.overwrite=true")
    assert not (tmp_path / "checkpoints").exists()
    with pytest.raises(ValueError, match=r"run\.resume=true to go on"):
        run(tmp_path, text)
