"""The optimizer step beside what it replaces: torch's fused AdamW, and the three passes of mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eco_dist.bench.peers import BASELINE, installed_cases, parameter, torch_cases
from eco_dist.bench.rounds import Case, Timing, compare
from eco_dist.numerics import Granularity
from eco_dist.optim.kernels import kernel_for
from eco_dist.optim.kernels.cpu import CpuKernel
from eco_dist.optim.rules import Hyper, Rule
from eco_dist.optim.shard import Shard
from eco_dist.optim.state import allocate_state
from eco_dist.optim.step import Task
from eco_dist.recipe import Recipe
from eco_dist.weights import QuantizedWeight

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["BASELINE", "RECIPES", "run", "table"]

RECIPES = ("fp8", "fp8-bf16", "fp8-8bit", "paper", "fp8-residual", "int4", "bf16")
COLUMNS = 4096


def run(
    *, elements: int = 1 << 24, rounds: int = 15, recipes: Sequence[str] = RECIPES, peers: bool = False
) -> list[Timing]:
    """Time one step of one weight of `elements` parameters under each recipe, fp32 and bf16 gradients.

    Args:
        elements: a multiple of 4096; 16 Mi is far beyond the caches.
        rounds: rounds of all cases in turn.
        recipes: names of recipes.
        peers: whether optimizers of other packages that are installed run too; some compile for minutes first.

    Raises:
        ValueError: if `elements` is not a positive multiple of 4096.
    """
    if elements <= 0 or elements % COLUMNS:
        raise ValueError(f"expected elements to be a positive multiple of {COLUMNS}, got {elements}")
    shape = (elements // COLUMNS, COLUMNS)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-3
    cases = [*torch_cases(shape, grad), *(installed_cases(shape, grad) if peers else [])]
    cases.append(Case(name="check that fp32 gradients are finite", action=_check(grad), bytes=4 * elements))
    for dtype in (torch.float32, torch.bfloat16):
        name = f"mock: the bytes of fp8 without arithmetic, {_dtype(dtype)} gradients"
        touch = _touch(shape, grad.to(dtype))
        cases += [] if touch is None else [Case(name=name, action=touch, bytes=_traffic("fp8", dtype) * elements)]
    for name in recipes:
        for dtype in (torch.float32, torch.bfloat16):
            action = _eco(name, shape, grad.to(dtype))
            label = f"{name}, {_dtype(dtype)} gradients"
            cases.append(Case(name=label, action=action, bytes=_traffic(name, dtype) * elements))
    return compare(cases, rounds=rounds)


def table(timings: Sequence[Timing], *, elements: int) -> Table:
    """Ratios for a terminal."""
    from rich.table import Table

    kernel = kernel_for(torch.device("cpu")).name
    table = Table(title=f"one step of {elements:,} parameters, {torch.get_num_threads()} threads, kernel: {kernel}")
    table.add_column("what")
    for column in ("time, fused AdamW = 1", "quartiles", "bandwidth, fused AdamW = 1"):
        table.add_column(column, justify="right")
    base = timings[0].bytes
    for timing in timings:
        bandwidth = f"{timing.bytes / base / timing.ratio:.2f}" if timing.bytes else "-"
        table.add_row(timing.name, f"{timing.ratio:.2f}", f"{timing.low:.2f} - {timing.high:.2f}", bandwidth)
    return table


def _traffic(name: str, grad: torch.dtype) -> int:
    """Bytes a step reads and writes for one parameter, scales left out."""
    recipe = Recipe.from_name(name)
    assert recipe.format is not None
    resident = int(recipe.bytes_per_parameter)
    return 2 * resident + grad.itemsize


def _check(grad: Tensor) -> Callable[[], object]:
    kernel = kernel_for(grad.device)
    return lambda: kernel.is_steppable(grad)


def _dtype(dtype: torch.dtype) -> str:
    return "fp32" if dtype is torch.float32 else "bf16"


def _task(name: str, shape: tuple[int, int], grad: Tensor) -> Task:
    recipe = Recipe.from_name(name)
    weight = QuantizedWeight.from_values(parameter(shape).detach(), recipe)
    shard = Shard.of(weight, allocate_state(weight, second_moment=True))
    form = recipe.injection_in_force
    hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10, injection=form)
    return Task(shard=shard, grad=grad, rule=Rule.ADAMW, hyper=hyper)


def _touch(shape: tuple[int, int], grad: Tensor) -> Callable[[], object] | None:
    """The limit of the access pattern; None where the plain torch step runs."""
    kernel = kernel_for(grad.device)
    if not isinstance(kernel, CpuKernel):
        return None
    task = _task("fp8", shape, grad)
    return lambda: kernel.touch(task)


def _eco(name: str, shape: tuple[int, int], grad: Tensor) -> Callable[[], object]:
    """The kernel's step alone, as fused AdamW is timed: no scan of the gradients, which has a line of its own."""
    task, kernel = _task(name, shape, grad), kernel_for(grad.device)

    def step() -> None:
        if task.shard.recipe.granularity is Granularity.TENSOR:
            kernel.measure([task])
        kernel.step([task], 0, None)

    return step
