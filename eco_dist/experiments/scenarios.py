"""What training does to a momentum that carries rounding errors: the schedules and events of the injection study.

Injected at learning rate eta, an error is paid back as beta1^k eta_k m over the next steps. Whatever changes the step
size between the two pays back the wrong amount, so every scenario changes it in its own way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from eco_dist.recipe import Recipe
from eco_dist.training.schedule import warmup_cosine_factor

LearningRate = Callable[[int], float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A course of training.

    Attributes:
        name: for files and tables.
        story: what happens, in a few words.
        steps: optimizer steps.
        lr: learning rate of step 0, 1, ....
        betas: of AdamW.
        fresh: starts from random weights, not from trained ones.
        reset_at: step before which the optimizer is thrown away and made anew.
        idle: steps [first, end) in which every other row of each block matrix gets a zero gradient.
        event: step from which the training loss is watched; None if nothing happens.
        broad: whether nearest rounding is tried too.
        eight_bit: whether 8-bit moments are tried too.
    """

    name: str
    story: str
    steps: int
    lr: LearningRate
    betas: tuple[float, float] = (0.9, 0.95)
    fresh: bool = False
    reset_at: int | None = None
    idle: tuple[int, int] | None = None
    event: int | None = None
    broad: bool = False
    eight_bit: bool = False


def _cosine(peak: float, steps: int, *, warmup: float = 0.1) -> LearningRate:
    factor = warmup_cosine_factor(steps, warmup=warmup, final=0.0)
    return lambda step: peak * factor(step)


def _twice(peak: float, steps: int) -> LearningRate:
    """A cosine to zero, then the same from its peak again, without warmup."""
    first, second = _cosine(peak, steps), _cosine(peak, steps, warmup=0.0)
    return lambda step: first(step) if step < steps else second(step - steps)


SCENARIOS = (
    Scenario(
        name="finetune-1e-3",
        story="warmup, cosine to 0, peak 1e-3",
        steps=600,
        lr=_cosine(1e-3, 600),
        broad=True,
        eight_bit=True,
    ),
    Scenario(
        name="finetune-3e-4",
        story="warmup, cosine to 0, peak 3e-4",
        steps=600,
        lr=_cosine(3e-4, 600),
        eight_bit=True,
    ),
    Scenario(
        name="scratch",
        story="random weights, peak 3e-3",
        steps=800,
        lr=_cosine(3e-3, 800),
        fresh=True,
        broad=True,
    ),
    Scenario(
        name="warmup-from-0",
        story="200 steps of linear warmup from lr = 0",
        steps=400,
        lr=lambda step: 1e-3 * min(1.0, step / 200),
    ),
    Scenario(
        name="optimizer-restart",
        story="cosine to 0, optimizer thrown away, peak again",
        steps=400,
        lr=_twice(1e-3, 200),
        reset_at=200,
        event=200,
    ),
    Scenario(
        name="lr-restart",
        story="cosine to 0, then peak again",
        steps=400,
        lr=_twice(1e-3, 200),
        event=200,
        broad=True,
        eight_bit=True,
    ),
    Scenario(
        name="lr-x50",
        story="2e-5, from step 200 on 1e-3",
        steps=400,
        lr=lambda step: 2e-5 if step < 200 else 1e-3,
        event=200,
    ),
    Scenario(
        name="idle-rows",
        story="every other row without gradient for 100 steps",
        steps=400,
        lr=_cosine(1e-3, 400),
        idle=(100, 200),
        event=200,
        broad=True,
    ),
    Scenario(
        name="beta1-0.99",
        story="beta1 = 0.99",
        steps=600,
        lr=_cosine(1e-3, 600),
        betas=(0.99, 0.95),
        eight_bit=True,
    ),
    Scenario(
        name="beta2-0.999",
        story="beta2 = 0.999",
        steps=600,
        lr=_cosine(1e-3, 600),
        betas=(0.9, 0.999),
    ),
)

BASELINE = "master"
_FP8 = Recipe.from_name("fp8")
_NEAREST = _FP8.replace(rounding="nearest")

ARMS = {
    BASELINE: Recipe.from_name("fp8-master"),
    "paper": _FP8.replace(injection="paper"),
    "auto": _FP8,
    "displacement": _FP8.replace(injection="displacement"),
}
"""What is compared: FP8 master weights, and the injections under stochastic rounding."""

NEAREST_ARMS = {
    "paper, nearest": _NEAREST.replace(injection="paper"),
    "auto, nearest": _NEAREST,
    "auto, nearest, idle skipped": _NEAREST.replace(idle="skip"),
    "displacement, nearest": _NEAREST.replace(injection="displacement"),
}
EIGHT_BIT_ARMS = {
    "auto, 8 bit": _FP8.replace(moments="fp8"),
    "displacement, 8 bit": _FP8.replace(moments="fp8", injection="displacement"),
}


def arms_of(scenario: Scenario) -> dict[str, Recipe]:
    """What is compared in a scenario. Where nothing is idle, skipping what is idle changes nothing and is not tried."""
    arms = dict(ARMS)
    if scenario.broad:
        arms |= {name: recipe for name, recipe in NEAREST_ARMS.items() if scenario.idle or "idle" not in name}
    if scenario.eight_bit:
        arms |= EIGHT_BIT_ARMS
    return arms
