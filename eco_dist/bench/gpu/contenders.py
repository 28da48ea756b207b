"""Ways to take one AdamW step on a GPU: ours, torch's, and those of other packages where they are installed.

A contender's builder allocates `tensors` weights of `elements` numbers in all and returns what takes one step of them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from eco_dist.numerics import Granularity
from eco_dist.optim.kernels import Kernel
from eco_dist.optim.rules import Hyper, Rule
from eco_dist.optim.shard import Shard
from eco_dist.optim.state import allocate_state
from eco_dist.optim.step import Task
from eco_dist.recipe import RECIPES, Recipe
from eco_dist.weights import QuantizedWeight

Step = Callable[[], object]
COLUMNS = 4096
LR, BETAS, EPS, DECAY = 1e-3, (0.9, 0.95), 1e-8, 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What is stepped: `tensors` matrices of 4096 columns, `elements` in all."""

    elements: int
    tensors: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Of each matrix."""
        return self.elements // self.tensors // COLUMNS, COLUMNS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One way to take a step.

    Attributes:
        name: what it is.
        traffic: bytes it must read and write for one element, scales left out.
        resident: bytes it keeps of one element, its gradient included, and what it needs in passing.
        build: makes the weights on a device and returns the step.
    """

    name: str
    traffic: float
    resident: float
    build: Callable[[Size, torch.device], Step]


def contenders(kernel: Kernel, recipes: Sequence[str]) -> list[Contender]:
    """All of them, ours first."""
    ours = [
        Contender(
            name=f"eco_dist `{name}`, {'bf16' if dtype is torch.bfloat16 else 'fp32'} gradients",
            traffic=_traffic(RECIPES[name], dtype),
            resident=RECIPES[name].bytes_per_parameter + dtype.itemsize,
            build=functools.partial(_eco, kernel, RECIPES[name], dtype),
        )
        for name in recipes
        for dtype in (torch.bfloat16, torch.float32)
    ]
    fp32, bf16 = torch.float32, torch.bfloat16
    adamw, fused = "torch.optim:AdamW", {"fused": True}
    return [
        *ours,
        Contender(name="torch AdamW fused, fp32", traffic=28, resident=16, build=_peer(adamw, fp32, fused)),
        Contender(
            name="torch AdamW fused, fp32 master, bf16 gradient upcast, bf16 copy",
            traffic=40,
            resident=24,
            build=_mixed,
        ),
        Contender(name="torch AdamW fused, pure bf16", traffic=14, resident=8, build=_peer(adamw, bf16, fused)),
        Contender(name="torchao AdamWFp8, fp32", traffic=16, resident=10, build=_peer("torchao.optim:AdamWFp8", fp32)),
        Contender(
            name="torchao AdamW8bit, fp32", traffic=16, resident=10, build=_peer("torchao.optim:AdamW8bit", fp32)
        ),
        Contender(
            name="FlashOptim FlashAdamW, bf16", traffic=12, resident=7, build=_peer("flashoptim:FlashAdamW", bf16)
        ),
        Contender(
            name="Transformer Engine FusedAdam, fp32",
            traffic=28,
            resident=16,
            build=_peer("transformer_engine.pytorch.optimizers:FusedAdam", fp32),
        ),
    ]


def _traffic(recipe: Recipe, grad: torch.dtype) -> float:
    """Every resident byte is read and written once, a gradient read; one scale for the tensor takes a pass to find."""
    resident = int(2 * recipe.bytes_per_parameter) / 2
    passes = 2 if recipe.granularity is Granularity.TENSOR else 1
    return resident * (1 + passes) + grad.itemsize * passes


def _values(size: Size, device: torch.device, dtype: torch.dtype = torch.float32, scale: float = 0.02) -> list[Tensor]:
    return [torch.randn(size.shape, device=device, dtype=dtype) * scale for _ in range(size.tensors)]


def _eco(kernel: Kernel, recipe: Recipe, grad: torch.dtype, size: Size, device: torch.device) -> Step:
    """The kernel's step alone, as the others are timed: without a scan of the gradients."""
    hyper = Hyper(
        lr=LR,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
        weight_decay=DECAY,
        step=10,
        injection=recipe.injection_in_force,
    )
    tasks = []
    for number, (values, gradient) in enumerate(
        zip(_values(size, device), _values(size, device, grad, 1e-3), strict=True)
    ):
        weight = QuantizedWeight.from_values(values, recipe)
        shard = Shard.of(weight, allocate_state(weight, second_moment=True), tensor_id=number)
        tasks.append(Task(shard=shard, grad=gradient, rule=Rule.ADAMW, hyper=hyper))

    def step() -> None:
        if recipe.granularity is Granularity.TENSOR:
            kernel.measure(tasks)
        kernel.step(tasks, 0, None)

    return step


def _peer(path: str, dtype: torch.dtype, options: Mapping[str, object] | None = None) -> Callable[..., Step]:
    """A `torch.optim.Optimizer` given as "module:class"."""

    def build(size: Size, device: torch.device) -> Step:
        module, name = path.split(":")
        optimizer_class = getattr(importlib.import_module(module), name)
        parameters = [nn.Parameter(values) for values in _values(size, device, dtype)]
        for parameter, gradient in zip(parameters, _values(size, device, dtype, 1e-3), strict=True):
            parameter.grad = gradient
        optimizer: torch.optim.Optimizer = optimizer_class(
            parameters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **(options or {})
        )
        return optimizer.step

    return build


def _mixed(size: Size, device: torch.device) -> Step:
    """What mixed precision does each step: upcast bf16 gradients, step fp32 master weights, copy them to bf16."""
    masters = [nn.Parameter(values) for values in _values(size, device)]
    copies = [master.detach().bfloat16() for master in masters]
    gradients = _values(size, device, torch.bfloat16, 1e-3)
    optimizer = torch.optim.AdamW(masters, lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True)

    def step() -> None:
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient.float()
        optimizer.step()
        torch._foreach_copy_(copies, [master.detach() for master in masters])

    return step
