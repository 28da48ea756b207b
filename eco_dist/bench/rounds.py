"""Timing several ways of doing one thing: in turn, round after round, compared within the round."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One contender.

    Attributes:
        name: what it is.
        action: does the thing once, on data of its own.
        bytes: bytes it must read and write, for the bandwidth column; 0 if that means nothing.
    """

    name: str
    action: Callable[[], object]
    bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timing:
    """Result of a case.

    Attributes:
        name: the case.
        ratio: median over rounds of its time divided by the baseline's in the same round.
        low, high: quartiles of that ratio.
        bytes: as in `Case`.
    """

    name: str
    ratio: float
    low: float
    high: float
    bytes: int


def compare(cases: Sequence[Case], *, rounds: int, warmup: int = 2, clock: Clock = time.perf_counter) -> list[Timing]:
    """Time cases in turn; the first one is the baseline.

    A machine that slows down slows a whole round down, so ratios within a round stay right.

    Raises:
        ValueError: for fewer than three rounds, which have no quartiles.
    """
    if rounds < 3:
        raise ValueError(f"expected at least 3 rounds, got {rounds}")
    for _ in range(warmup):
        for case in cases:
            case.action()
    seconds: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            started = clock()
            case.action()
            seconds[case.name].append(clock() - started)
    baseline = seconds[cases[0].name]
    timings = []
    for case in cases:
        ratios = [own / base for own, base in zip(seconds[case.name], baseline, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        timings.append(Timing(name=case.name, ratio=middle, low=low, high=high, bytes=case.bytes))
    return timings
