"""One step of a quantized weight against algorithms 2 and 3 in float64: the injection is applied exactly once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from eco_dist.numerics import MomentFormat, encode_moment
from eco_dist.optim import ECOSGD, ECOAdamW, Shard
from eco_dist.optim.rules import Hyper, Rule
from eco_dist.optim.step import Task
from eco_dist.optim.step import step as step_shard
from eco_dist.recipe import RECIPES, Recipe
from eco_dist.weights import QuantizedWeight
from tests.reference import grids, updates

LR, BETA1, BETA2, EPS, DECAY = 2.0**-6, 0.9, 0.95, 1e-8, 0.1

AGREES = 2e-5
"""Of the largest |m|: fp32 rounding of theta-tilde (6e-8 of a weight) times the gain's d / lr."""

MUTANT = 20 * AGREES
"""What every wrong injection differs by at least."""

ECO_RECIPES = {
    "fp8": Recipe(),
    "rows, nearest": Recipe().replace(granularity="row", rounding="nearest", injection="paper"),
    "int8": Recipe().replace(format="int8"),
    "int4": Recipe.from_name("int4"),
    "e5m2, paper": Recipe().replace(format="e5m2", injection="paper"),
    "bf16": Recipe.from_name("bf16"),
}
eco_recipes = pytest.mark.parametrize("recipe", ECO_RECIPES.values(), ids=ECO_RECIPES)


def weight_of(recipe: Recipe, columns: int = 130) -> nn.Parameter:
    values = torch.randn(6, columns, generator=torch.Generator().manual_seed(0)) / 4
    return nn.Parameter(QuantizedWeight.from_values(values, recipe, tensor_id=3))


def set_gradient(weight: nn.Parameter, step: int) -> None:
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(100 + step))


def to_double(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


class Adam:
    """Alg. 3 from the optimizer's own state, the quantizer's result taken as given; knobs make mutants."""

    def __init__(self, weight: nn.Parameter, optimizer: ECOAdamW) -> None:
        state = optimizer.state.get(weight) or {}
        self.step = int(state["step"]) + 1 if state else 1
        theta = to_double(weight.decode())
        m, self.v_before = (to_double(state[key]) if state else np.zeros_like(theta) for key in MOMENTS)
        self.updated, self.m, self.v = updates.alg3_before_quantizer(
            theta, to_double(weight.grad), m, self.v_before,
            lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, step=self.step, weight_decay=DECAY,
        )  # fmt: skip

    def injected(self, stored: np.ndarray, *, lr=LR, times=1.0, bias_step=None, stale_v=False) -> np.ndarray:
        v = self.v_before if stale_v else self.v
        step = bias_step or self.step
        new = updates.alg3_inject(self.m, v, self.updated - stored, lr=lr, beta1=BETA1, beta2=BETA2, eps=EPS, step=step)
        return self.m + times * (new - self.m)


MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS, "weight_decay": DECAY}
ADAM_MUTANTS = {
    "never": {"times": 0.0},
    "twice": {"times": 2.0},
    "with the opposite sign": {"times": -1.0},
    "with another lr": {"lr": 1.1 * LR},
    "with the weight-decay factor": {"times": 1 - 20 * LR * DECAY},
    "without bias correction": {"bias_step": 10**6},
    "with the previous v": {"stale_v": True},
}


@eco_recipes
def test_adamw_injects_as_algorithm_3_says(recipe: Recipe) -> None:
    """Five steps, each from the state before it; v never sees e; theta-hat is a neighbour of theta-tilde."""
    weight = weight_of(recipe)
    optimizer = ECOAdamW([weight], **ADAM)
    for step in range(5):
        set_gradient(weight, step)
        expected = Adam(weight, optimizer)
        optimizer.step()
        state, stored = optimizer.state[weight], to_double(weight.decode())
        scale = np.abs(to_double(state["exp_avg"])).max()
        np.testing.assert_allclose(to_double(state["exp_avg"]), expected.injected(stored), atol=AGREES * scale, rtol=0)
        np.testing.assert_allclose(to_double(state["exp_avg_sq"]), expected.v, rtol=1e-6)
        assert int(state["step"]) == step + 1
        assert_neighbour(stored, expected.updated, recipe)


def assert_neighbour(stored: np.ndarray, updated: np.ndarray, recipe: Recipe) -> None:
    name = recipe.format.value
    scale = grids.scales(updated, name, recipe.granularity.value) if recipe.granularity else 1.0
    below, above = grids.neighbours(updated / scale, name)
    share = 0.5 if recipe.rounding.value == "nearest" else 1.0
    slack = 1e-5 * grids.step_at(updated / scale, name) + 1e-6 * np.abs(updated / scale)
    assert (np.abs(stored - updated) / scale <= share * np.maximum(above - below, 0) + slack).all()


@pytest.mark.parametrize("mutant", ADAM_MUTANTS)
def test_a_wrong_injection_would_be_noticed(mutant: str) -> None:
    """The reference with one mistake is far from the optimizer at each of the first steps."""
    weight = weight_of(ECO_RECIPES["fp8"])
    optimizer = ECOAdamW([weight], **ADAM)
    for step in range(3):
        set_gradient(weight, step)
        expected = Adam(weight, optimizer)
        optimizer.step()
        got = to_double(optimizer.state[weight]["exp_avg"])
        wrong = expected.injected(to_double(weight.decode()), **ADAM_MUTANTS[mutant])
        assert np.abs(got - wrong).max() > MUTANT * np.abs(got).max()


@eco_recipes
def test_sgd_injects_as_algorithm_2_says(recipe: Recipe) -> None:
    weight = weight_of(recipe)
    optimizer = ECOSGD([weight], lr=LR, momentum=BETA1, weight_decay=DECAY)
    for step in range(5):
        set_gradient(weight, step)
        m = to_double(optimizer.state[weight]["exp_avg"]) if step else 0.0
        updated, m = updates.alg2_before_quantizer(
            to_double(weight.decode()), to_double(weight.grad), m, lr=LR, beta=BETA1, weight_decay=DECAY
        )
        optimizer.step()
        error = updated - to_double(weight.decode())
        got = to_double(optimizer.state[weight]["exp_avg"])
        scale = np.abs(got).max()
        expected = updates.alg2_inject(m, error, lr=LR, beta=BETA1)
        np.testing.assert_allclose(got, expected, atol=AGREES * scale, rtol=0)
        for wrong in (m, updates.alg2_inject(expected, error, lr=LR, beta=BETA1)):
            assert np.abs(got - wrong).max() > MUTANT * scale


@pytest.mark.parametrize("optimizer_class", [ECOAdamW, ECOSGD])
def test_displacement_keeps_the_momentum_in_weight_units(optimizer_class: type) -> None:
    """u = b u + lr (1 - b) g / d;  theta-tilde = (1 - lr wd) theta - u;  u += (1 - 1/b) e, whatever the lr."""
    weight = weight_of(Recipe().replace(injection="displacement"))
    optimizer = optimizer_class([weight], lr=LR, weight_decay=DECAY)
    u, v = 0.0, 0.0
    for step in range(5):
        lr = optimizer.param_groups[0]["lr"] = LR * (1 + step)
        set_gradient(weight, step)
        theta, grad = to_double(weight.decode()), to_double(weight.grad)
        optimizer.step()
        v = 0.95 * v + 0.05 * grad**2
        d = np.sqrt(v / (1 - 0.95 ** (step + 1))) + 1e-8 if optimizer_class is ECOAdamW else 1.0
        u = 0.9 * u + lr * (1 - 0.9) * grad / d
        u += (1 - 1 / 0.9) * ((1 - lr * DECAY) * theta - u - to_double(weight.decode()))
        np.testing.assert_allclose(to_double(optimizer.state[weight]["exp_avg"]), u, atol=AGREES * np.abs(u).max())


def test_auto_is_paper_while_the_learning_rate_does_not_fall_far_or_jump() -> None:
    """Bit for bit, over a warmup and a decay to half of the peak: only the divisor's floor and jumps differ."""
    paper, auto = (weight_of(Recipe().replace(injection=name)) for name in ("paper", "auto"))
    optimizers = ECOAdamW([paper], **ADAM), ECOAdamW([auto], **ADAM)
    for step, factor in enumerate((0.25, 0.5, 0.75, 1.0, 1.0, 0.8, 0.5)):
        for weight, optimizer in zip((paper, auto), optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = factor * LR
            set_gradient(weight, step)
            optimizer.step()
    assert torch.equal(paper.codes, auto.codes)
    states = optimizers[0].state[paper], optimizers[1].state[auto]
    assert torch.equal(states[0]["exp_avg"], states[1]["exp_avg"])


@pytest.mark.parametrize("name", ["none", "residual", "master"])
def test_other_compensations_leave_the_momentum_alone(name: str) -> None:
    weight = weight_of(Recipe().replace(compensation=name))
    optimizer = ECOAdamW([weight], **ADAM)
    m = 0.0
    for step in range(4):
        set_gradient(weight, step)
        m = BETA1 * m + (1 - BETA1) * to_double(weight.grad)
        optimizer.step()
    np.testing.assert_allclose(to_double(optimizer.state[weight]["exp_avg"]), m, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("moments", ["bf16", "fp8", "dynamic8"])
def test_moments_are_stored_after_the_injection(moments: str) -> None:
    """The first step's stored moments are the fp32 ones of the fp32 recipe, encoded once."""
    exact, small = weight_of(Recipe()), weight_of(Recipe().replace(moments=moments))
    states = []
    for weight in (exact, small):
        set_gradient(weight, 0)
        optimizer = ECOAdamW([weight], **ADAM)
        optimizer.step()
        states.append(optimizer.state[weight])
    assert torch.equal(exact.codes, small.codes)
    for key in MOMENTS:
        stored, scales = encode_moment(states[0][key], MomentFormat(moments), second=key == "exp_avg_sq")
        assert torch.equal(states[1][key], stored)
        assert scales is None or torch.equal(states[1][f"{key}_scale"], scales)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.quantizes])
def test_bf16_gradients_are_stepped_as_their_fp32_values(name: str) -> None:
    """FSDP2 hands over gradients in its reduce dtype."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        weight = weight_of(Recipe.from_name(name))
        grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)).bfloat16().to(dtype)
        optimizer = ECOAdamW([weight])
        weight.grad = torch.zeros(weight.shape)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()  # allocates the state and changes nothing
        shard = Shard.of(weight, optimizer.state[weight])
        hyper = Hyper(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS)
        step_shard(Task(shard=shard, grad=grad, rule=Rule.ADAMW, hyper=hyper), seed=0)
        results.append((weight.codes.float(), shard.state["exp_avg"].float()))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


def test_statistics_are_those_of_the_step() -> None:
    """Sums over quantized weights: squared error, squared theta-tilde, how many codes changed."""
    weight, plain = weight_of(Recipe.from_name("fp8-master")), nn.Parameter(torch.ones(9))
    optimizer = ECOAdamW([weight, plain], lr=LR)
    set_gradient(weight, 0)
    plain.grad = torch.ones(9)
    before = weight.codes.clone()
    optimizer.collect_stats = True
    optimizer.step()
    updated, stored = optimizer.state[weight]["master"].double(), weight.decode()
    assert optimizer.stats.elements == 6 * 130
    assert optimizer.stats.moved == int((before != weight.codes).sum())
    assert 0 < optimizer.stats.moved < 6 * 130
    assert optimizer.stats.sum_squared_error == pytest.approx(float((updated - stored).square().sum()), rel=1e-6)
    assert optimizer.stats.sum_squared_weight == pytest.approx(float(updated.square().sum()), rel=1e-6)
    optimizer.collect_stats = False
    optimizer.step()
    assert optimizer.stats is None
