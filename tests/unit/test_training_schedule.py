"""The learning rate schedule."""

from __future__ import annotations

import pytest
import torch

from eco_dist.training.schedule import warmup_cosine, warmup_cosine_factor


def test_values_at_the_corners() -> None:
    factor = warmup_cosine_factor(100, warmup=0.1, warmup_start=0.01, final=0.1)
    assert factor(0) == pytest.approx(0.01)
    assert factor(5) == pytest.approx(0.01 + 0.99 * 0.5)
    assert factor(10) == 1.0
    assert factor(55) == pytest.approx(0.55)
    assert factor(100) == pytest.approx(0.1)
    assert factor(1000) == pytest.approx(0.1)


def test_it_rises_and_then_falls() -> None:
    values = [warmup_cosine_factor(200, warmup=0.25)(step) for step in range(200)]
    assert values[:51] == sorted(values[:51])
    assert values[50:] == sorted(values[50:], reverse=True)


def test_a_cosine_to_zero_wastes_no_step() -> None:
    assert min(warmup_cosine_factor(50, final=0.0, warmup_start=0.1)(step) for step in range(50)) > 0


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_very_short_runs(steps: int) -> None:
    for warmup in (0.0, 0.5, 1.0):
        assert all(0 < warmup_cosine_factor(steps, warmup=warmup)(step) <= 1 for step in range(steps))


def test_it_drives_an_optimizer() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = warmup_cosine(optimizer, 10, warmup=0.2, warmup_start=0.5)
    seen = []
    for _ in range(3):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx([1.0, 1.5, 2.0])


@pytest.mark.parametrize("wrong", [{"warmup": 1.5}, {"final": -0.1}, {"steps": 0}])
def test_impossible_schedules_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        warmup_cosine_factor(**{"steps": 10, **wrong})  # type: ignore[arg-type]
