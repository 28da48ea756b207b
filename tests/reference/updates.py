"""ECO's algorithms 2 and 3 and ordinary AdamW, in numpy float64, one line a formula of the paper."""

from __future__ import annotations

import numpy as np


def alg2_before_quantizer(theta, grad, m, *, lr, beta, weight_decay=0.0):
    """Alg. 2 up to the quantizer: (theta-tilde, m-tilde)."""
    m = beta * m + (1 - beta) * grad
    return theta - lr * weight_decay * theta - lr * m, m


def alg2_inject(m, error, *, lr, beta):
    """m-hat = m-tilde + (1/lr)(1 - 1/beta) e."""
    return m + (1 / lr) * (1 - 1 / beta) * error


def alg3_before_quantizer(theta, grad, m, v, *, lr, beta1, beta2, eps, step, weight_decay=0.0):
    """Alg. 3 up to the quantizer: (theta-tilde, m-tilde, v)."""
    m = beta1 * m + (1 - beta1) * grad
    v = beta2 * v + (1 - beta2) * grad**2
    denominator = np.sqrt(v / (1 - beta2**step)) + eps
    return theta - lr * weight_decay * theta - lr * (m / (1 - beta1**step)) / denominator, m, v


def alg3_inject(m, v, error, *, lr, beta1, beta2, eps, step):
    """m-hat = m-tilde + (1 - b1^t)/lr (1 - 1/b1) (sqrt(v/(1 - b2^t)) + eps) e."""
    denominator = np.sqrt(v / (1 - beta2**step)) + eps
    return m + (1 - beta1**step) / lr * (1 - 1 / beta1) * denominator * error
