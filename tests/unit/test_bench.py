"""The bench compares within rounds and covers what it says; its times are never tested."""

import itertools
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eco_dist.bench import cold, end_to_end, peers, scaling, step
from eco_dist.bench.rounds import Case, compare
from eco_dist.optim.kernels import kernel_for


def test_ratios_are_taken_within_a_round() -> None:
    """A machine that slows down from round to round does not change them: B takes three times as long as A."""
    now = itertools.count()
    clock_value = [0.0]
    pace = [1.0]

    def clock() -> float:
        next(now)
        return clock_value[0]

    def take(units: float) -> None:
        clock_value[0] += units * pace[0]
        pace[0] *= 1.1

    cases = [Case(name="a", action=lambda: take(1.0)), Case(name="b", action=lambda: take(3.0 / 1.1))]
    timings = compare(cases, rounds=5, warmup=1, clock=clock)
    assert [timing.name for timing in timings] == ["a", "b"]
    assert timings[0].ratio == 1.0
    assert timings[1].ratio == pytest.approx(3.0)
    assert timings[1].low == pytest.approx(timings[1].high)


def test_every_case_runs_and_is_in_the_table() -> None:
    timings = step.run(elements=4096, rounds=3)
    names = [timing.name for timing in timings]
    assert names[0] == step.BASELINE
    for recipe in step.RECIPES:
        assert f"{recipe}, fp32 gradients" in names
        assert f"{recipe}, bf16 gradients" in names
    assert step.table(timings, elements=4096).row_count == len(timings)


@pytest.mark.parametrize(
    ("options", "sentence"), [({"elements": 100}, "multiple of 4096"), ({"rounds": 2}, "3 rounds")]
)
def test_impossible_requests(options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        step.run(**{"elements": 4096, "rounds": 3} | options)


def test_the_mock_touches_every_byte_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All codes and moments change, for both dtypes of gradients; there is none for the plain torch step."""
    monkeypatch.setenv("ECO_DIST_KERNEL", "cpu")
    kernel = kernel_for(torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        task = step._task("fp8", (2, 4096), torch.ones(2, 4096, dtype=dtype))
        task.grad = (torch.arange(8192).view(2, 4096) * 2 + 1).to(torch.int32).view(torch.float32)
        if dtype is torch.bfloat16:
            task.grad = torch.full((2, 4096), 0x0101, dtype=torch.int16).view(torch.bfloat16)
        codes = task.shard.codes.clone()
        kernel.touch(task)
        assert bool((task.shard.codes != codes).all())
        assert all(bool((task.shard.state[key] == 1).all()) for key in ("exp_avg", "exp_avg_sq"))
    monkeypatch.setenv("ECO_DIST_KERNEL", "reference")
    assert step._touch((1, 4096), torch.ones(1, 4096)) is None


def test_a_peer_that_does_not_run_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = peers._from("torch.optim", "AdamW")
    monkeypatch.setattr(peers, "_PEERS", {"absent": peers._from("no_such_package", "AdamW"), "torch's": there})
    with caplog.at_level(logging.WARNING):
        cases = peers.installed_cases((2, 8), torch.ones(2, 8))
    assert [case.name for case in cases] == ["torch's"]
    assert "no_such_package" in caplog.text


def test_training_steps_of_every_recipe() -> None:
    timings = end_to_end.run(preset="nano", batch=1, seq_len=16, rounds=3)
    assert [timing.name for timing in timings] == list(end_to_end.RECIPES)
    assert end_to_end.table(timings).row_count == len(end_to_end.RECIPES)


def test_scaling_draws_a_picture(tmp_path: Path) -> None:
    points = scaling.run(rounds=3, elements=(4096, 8192), threads=(1,))
    assert scaling.table(points).row_count == 2
    scaling.plot(points, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_the_first_step_of_a_fresh_process() -> None:
    """The script that is timed runs and prints its seconds."""
    script = cold.SCRIPTS["first step of 1024 x 1024, kernel built before"]
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(run.stdout) > 0
    starts = [cold.Start(name=name, median=1.0, least=0.5, most=2.0) for name in cold.SCRIPTS]
    assert cold.table(starts).row_count == len(cold.SCRIPTS)
