"""The optimizer step beside what it replaces: torch's fused AdamW, and the three passes of mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from eco_dist.bench.rounds import Case, Timing, compare
from eco_dist.numerics import Granularity
from eco_dist.optim.kernels import kernel_for
from eco_dist.optim.rules import Hyper, Rule
from eco_dist.optim.shard import Shard
from eco_dist.optim.state import allocate_state
from eco_dist.optim.step import Task
from eco_dist.recipe import Recipe
from eco_dist.weights import QuantizedWeight

if TYPE_CHECKING:
    from rich.table import Table

BASELINE = "torch AdamW fused, fp32"
RECIPES = ("fp8", "fp8-bf16", "fp8-8bit", "paper", "fp8-residual", "int4", "bf16")
COLUMNS = 4096


def run(*, elements: int = 1 << 24, rounds: int = 15, recipes: Sequence[str] = RECIPES) -> list[Timing]:
    """Time one step of one weight of `elements` parameters under each recipe, fp32 and bf16 gradients.

    Args:
        elements: a multiple of 4096; 16 Mi is far beyond the caches.
        rounds: rounds of all cases in turn.
        recipes: names of recipes.

    Raises:
        ValueError: if `elements` is not a positive multiple of 4096.
    """
    if elements <= 0 or elements % COLUMNS:
        raise ValueError(f"expected elements to be a positive multiple of {COLUMNS}, got {elements}")
    shape = (elements // COLUMNS, COLUMNS)
    generator = torch.Generator().manual_seed(0)
    grad = torch.randn(shape, generator=generator) * 1e-3
    cases = [
        Case(name=BASELINE, action=_fused(shape, grad), bytes=28 * elements),
        Case(name="mixed precision: fp32 master, bf16 gradient upcast, bf16 copy", action=_mixed(shape, grad)),
        Case(name="a copy of the bytes of fp8 (22 B a parameter)", action=_copy(elements), bytes=22 * elements),
        Case(name="check that fp32 gradients are finite", action=_check(grad), bytes=4 * elements),
    ]
    for name in recipes:
        for dtype in (torch.float32, torch.bfloat16):
            action = _eco(name, shape, grad.to(dtype))
            label = f"{name}, {'fp32' if dtype is torch.float32 else 'bf16'} gradients"
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


def _parameter(shape: tuple[int, int]) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02)


def _fused(shape: tuple[int, int], grad: Tensor) -> Callable[[], object]:
    parameter = _parameter(shape)
    parameter.grad = grad
    return torch.optim.AdamW([parameter], lr=1e-3, fused=True).step


def _mixed(shape: tuple[int, int], grad: Tensor) -> Callable[[], object]:
    """What mixed precision does each step: upcast the bf16 gradient, step fp32 master weights, copy them to bf16."""
    master = _parameter(shape)
    optimizer = torch.optim.AdamW([master], lr=1e-3, fused=True)
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


def _check(grad: Tensor) -> Callable[[], object]:
    kernel = kernel_for(grad.device)
    return lambda: kernel.is_steppable(grad)


def _eco(name: str, shape: tuple[int, int], grad: Tensor) -> Callable[[], object]:
    """The kernel's step alone, as fused AdamW is timed: no scan of the gradients, which has a line of its own."""
    recipe = Recipe.from_name(name)
    weight = QuantizedWeight.from_values(_parameter(shape).detach(), recipe)
    shard = Shard.of(weight, allocate_state(weight, second_moment=True))
    form = recipe.injection_in_force
    hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, step=10, injection=form)
    task = Task(shard=shard, grad=grad, rule=Rule.ADAMW, hyper=hyper)
    kernel = kernel_for(grad.device)

    def step() -> None:
        if recipe.granularity is Granularity.TENSOR:
            kernel.measure([task])
        kernel.step([task], 0, None)

    return step
