"""The command line as a user meets it: exit codes, one sentence on stderr, nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eco_dist import cli

ROOT = Path(__file__).parents[2]


def eco_dist(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``python -m eco_dist`` as a process of its own."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, "-m", "eco_dist", *arguments],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
        check=False,
    )


def assert_one_sentence(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("eco-dist: ")
    for part in ("expect", *parts):
        assert part in lines[0]


def test_an_unknown_key_as_a_process() -> None:
    assert_one_sentence(eco_dist("train", "run.stepps=3"), "'run.stepps'", "'run.steps'")


def test_a_user_error_is_silent_on_other_ranks_and_has_the_same_exit_code() -> None:
    done = eco_dist("train", "run.stepps=3", RANK="1", WORLD_SIZE="2")
    assert (done.returncode, done.stderr, done.stdout) == (2, "", "")


def test_a_small_run_as_a_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {i}\n" for i in range(2000)))
    overrides = ["model=nano", "data.seq_len=16", "data.batch=4", "run.steps=3", f"run.directory={tmp_path / 'run'}"]
    done = eco_dist("train", f"data.path={tmp_path / 'text.txt'}", *overrides)
    assert done.returncode == 0, done.stderr
    assert "step 3/3" in done.stdout
    assert cli.main(["compare", str(tmp_path / "run"), "--plot", str(tmp_path / "loss.png")]) == 0
    assert "fp8" in capsys.readouterr().out
    assert (tmp_path / "loss.png").exists()


WEIGHTS = "model.init_from=nowhere.safetensors"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "--config", "nowhere.yaml"], ["nowhere.yaml"]),
        (["train", "recipe=fp9"], ["'fp9'"]),
        (["train", "recipe.format=bf16"], ["granularity"]),
        (["train", "model=tinny"], ["'tinny'", "'tiny'"]),
        (["train", "data.path=nowhere"], ["data.path=nowhere"]),
        (["train", "data.tokenizer=nowhere.json"], ["nowhere.json"]),
        (["train", "engine.ranks=2"], ["2 ranks", "torchrun", "engine.ranks=1"]),
        (["train", "run.steps=x"], ["run.steps", "'x'"]),
        (["train", "data.batch=9000000"], ["data.batch", "windows"]),
        (["train", WEIGHTS], ["nowhere.safetensors"]),
        (["compare", "nowhere"], ["nowhere"]),
    ],
)
def test_user_errors_are_one_sentence(
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if arguments[0] == "train" and not any(argument.startswith("data.path") for argument in arguments):
        Path("text.txt").write_text("some text\n" * 1000)
        arguments = [*arguments, "data.path=text.txt"]
    code = cli.main(arguments)
    error = capsys.readouterr().err
    assert_one_sentence(subprocess.CompletedProcess(arguments, code, "", error), *parts)


def test_one_process_cannot_be_several_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["train"]) == 2
    assert "engine.name=fsdp2" in capsys.readouterr().err


def test_a_defect_of_the_program_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.Recipes, "run", lambda self: int("no number"))
    with pytest.raises(ValueError, match="invalid literal"):
        cli.main(["recipes"])


def test_recipes_are_listed_with_their_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["recipes"]) == 0
    shown = capsys.readouterr().out
    for part in ("fp8-8bit", "fp32-master", "9.03", "B/param"):
        assert part in shown


def test_a_wrong_command_exits_with_2() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["trian"])
    assert caught.value.code == 2
