"""Appendix C of the paper: stationary moments on f(x) = L x^2 / 2 with q(x) = x + xi, and why the gain is unique.

The rule under test is `optim.rules.sgd` with its injection; the quantizer adds noise of variance 1 to thousands of
independent scalars.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from eco_dist.optim.rules import Hyper, Rule, inject, scalars_of, sgd
from tests.reference import stationary

SCALARS = 20_000
WITHIN = 0.03
"""Of the closed form: a few hundred correlated samples of 20,000 scalars leave below 1 %."""

SETTINGS = [(1.0, 0.1, 0.9), (2.0, 0.05, 0.8), (1.0, 0.1, 0.95)]
settings = pytest.mark.parametrize(("curvature", "lr", "beta"), SETTINGS)


def simulate(
    curvature: float, lr: float, beta: float, compensation: str, gain_factor: float = 1.0, scalars: int = SCALARS
) -> tuple[float, float]:
    """(E[x^2] of what the optimizer carries, E[gradient^2]) after the transient."""
    generator = torch.Generator().manual_seed(0)
    factors = scalars_of(Rule.SGD, Hyper(lr=lr, beta1=beta))
    burn_in = int(12 / (lr * curvature)) + int(12 / (1 - beta))
    carried, m = torch.zeros(scalars), torch.zeros(scalars)
    sums, samples = np.zeros(2), 0
    for step in range(burn_in + 60):
        noise = torch.randn(scalars, generator=generator)
        if compensation == "master":
            grad = curvature * (carried + noise)
            carried = sgd(carried, grad, m, factors)
        else:
            grad = curvature * carried
            updated = sgd(carried, grad, m, factors)
            carried = updated + noise
            if compensation == "momentum":
                inject(m, gain_factor * (updated - carried), None, factors)
        if step >= burn_in:
            sums += [float(carried.square().mean()), float(grad.square().mean())]
            samples += 1
    return tuple(sums / samples)


@settings
def test_master_weights(curvature: float, lr: float, beta: float) -> None:
    """u = L lr (1+b) / (2(1+b) - L lr (1-b)); the squared gradient is L^2 (u + 1)."""
    u, gradient = simulate(curvature, lr, beta, "master")
    expected = stationary.master_u(curvature, lr, beta)
    assert u == pytest.approx(expected, rel=WITHIN)
    assert gradient == pytest.approx(curvature**2 * (expected + 1), rel=WITHIN)


@settings
def test_naive(curvature: float, lr: float, beta: float) -> None:
    """Without compensation the error is amplified like L / (2 lr)."""
    u, gradient = simulate(curvature, lr, beta, "none")
    expected = stationary.naive_u(curvature, lr, beta)
    assert u == pytest.approx(expected, rel=WITHIN)
    assert gradient == pytest.approx(curvature**2 * expected, rel=WITHIN)


@settings
def test_eco(curvature: float, lr: float, beta: float) -> None:
    """u = 2 / (2(1-b^2) - L lr (1-b)^2): finite as lr -> 0, 1/(1-b^2) times the best possible."""
    u, gradient = simulate(curvature, lr, beta, "momentum")
    expected = stationary.eco_u(curvature, lr, beta)
    assert u == pytest.approx(expected, rel=WITHIN)
    assert gradient == pytest.approx(curvature**2 * expected, rel=WITHIN)


@settings
def test_closed_forms_solve_the_lyapunov_equation(curvature: float, lr: float, beta: float) -> None:
    """The reference checked against itself: three formulas of the paper and one linear system."""
    c, gamma = (1 - beta) * curvature, (1 - beta) / (lr * beta)
    for noise, form in (
        ((-lr * c, c), stationary.master_u),
        ((1.0, 0.0), stationary.naive_u),
        ((1.0, gamma), stationary.eco_u),
    ):
        assert stationary.moments(curvature, lr, beta, noise)[0, 0] == pytest.approx(form(curvature, lr, beta))


@pytest.mark.parametrize("d", [-1.0, -0.5, 0.5, 1.0])
def test_a_gain_off_by_d_brings_the_naive_blow_up_back_with_weight_d_squared(d: float) -> None:
    """gamma = (1+d)(1-b)/(lr b) gives u = d^2 / (2 L lr) + O(1): only d = 0 has no 1/lr pole; d = -1 is naive.

    The simulated rule agrees with the exact moments, whose pole is then read off at lr = 1e-6.
    """
    curvature, beta = 1.0, 0.9

    def exact(lr: float) -> float:
        gamma = (1 + d) * (1 - beta) / (lr * beta)
        return stationary.moments(curvature, lr, beta, (1.0, gamma))[0, 0]

    u, _ = simulate(curvature, 0.05, beta, "momentum", gain_factor=1 + d)
    assert u == pytest.approx(exact(0.05), rel=WITHIN)
    assert exact(1e-6) * 2 * curvature * 1e-6 == pytest.approx(d**2, rel=1e-3)
    assert stationary.eco_u(curvature, 1e-6, beta) == pytest.approx(1 / (1 - beta**2), rel=1e-4)
