"""The injection study: what its scenarios do, and that it runs, remembers what is done, and draws."""

import dataclasses
from pathlib import Path

import pytest

from eco_dist.experiments import finetune, injection, injection_figures
from eco_dist.experiments.injection import Course, Result
from eco_dist.experiments.scenarios import ARMS, BASELINE, SCENARIOS, arms_of

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}


def test_learning_rates_do_what_the_stories_say() -> None:
    restart = BY_NAME["lr-restart"]
    assert restart.lr(199) < 1e-6 < 9e-4 < restart.lr(200)
    assert BY_NAME["warmup-from-0"].lr(0) == 0.0
    assert BY_NAME["warmup-from-0"].lr(2) == 2 * BY_NAME["warmup-from-0"].lr(1)
    assert BY_NAME["lr-x50"].lr(200) == 50 * BY_NAME["lr-x50"].lr(199)
    assert all(scenario.lr(step) >= 0 for scenario in SCENARIOS for step in range(scenario.steps))


def test_every_scenario_has_its_baseline_and_distinct_recipes() -> None:
    for scenario in SCENARIOS:
        arms = arms_of(scenario)
        assert set(ARMS) <= set(arms)
        assert len(set(arms.values())) == len(arms)
        assert scenario.event is None or scenario.event < scenario.steps


def course(loss: float, spike: float = 0.0) -> Course:
    losses = [1.0] * 210 + [1.0 + spike] * 10 + [1.0] * 400
    return Course(losses=losses, val_loss=loss, largest_momentum=0.1)


def test_gaps_spikes_and_pictures(tmp_path: Path) -> None:
    courses = {
        name: {BASELINE: [course(1.0), course(2.0)], "paper": [course(1.5, 3.0), course(2.25, 1.0)]}
        for name in ("finetune-1e-3", "lr-restart")
    }
    result = Result(seeds=(0, 1), courses=courses)
    assert result.gaps("lr-restart", "paper") == [0.5, 0.25]
    assert result.spikes(BY_NAME["lr-restart"], "paper") == pytest.approx([3.0, 1.0])
    assert result.spikes(BY_NAME["finetune-1e-3"], "paper") is None
    assert result.table().row_count == 4
    files = injection_figures.draw(result, tmp_path)
    assert [file.name for file in files] == ["injection-lr-restart.png", "injection-gaps.png"]
    assert all(file.stat().st_size > 10_000 for file in files)


def test_a_small_study_runs_and_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resets, idle rows, 8-bit moments; the second call reads what the first has written."""
    small = dataclasses.replace(finetune.Settings(), pretrain_steps=2, batch=4, seq_len=16, eval_sequences=4)
    monkeypatch.setattr(finetune, "Settings", lambda: small)
    scenario = dataclasses.replace(BY_NAME["lr-restart"], steps=4, reset_at=2, idle=(1, 3), event=None, broad=False)
    first = injection.run(tmp_path, seeds=(0,), scenarios=[scenario], eval_windows=4)
    arms = first.courses["lr-restart"]
    assert set(arms) == set(arms_of(scenario))
    assert all(len(courses[0].losses) == 4 for courses in arms.values())
    assert arms["auto, 8 bit"][0].largest_momentum is None
    assert arms["auto"][0].largest_momentum is not None
    monkeypatch.setattr(injection, "_course", lambda *_, **__: pytest.fail("repeated"))
    assert injection.run(tmp_path, seeds=(0,), scenarios=[scenario], eval_windows=4).courses == first.courses
