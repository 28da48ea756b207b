"""What a user would run instead: torch's own optimizers, and those of other packages where they are installed."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eco_dist.bench.rounds import Case

logger = logging.getLogger(__name__)

BASELINE = "torch AdamW fused, fp32"
_OPTIONS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}


def parameter(shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """A weight to step."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02
    return nn.Parameter(values.to(dtype))


def torch_cases(shape: tuple[int, int], grad: Tensor) -> list[Case]:
    """Fused AdamW of torch on fp32 weights (the baseline), on BF16 weights, and as mixed precision uses it."""
    elements = grad.numel()
    return [
        Case(name=BASELINE, action=_stepped(_fused, shape, grad), bytes=28 * elements),
        Case(name="mixed precision: fp32 master, bf16 gradient upcast, bf16 copy", action=_mixed(shape, grad)),
        Case(
            name="torch AdamW fused, everything bf16",
            action=_stepped(_fused, shape, grad.bfloat16()),
            bytes=14 * elements,
        ),
        Case(name="a copy of the bytes of fp8 (22 B a parameter)", action=_copy(elements), bytes=22 * elements),
    ]


def installed_cases(shape: tuple[int, int], grad: Tensor) -> list[Case]:
    """Peers of other packages; one that is missing or refuses this machine is left out, and the log says why."""
    cases = []
    for name, make in _PEERS.items():
        try:
            action = _stepped(make, shape, grad.bfloat16() if "bf16" in name else grad)
            action()  # many find out only now that they cannot
        except Exception as error:
            logger.warning("%s does not run here: %s", name, str(error).splitlines()[0] if str(error) else repr(error))
            continue
        cases.append(Case(name=name, action=action))
    return cases


def _stepped(make: Callable[[list[nn.Parameter]], Any], shape: tuple[int, int], grad: Tensor) -> Callable[[], object]:
    weight = parameter(shape, grad.dtype)
    weight.grad = grad
    optimizer = make([weight])
    return lambda: optimizer.step()


def _fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, fused=True, **_OPTIONS)


def _from(module: str, name: str, **options: Any) -> Callable[[list[nn.Parameter]], Any]:
    """Makes an optimizer of a package that is imported only then."""

    def make(parameters: list[nn.Parameter]) -> Any:
        return getattr(importlib.import_module(module), name)(parameters, **_OPTIONS, **options)

    return make


_PEERS = {
    "DeepSpeedCPUAdam, fp32": _from("deepspeed.ops.adam", "DeepSpeedCPUAdam"),
    "torchao AdamWFp8, fp32 weights": _from("torchao.optim", "AdamWFp8"),
    "torchao AdamW8bit, fp32 weights": _from("torchao.optim", "AdamW8bit"),
    "torchao AdamWFp8, bf16 weights, stochastic rounding": _from(
        "torchao.optim", "AdamWFp8", bf16_stochastic_round=True
    ),
    "optimi AdamW, bf16 weights, Kahan sum": _from("optimi", "AdamW"),
    "FlashOptim FlashAdamW": _from("flashoptim", "FlashAdamW"),
    "Transformer Engine FusedAdam": _from("transformer_engine.pytorch.optimizers", "FusedAdam"),
}


def _mixed(shape: tuple[int, int], grad: Tensor) -> Callable[[], object]:
    """What mixed precision does each step: upcast the bf16 gradient, step fp32 master weights, copy them to bf16."""
    master = parameter(shape)
    optimizer = _fused([master])
    low_grad, low_weight = grad.bfloat16(), master.detach().bfloat16()

    def step() -> None:
        master.grad = low_grad.float()
        optimizer.step()
        low_weight.copy_(master.detach())

    return step


def _copy(elements: int) -> Callable[[], object]:
    source = torch.zeros(11 * elements, dtype=torch.uint8)
    target = torch.zeros_like(source)
    return lambda: target.copy_(source)
