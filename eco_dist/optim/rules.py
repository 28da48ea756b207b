"""The update rules: pure arithmetic on plain fp32 tensors, the only copy in the package.

[Note: one step]
    theta-tilde = rule(theta, gradient, moments)      this module
    theta-hat   = decode(encode(theta-tilde))         eco_dist.numerics
    e           = theta-tilde - theta-hat             quantization error
    exp_avg    += gain * e                            compensation `momentum`, gain from this module

AdamW (ECO, Alg. 3), with t the number of the step, c1 = 1 - beta1^t, c2 = 1 - beta2^t:
    m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2;   d = sqrt(v / c2) + eps
    theta-tilde = (1 - lr wd) theta - (lr / c1) m / d
    gain        = (1 - 1/beta1) c1 d / lr             v never sees e

SGD with momentum (ECO, Alg. 2), in the averaging form with the factor (1 - beta):
    m = beta m + (1 - beta) g;   theta-tilde = (1 - lr wd) theta - lr m;   gain = (1 - 1/beta) / lr

[Note: injection]
The gain is negative: e is paid back as beta^k lr m over the next steps, which is right only while lr (and d) stay what
they were at injection.
* `paper`: as printed. gain ~ 1/lr, so a schedule that ends near zero leaves a momentum hundreds of times too large,
  and the next large lr destroys the model.
* `auto` (default): divides by max(lr, 10 % of the largest lr seen), and when the lr jumps up multiplies the momentum
  by the ratio of the divisors, so that what is pending keeps its size in weight units.
* `displacement`: the momentum is kept in weight units, u = beta1 u + lr (1 - beta1) g / d; theta-tilde =
  (1 - lr wd) theta - u; gain = 1 - 1/beta1, constant and exact for any schedule. It normalizes, then accumulates
  (the order of LaProp), so it is close to AdamW but not AdamW.
"""

from __future__ import annotations

import dataclasses
import math

from torch import Tensor

from eco_dist.recipe import Injection

LR_FLOOR = 0.1
"""Injection `auto` divides by at least this share of the largest learning rate seen."""

LR_JUMP = 3.0
"""Injection `auto` rescales the momentum when its divisor grows by more than this factor in one step. A linear warmup
from zero doubles at its second step and must not count as a jump."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rates injection `auto` remembers of a parameter: the largest seen and the last one."""

    peak: float = 0.0
    last: float = 0.0

    def advance(self, lr: float) -> Schedule:
        """The schedule after a step at `lr`."""
        return Schedule(peak=max(self.peak, lr), last=lr)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyper:
    """Scalars of one step of one parameter.

    Attributes:
        lr: learning rate, > 0.
        beta1: decay of the first moment (SGD: momentum).
        beta2: decay of the second moment; unused by SGD.
        eps: added to the square root; unused by SGD.
        weight_decay: decoupled, multiplied by lr.
        step: number of this step, from 1.
        injection: form of the injection.
        schedule: learning rates before this step; read by `auto` alone.
    """

    lr: float
    beta1: float
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    step: int = 1
    injection: Injection = Injection.PAPER
    schedule: Schedule = Schedule()

    @property
    def injection_lr(self) -> float:
        """Divisor of the injection."""
        return _divisor(self.lr, self.schedule.peak) if self.injection is Injection.AUTO else self.lr

    @property
    def momentum_rescale(self) -> float:
        """Factor on the stored momentum before this step: 1 but for `auto` after a jump of the learning rate."""
        if self.injection is not Injection.AUTO or self.schedule.last <= 0:
            return 1.0
        before = _divisor(self.schedule.last, self.schedule.peak)
        return before / self.injection_lr if self.injection_lr > LR_JUMP * before else 1.0


def _divisor(lr: float, peak: float) -> float:
    return max(lr, LR_FLOOR * peak)


def adamw(
    theta: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, hyper: Hyper
) -> tuple[Tensor, Tensor | float]:
    """One AdamW step.

    Args:
        theta: weight before the step, fp32.
        grad: gradient, fp32, same shape.
        exp_avg: first moment, fp32, same shape; updated in place.
        exp_avg_sq: second moment, fp32, same shape; updated in place.
        hyper: scalars.

    Returns:
        The updated weight theta-tilde and the gain of the injection (a tensor like theta, or a number).
    """
    correction1 = 1 - hyper.beta1**hyper.step
    correction2 = 1 - hyper.beta2**hyper.step
    exp_avg_sq.mul_(hyper.beta2).addcmul_(grad, grad, value=1 - hyper.beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(hyper.eps)
    decayed = theta * (1 - hyper.lr * hyper.weight_decay)
    if hyper.injection is Injection.DISPLACEMENT:
        exp_avg.mul_(hyper.beta1).addcdiv_(grad, denominator, value=hyper.lr * (1 - hyper.beta1))
        return decayed.sub_(exp_avg), _gain(hyper, 1.0)
    _accumulate(exp_avg, grad, hyper)
    updated = decayed.addcdiv_(exp_avg, denominator, value=-hyper.lr / correction1)
    return updated, denominator.mul_(_gain(hyper, correction1 / hyper.injection_lr))


def sgd(theta: Tensor, grad: Tensor, exp_avg: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor | float]:
    """One step of SGD with momentum in the averaging form; arguments and result as `adamw`."""
    decayed = theta * (1 - hyper.lr * hyper.weight_decay)
    if hyper.injection is Injection.DISPLACEMENT:
        exp_avg.mul_(hyper.beta1).add_(grad, alpha=hyper.lr * (1 - hyper.beta1))
        return decayed.sub_(exp_avg), _gain(hyper, 1.0)
    _accumulate(exp_avg, grad, hyper)
    return decayed.sub_(exp_avg, alpha=hyper.lr), _gain(hyper, 1 / hyper.injection_lr)


def _accumulate(exp_avg: Tensor, grad: Tensor, hyper: Hyper) -> None:
    exp_avg.mul_(hyper.beta1 * hyper.momentum_rescale).add_(grad, alpha=1 - hyper.beta1)


def _gain(hyper: Hyper, per_unit: float) -> float:
    # beta1 = 0 leaves no momentum to carry the error; optimizers refuse it, other compensations ignore the gain.
    return (1 - 1 / hyper.beta1) * per_unit if hyper.beta1 > 0 else 0.0
