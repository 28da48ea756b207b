"""A changing learning rate and the injected error: `paper` fails at a restart, `auto` and `displacement` do not.

The toy is noisy least squares, y = W* x, with E4M3 weights: theta-hat is never W*, so an error is always pending.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from eco_dist.optim import ECOAdamW
from eco_dist.optim.rules import LR_JUMP, Hyper, Schedule
from eco_dist.recipe import Injection, Recipe
from eco_dist.weights import QuantizedWeight

ROWS, COLUMNS, BATCH = 16, 128, 64
PEAK = 1e-2

EXPLODES = 100.0
"""Loss after a restart over that of master weights: `paper` is at least this far off."""

SURVIVES = 3.0
"""Loss over that of master weights, at most, for injections that survive."""


class Toy:
    """A weight, its optimizer, and noisy gradients of ||(W - W*) x||^2."""

    def __init__(self, recipe: Recipe, start: float = 0.0) -> None:
        """The weight starts at `start` times the target."""
        generator = torch.Generator().manual_seed(0)
        self.target = torch.randn(ROWS, COLUMNS, generator=generator) / 8
        self.weight = nn.Parameter(QuantizedWeight.from_values(start * self.target, recipe))
        self.optimizer = ECOAdamW([self.weight], lr=PEAK)
        self.step = 0

    def run(self, rates: Iterable[float]) -> list[float]:
        """Excess loss ||theta-hat - W*||^2 / rows after each step."""
        losses = []
        for lr in rates:
            generator = torch.Generator().manual_seed(self.step)
            x = torch.randn(BATCH, COLUMNS, generator=generator)
            noise = 0.1 * torch.randn(BATCH, ROWS, generator=generator)
            self.weight.grad = ((x @ (self.weight.decode() - self.target).T + noise).T @ x) / BATCH
            self.optimizer.param_groups[0]["lr"] = lr
            self.optimizer.step()
            self.step += 1
            losses.append(float((self.weight.decode() - self.target).square().sum()) / ROWS)
        return losses

    @property
    def largest_momentum(self) -> float:
        return float(self.optimizer.state[self.weight]["exp_avg"].abs().max())


def recipe_of(name: str, **changes: str) -> Recipe:
    """`master`, or compensation momentum with this injection."""
    base = Recipe().replace(**changes)
    return base.replace(compensation="master") if name == "master" else base.replace(injection=name)


COSINE_TO_ZERO = [PEAK * (1e-5 + 0.5 * (1 + math.cos(math.pi * step / 299))) for step in range(300)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    end_of_cosine: float
    after_restart: float
    largest_momentum: float


def restart(name: str, **changes: str) -> Outcome:
    """A cosine to nearly zero, then 20 steps at the peak rate: the worst loss of those."""
    toy = Toy(recipe_of(name, **changes))
    end = toy.run(COSINE_TO_ZERO)[-1]
    momentum = toy.largest_momentum
    return Outcome(end_of_cosine=end, largest_momentum=momentum, after_restart=max(toy.run([PEAK] * 20)))


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return {name: restart(name) for name in ("master", "paper", "auto", "displacement")}


def test_all_injections_end_the_cosine_alike(outcomes: dict[str, Outcome]) -> None:
    """The damage of `paper` is invisible until the learning rate rises again."""
    for name in ("paper", "auto", "displacement"):
        assert outcomes[name].end_of_cosine < SURVIVES * outcomes["master"].end_of_cosine


def test_the_paper_form_ends_the_cosine_with_a_huge_momentum(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["paper"].largest_momentum > 100 * outcomes["master"].largest_momentum
    assert outcomes["auto"].largest_momentum < 20 * outcomes["master"].largest_momentum


def test_the_paper_form_explodes_at_a_restart(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["paper"].after_restart > EXPLODES * outcomes["master"].after_restart


@pytest.mark.parametrize("name", ["auto", "displacement"])
def test_our_forms_survive_a_restart(outcomes: dict[str, Outcome], name: str) -> None:
    assert outcomes[name].after_restart < SURVIVES * outcomes["master"].after_restart
    assert outcomes["paper"].after_restart > EXPLODES * outcomes[name].after_restart


@pytest.mark.parametrize(("name", "moments"), [("auto", "bf16"), ("auto", "dynamic8"), ("displacement", "fp8")])
def test_they_survive_with_small_moments_too(outcomes: dict[str, Outcome], moments: str, name: str) -> None:
    assert restart(name, moments=moments).after_restart < SURVIVES * outcomes["master"].after_restart


@pytest.mark.parametrize("name", ["auto", "displacement"])
def test_they_survive_a_learning_rate_fifty_times_larger(name: str) -> None:
    """A step up from a converged state, without any decay before it: only the rescale helps `auto` here."""

    def worst(which: str) -> float:
        toy = Toy(recipe_of(which), start=1.0)
        toy.run([PEAK / 50] * 100)
        return max(toy.run([PEAK] * 20))

    assert worst(name) < SURVIVES * worst("master")
    assert worst("paper") > 8 * worst(name)


def rescales(rates: Iterable[float], injection: Injection = Injection.AUTO) -> list[float]:
    """momentum_rescale at each step of a schedule, zero rates skipped as the optimizer skips them."""
    schedule, result = Schedule(), []
    for lr in rates:
        if lr == 0:
            continue
        result.append(Hyper(lr=lr, beta1=0.9, injection=injection, schedule=schedule).momentum_rescale)
        schedule = schedule.advance(lr)
    return result


@pytest.mark.parametrize(
    "rates",
    [
        [PEAK * step / 100 for step in range(101)],
        [PEAK * step / 5 for step in range(6)],
        [PEAK * (0.01 + 0.99 * step / 100) for step in range(101)],
        [PEAK * 1.2**step for step in range(50)],
        COSINE_TO_ZERO,
    ],
    ids=["warmup from 0", "warmup in 5 steps", "warmup from 1 %", "exponential", "cosine"],
)
def test_a_warmup_costs_nothing(rates: list[float]) -> None:
    """No step of an ordinary schedule rescales the momentum."""
    assert set(rescales(rates)) == {1.0}


def test_a_jump_rescales_once_by_the_ratio_of_the_divisors() -> None:
    """The divisor is max(lr, 10 % of the largest seen): a restart counts from the floor, not from the tiny rate."""
    assert rescales([1e-4, 1e-2, 1e-2]) == [1.0, pytest.approx(1e-2), 1.0]
    assert rescales([1e-2, 1e-8, 1e-2, 1e-2]) == [1.0, 1.0, pytest.approx(0.1), 1.0]
    assert rescales([1e-2, 1e-8, 0.0, 1e-2]) == [1.0, 1.0, pytest.approx(0.1)]
    assert rescales([1e-3, 1e-3 * LR_JUMP * 1.01]) == [1.0, pytest.approx(1 / (LR_JUMP * 1.01))]
    assert rescales([1e-3, 1e-3 * LR_JUMP * 0.99]) == [1.0, 1.0]


@pytest.mark.parametrize("injection", [Injection.PAPER, Injection.DISPLACEMENT])
def test_other_injections_never_rescale_and_divide_by_the_rate_itself(injection: Injection) -> None:
    assert set(rescales([1e-4, 1e-2, 1e-8, 1e-2], injection)) == {1.0}
    hyper = Hyper(lr=1e-8, beta1=0.9, injection=injection, schedule=Schedule(peak=1.0, last=1.0))
    assert hyper.injection_lr == 1e-8


def test_the_learning_rates_seen_survive_in_the_state() -> None:
    """peak and last are per parameter and saved: a resumed run knows what it divided by."""
    toy = Toy(recipe_of("auto"))
    toy.run([1e-3, 5e-3, 2e-3, 0.0])
    state = toy.optimizer.state[toy.weight]
    assert float(state["lr_peak"]) == pytest.approx(5e-3)
    assert float(state["lr_last"]) == pytest.approx(2e-3)
