"""Stationary moments of SGD with momentum on f(x) = L x^2 / 2 and q(x) = x + xi (paper, Appendix C), sigma = 1."""

from __future__ import annotations

import numpy as np


def master_u(curvature: float, lr: float, beta: float) -> float:
    """E[x^2] of the master weight."""
    return curvature * lr * (1 + beta) / (2 * (1 + beta) - curvature * lr * (1 - beta))


def naive_u(curvature: float, lr: float, beta: float) -> float:
    """E[x^2] of the stored weight when the error is lost."""
    numerator = (1 - beta**2) + 2 * beta * curvature * lr
    return numerator / (curvature * lr * (2 * (1 - beta**2) - curvature * lr * (1 - beta) ** 2))


def eco_u(curvature: float, lr: float, beta: float) -> float:
    """E[x^2] of the stored weight under ECO."""
    return 2 / (2 * (1 - beta**2) - curvature * lr * (1 - beta) ** 2)


def moments(curvature: float, lr: float, beta: float, noise: tuple[float, float]) -> np.ndarray:
    """Stationary covariance of (x, m) for x' = x - lr m' + B1 xi, m' = beta m + (1 - beta) L x + B2 xi.

    Solves the Lyapunov equation S = A S A^T + B B^T as a linear system, so no closed form is assumed.
    """
    c = (1 - beta) * curvature
    a = np.array([[1 - lr * c, -lr * beta], [c, beta]])
    b = np.outer(noise, noise)
    system = np.eye(4) - np.kron(a, a)
    return np.linalg.solve(system, b.ravel()).reshape(2, 2)
