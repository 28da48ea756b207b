"""What can be proved: stored residuals equal master weights, the virtual sequence, displacement, the dead zone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from eco_dist.optim import ECOSGD, ECOAdamW
from eco_dist.recipe import Recipe
from eco_dist.weights import QuantizedWeight
from tests.reference import grids

ROWS, COLUMNS = 6, 150

both_optimizers = pytest.mark.parametrize("optimizer_class", [ECOAdamW, ECOSGD])


def weight_of(recipe: Recipe, scale: float = 0.25) -> nn.Parameter:
    values = scale * torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    return nn.Parameter(QuantizedWeight.from_values(values, recipe, tensor_id=1))


def optimizer_of(optimizer_class: type, weight: nn.Parameter, lr: float, **options) -> torch.optim.Optimizer:
    # SGD sees gradients of about 0.1, AdamW normalizes them: the same learning rate moves both alike.
    return optimizer_class([weight], lr=lr if optimizer_class is ECOAdamW else 10 * lr, **options)


def quadratic_gradient(weight: nn.Parameter, step: int) -> torch.Tensor:
    """Gradient of a quadratic around a target, with noise."""
    generator = torch.Generator().manual_seed(step)
    target = torch.linspace(-0.3, 0.3, COLUMNS)
    noise = 0.1 * torch.randn(weight.shape, generator=generator)
    return 0.3 * (weight.decode() - target) + noise


@pytest.mark.parametrize(
    ("format", "weight_decay"), [("e4m3", 0.0), *((name, 0.1) for name in ("e4m3", "e5m2", "int8", "int4", "bf16"))]
)
@both_optimizers
def test_an_exact_residual_gives_the_codes_of_master_weights(
    optimizer_class: type, weight_decay: float, format: str
) -> None:
    """Bit for bit over 250 steps of warmup and cosine: to nearest, e = theta-tilde - theta-hat is exact (Sterbenz),
    and theta-hat + e is theta-tilde again (facts/paper.md, 11 a).
    """
    base = Recipe().replace(format=format, granularity=None if format == "bf16" else "block", rounding="nearest")
    weights = [
        weight_of(base.replace(compensation=compensation, residual="fp32")) for compensation in ("residual", "master")
    ]
    # A master weight starts from the stored one, as the residual does.
    optimizers = [optimizer_of(optimizer_class, weight, 1e-2, weight_decay=weight_decay) for weight in weights]
    peak, moved = optimizers[0].param_groups[0]["lr"], 0
    for step in range(250):
        before = weights[0].codes.clone()
        for weight, optimizer in zip(weights, optimizers, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(1, (step + 1) / 30) * (0.51 + 0.49 * math.cos(step / 80))
            weight.grad = quadratic_gradient(weight, step)
            optimizer.step()
        assert torch.equal(weights[0].codes, weights[1].codes), f"codes differ at step {step}"
        assert torch.equal(weights[0].scales, weights[1].scales)
        moved += int((before != weights[0].codes).sum())
    assert moved > weights[0].numel()
    assert torch.equal(weights[0].decode() + optimizers[0].state[weights[0]]["residual"],
                       optimizers[1].state[weights[1]]["master"])  # fmt: skip


@pytest.mark.parametrize("moments", ["fp32", "dynamic8"])
def test_a_byte_of_residual_comes_far_closer_to_master_weights_than_momentum(moments: str) -> None:
    """Rms distance of theta-hat + pending part from master weights under the same open-loop gradients.

    Measured: the residual 9 times closer than ECO after 200 steps.
    """
    distance = {}
    recipes = {
        "residual": Recipe().replace(compensation="residual", moments=moments),
        "momentum": Recipe().replace(moments=moments),
        "none": Recipe().replace(compensation="none", moments=moments),
        "master": Recipe().replace(compensation="master", moments=moments),
    }
    weights = {name: weight_of(recipe) for name, recipe in recipes.items()}
    optimizers = {name: ECOAdamW([weight], lr=1e-3) for name, weight in weights.items()}
    for step in range(200):
        grad = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(step))
        for name, weight in weights.items():
            weight.grad = grad.clone()
            optimizers[name].step()
    master = optimizers["master"].state[weights["master"]]["master"]
    for name in ("residual", "momentum", "none"):
        weight, state = weights[name], optimizers[name].state[weights[name]]
        pending = torch.zeros(())
        if name == "residual":
            scale = weight.scales.repeat_interleave(128, -1)[:, :COLUMNS]
            grid_steps = torch.from_numpy(grids.step_at((weight.decode() / scale).numpy(), "e4m3"))
            pending = state["residual"] * grid_steps * scale / 127
        distance[name] = float((weight.decode() + pending - master).square().mean().sqrt())
    assert distance["residual"] < 0.2 * distance["momentum"]
    assert distance["momentum"] < distance["none"]


@pytest.mark.parametrize("format", ["e4m3", "int8", "int4"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_the_virtual_sequence_follows_plain_gradient_descent(rounding: str, format: str) -> None:
    """Lemma 3.5: theta-hat - lr beta/(1 - beta) m obeys theta' = theta - lr grad f(theta-hat), for any quantizer."""
    lr, beta = 0.05, 0.9
    recipe = Recipe().replace(format=format, rounding=rounding, injection="paper")
    weight = weight_of(recipe)
    optimizer = ECOSGD([weight], lr=lr, momentum=beta)
    virtual = weight.decode().double()
    for step in range(300):
        weight.grad = quadratic_gradient(weight, step)
        virtual -= lr * weight.grad.double()
        optimizer.step()
    m = optimizer.state[weight]["exp_avg"].double()
    reached = weight.decode().double() - lr * beta / (1 - beta) * m
    # 300 steps, each rounding theta-tilde and e to fp32: far below one grid step (about 1e-2).
    torch.testing.assert_close(reached, virtual, rtol=0, atol=300 * 2.0**-24)
    naive_gap = (weight.decode().double() - virtual).abs().max()
    assert naive_gap > 100 * 300 * 2.0**-24, "the stored weight itself is far away"


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_displacement_sgd_at_constant_lr_is_the_paper_bit_for_bit(rounding: str) -> None:
    """u = lr m. With lr a power of two no rounding differs, so codes, scales and lr * m are equal."""
    lr = 2.0**-5
    weights = [weight_of(Recipe().replace(rounding=rounding, injection=name)) for name in ("paper", "displacement")]
    optimizers = [ECOSGD([weight], lr=lr, weight_decay=0.1) for weight in weights]
    for step in range(200):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = quadratic_gradient(weight, step)
            optimizer.step()
        assert torch.equal(weights[0].codes, weights[1].codes)
        assert torch.equal(weights[0].scales, weights[1].scales)
    m, u = (optimizer.state[weight]["exp_avg"] for weight, optimizer in zip(weights, optimizers, strict=True))
    assert torch.equal(lr * m, u)


def first_move(compensation: str, beta1: float, lr: float, limit: int, **changes: str) -> int | None:
    """Step at which a weight of 1, gap 1/8 above, first moves under a constant gradient of -1.

    The block's largest, 448, has no gradient, so that the scale is 1.
    """
    recipe = Recipe().replace(granularity="row", rounding="nearest", compensation=compensation, **changes)
    weight = nn.Parameter(QuantizedWeight.from_values(torch.tensor([[448.0, 1.0]]), recipe))
    optimizer = ECOAdamW([weight], lr=lr, betas=(beta1, 0.95))
    weight.grad = torch.tensor([[0.0, -1.0]])
    for step in range(1, limit + 1):
        optimizer.step()
        if float(weight.decode()[0, 1]) != 1.0:
            assert float(weight.decode()[0, 1]) == 1.125
            return step
    return None


@pytest.mark.parametrize("injection", ["paper", "auto"])
@pytest.mark.parametrize("beta1", [0.9, 0.95])
def test_the_dead_zone_of_eco_to_nearest(beta1: float, injection: str) -> None:
    """While codes stay, m <- m / beta1 makes m a pure integrator: (gap/2) / (lr (1 - beta1)) steps to the first move
    against (gap/2) / lr with master weights, and never without compensation (facts/fsdp.md, 8).
    """
    lr, half_gap = 1e-3, 1 / 16
    expected = half_gap / (lr * (1 - beta1))
    moved = first_move("momentum", beta1, lr, 1500, injection=injection)
    assert moved is not None
    assert abs(moved - (math.floor(expected + 1e-6) + 1)) <= 1  # one step: fp32 sums decide the tie


def test_the_dead_zone_of_master_weights_and_of_none() -> None:
    assert first_move("master", 0.9, 1e-3, 100) == 63
    assert first_move("residual", 0.9, 1e-3, 100, residual="fp32") == 63
    assert first_move("none", 0.9, 1e-3, 1500) is None


def test_eco_with_stochastic_rounding_has_no_dead_zone() -> None:
    """It tracks the ideal line: 128 weights under a constant gradient move by lr * steps, within 5 sigma."""
    lr, steps = 1e-3, 250
    values = torch.ones(64, 2)
    values[:, 0] = 448
    weight = nn.Parameter(QuantizedWeight.from_values(values, Recipe().replace(granularity="row")))
    optimizer = ECOAdamW([weight], lr=lr)
    weight.grad = torch.tensor([[0.0, -1.0]]).expand(64, 2).clone()
    for _ in range(steps):
        optimizer.step()
    moved = weight.decode()[:, 1].double().numpy() - 1
    assert abs(moved.mean() - lr * steps) < 5 * np.sqrt(5.3 / 64) * 0.125 / 2
