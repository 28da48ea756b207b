"""`ECOAdamW` and `ECOSGD`: ordinary `torch.optim` optimizers over quantized and high-precision parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from eco_dist.optim.base import ECOOptimizer
from eco_dist.optim.rules import Rule


class ECOAdamW(ECOOptimizer):
    """AdamW with decoupled weight decay, without master weights (ECO, arXiv 2601.22101, Alg. 3).

    Quantized weights are stepped as their recipe says; every other parameter takes ordinary AdamW in its own dtype.
    """

    _rule = Rule.ADAMW

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        seed: int = 0,
        nonfinite: str = "skip",
        max_grad_norm: float | None = None,
    ) -> None:
        """Create the optimizer.

        Args:
            params: parameters, or groups of them with their own options, quantized and not, sharded or not.
            lr: learning rate, may be changed by a scheduler; 0 changes nothing.
            betas: decays of the moments; the first must be positive for compensation `momentum`.
            eps: added to the root of the second moment.
            weight_decay: decoupled, theta is multiplied by 1 - lr * weight_decay.
            maximize: ascend instead of descend.
            seed: seed of stochastic rounding; use the same on all ranks.
            nonfinite: what to do about a NaN or infinite gradient on any rank: `skip` the step on all ranks, or
                `raise` FloatingPointError on all ranks. Nothing changes either way.
            max_grad_norm: clip gradients to this global L2 norm, as `torch.nn.utils.clip_grad_norm_` does, but inside
                the step: no gradient is rewritten. `grad_norm` has the norm afterwards.

        Raises:
            ValueError: for arguments out of range.
        """
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, seed=seed, nonfinite=nonfinite, max_grad_norm=max_grad_norm)

    def _scalars(self, group: dict[str, Any]) -> dict[str, float]:
        beta1, beta2 = group["betas"]
        return {"beta1": float(beta1), "beta2": float(beta2), "eps": float(group["eps"])}


class ECOSGD(ECOOptimizer):
    """SGD with momentum, without master weights (ECO, arXiv 2601.22101, Alg. 2).

    The momentum is an average, m = beta m + (1 - beta) g, as in the paper: the same learning rate in `torch.optim.SGD`
    is lr * (1 - beta). Weight decay is decoupled.
    """

    _rule = Rule.SGD

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        seed: int = 0,
        nonfinite: str = "skip",
        max_grad_norm: float | None = None,
    ) -> None:
        """Create the optimizer; arguments as for `ECOAdamW`, `momentum` is the paper's beta."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, seed=seed, nonfinite=nonfinite, max_grad_norm=max_grad_norm)

    def _scalars(self, group: dict[str, Any]) -> dict[str, float]:
        return {"beta1": float(group["momentum"])}
