"""The update rules: pure arithmetic on plain fp32 tensors, the only copy in the package.

[Note: one step]
    theta-tilde = rule(theta, gradient, moments)      this module
    theta-hat   = decode(encode(theta-tilde))         eco_dist.numerics
    e           = theta-tilde - theta-hat             quantization error
    exp_avg    += gain * e (* d)                      compensation `momentum`

AdamW (ECO, Alg. 3), with t the number of the step, c1 = 1 - beta1^t, c2 = 1 - beta2^t:
    m = beta1 m + (1 - beta1) g;   v = beta2 v + (1 - beta2) g^2;   d = sqrt(v / c2) + eps
    theta-tilde = (1 - lr wd) theta - (lr / c1) m / d
    m          += (1 - 1/beta1) (c1 / lr) d e         v never sees e

SGD with momentum (ECO, Alg. 2), in the averaging form with the factor (1 - beta):
    m = beta m + (1 - beta) g;   theta-tilde = (1 - lr wd) theta - lr m;   m += (1 - 1/beta) / lr e

[Note: injection]
The gain is negative: e is paid back as beta^k lr m over the next steps, which is right only while lr (and d) stay what
they were at injection.
* `paper`: as printed. gain ~ 1/lr, so a schedule that ends near zero leaves a momentum hundreds of times too large,
  and the next large lr destroys the model.
* `auto` (default): divides by max(lr, 10 % of the largest lr seen), and when the lr jumps up multiplies the momentum
  by the ratio of the divisors, so that what is pending keeps its size in weight units.
* `displacement`: the momentum is kept in weight units, u = beta1 u + lr (1 - beta1) g / d; theta-tilde =
  (1 - lr wd) theta - u; u += (1 - 1/beta1) e, constant and exact for any schedule. It normalizes, then accumulates
  (the order of LaProp), so it is close to AdamW but not AdamW.

[Note: order of operations]
Every operation below is one rounding to fp32: products and sums are never fused, and scalars are rounded to fp32 once
(`Scalars`). The kernels do the same operations in the same order and are bit-equal on every instruction set.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math

from torch import Tensor

from eco_dist.numerics import square_root
from eco_dist.recipe import Injection

LR_FLOOR = 0.1
"""Injection `auto` divides by at least this share of the largest learning rate seen."""

LR_JUMP = 5.0
"""Injection `auto` rescales the momentum when its divisor grows by more than this factor in one step. A warmup from
zero doubles (linear) or quadruples (cosine) at its second step and must not count; a restart grows by 1 / LR_FLOOR."""


class Rule(enum.Enum):
    """Which update."""

    ADAMW = "adamw"
    SGD = "sgd"


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
    """Hyper-parameters of one step of one parameter.

    Attributes:
        lr: learning rate, > 0.
        beta1: decay of the first moment (SGD: momentum).
        beta2: decay of the second moment; unused by SGD.
        eps: added to the square root; unused by SGD.
        weight_decay: decoupled, multiplied by lr.
        step: number of this step, from 1.
        maximize: ascend instead of descend.
        grad_scale: factor on the gradient: 1 / loss scale, and what clipping asks for.
        injection: form of the injection.
        schedule: learning rates before this step; read by `auto` alone.
    """

    lr: float
    beta1: float
    beta2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0
    step: int = 1
    maximize: bool = False
    grad_scale: float = 1.0
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scalars:
    """What a step multiplies with; each is rounded to fp32 where it is used.

    m = m beta1 + g factor1;  v = v beta2 + g^2 factor2;  d = sqrt(v) root2 + eps
    theta-tilde = theta decay - (m / d) step_size;  m += e d gain            (AdamW)
    m = m beta1 + (g / d) factor1;  theta-tilde = theta decay - m;  m += e gain   (AdamW, displacement)
    m = m beta1 + g factor1;  theta-tilde = theta decay - m step_size;  m += e gain   (SGD)
    g is the gradient times grad_scale.
    """

    grad_scale: float
    beta1: float
    factor1: float
    beta2: float
    factor2: float
    root2: float
    eps: float
    decay: float
    step_size: float
    gain: float


@functools.lru_cache(maxsize=64)
def scalars_of(rule: Rule, hyper: Hyper) -> Scalars:
    """Scalars of a step, from its hyper-parameters."""
    displaces = hyper.injection is Injection.DISPLACEMENT
    correction1 = 1 - hyper.beta1**hyper.step if rule is Rule.ADAMW else 1.0
    correction2 = 1 - hyper.beta2**hyper.step
    # beta1 = 0 leaves no momentum to carry the error; optimizers refuse it, other compensations ignore the gain.
    gain = 1 - 1 / hyper.beta1 if hyper.beta1 > 0 else 0.0
    return Scalars(
        grad_scale=-hyper.grad_scale if hyper.maximize else hyper.grad_scale,
        beta1=hyper.beta1 * hyper.momentum_rescale,
        factor1=(1 - hyper.beta1) * (hyper.lr if displaces else 1.0),
        beta2=hyper.beta2,
        factor2=1 - hyper.beta2,
        root2=1 / math.sqrt(correction2),
        eps=hyper.eps,
        decay=1 - hyper.lr * hyper.weight_decay,
        step_size=1.0 if displaces else hyper.lr / correction1,
        gain=gain if displaces else gain * correction1 / hyper.injection_lr,
    )


def adamw(
    theta: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, scalars: Scalars, *, displacement: bool = False
) -> tuple[Tensor, Tensor]:
    """One AdamW step.

    Args:
        theta: weight before the step, fp32.
        grad: gradient, fp32, same shape.
        exp_avg: first moment, fp32, same shape; updated in place.
        exp_avg_sq: second moment, fp32, same shape; updated in place.
        scalars: of `scalars_of(Rule.ADAMW, …)`.
        displacement: whether the momentum is kept in weight units.

    Returns:
        The updated weight theta-tilde, and d.
    """
    grad = grad * scalars.grad_scale
    exp_avg_sq.mul_(scalars.beta2).add_((grad * grad).mul_(scalars.factor2))
    denominator = square_root(exp_avg_sq).mul_(scalars.root2).add_(scalars.eps)
    decayed = theta * scalars.decay
    if displacement:
        exp_avg.mul_(scalars.beta1).add_((grad / denominator).mul_(scalars.factor1))
        return decayed.sub_(exp_avg), denominator
    exp_avg.mul_(scalars.beta1).add_(grad.mul_(scalars.factor1))
    return decayed.sub_((exp_avg / denominator).mul_(scalars.step_size)), denominator


def sgd(theta: Tensor, grad: Tensor, exp_avg: Tensor, scalars: Scalars) -> Tensor:
    """One step of SGD with momentum in the averaging form (or in weight units: the scalars differ, not the rule)."""
    exp_avg.mul_(scalars.beta1).add_((grad * scalars.grad_scale).mul_(scalars.factor1))
    return (theta * scalars.decay).sub_(exp_avg * scalars.step_size)


def inject(exp_avg: Tensor, error: Tensor, denominator: Tensor | None, scalars: Scalars) -> None:
    """Put the quantization error into the momentum: m += e d gain, or m += e gain where there is no d.

    Args:
        exp_avg: first moment, fp32; updated in place.
        error: e, fp32, same shape; used up.
        denominator: AdamW's d; None for SGD and for the displacement form.
        scalars: of this step.
    """
    if denominator is not None:
        error.mul_(denominator)
    exp_avg.add_(error.mul_(scalars.gain))


def virtual_weight(
    theta: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor | None, hyper: Hyper, *, rule: Rule = Rule.ADAMW
) -> Tensor:
    """The weight without the rounding errors that are still pending in the momentum.

        theta-hat - beta1 / (1 - beta1) H m,    H = (lr / c1) / d for AdamW, lr for SGD, 1 for `displacement`

    The errors are a part of m that pays itself back by beta1^k H m over the next steps k; this pays them all at once
    (the virtual sequence of ECO, definition 3.4, for AdamW). The rest of m, the gradients', moves the weight a little.
    For `auto`, lr is the divisor the errors were injected with.

    Args:
        theta: stored weight, fp32.
        exp_avg: first moment, fp32.
        exp_avg_sq: second moment, fp32; None for SGD.
        hyper: of the last step; `step` is its number and `schedule` what it left.
        rule: which update.
    """
    share = hyper.beta1 / (1 - hyper.beta1)
    if hyper.injection is Injection.DISPLACEMENT:
        return theta - exp_avg * share
    if rule is Rule.SGD or exp_avg_sq is None:
        return theta - exp_avg * (share * hyper.injection_lr)
    correction1, correction2 = 1 - hyper.beta1**hyper.step, 1 - hyper.beta2**hyper.step
    denominator = square_root(exp_avg_sq).mul_(1 / math.sqrt(correction2)).add_(hyper.eps)
    return theta - (exp_avg / denominator).mul_(share * hyper.injection_lr / correction1)
