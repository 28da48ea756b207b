"""The bench compares within rounds and covers what it says; its times are never tested."""

import itertools

import pytest

from eco_dist.bench import step
from eco_dist.bench.rounds import Case, compare


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
