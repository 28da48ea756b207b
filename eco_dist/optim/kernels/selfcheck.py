"""A kernel is used only if it reproduces the reference on this processor.

The builds for other instruction sets come from one source, but a compiler or a processor that was never tried may still
differ. A few hundred elements, once a process, tell.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from eco_dist.optim.kernels.reference import ReferenceKernel
from eco_dist.optim.rules import Hyper, Rule
from eco_dist.optim.shard import Shard
from eco_dist.optim.state import allocate_state
from eco_dist.optim.step import Task
from eco_dist.recipe import Recipe
from eco_dist.weights import QuantizedWeight

if TYPE_CHECKING:
    from eco_dist.optim.kernels import Kernel

_RECIPES = ("fp8", "fp8-bf16", "fp8-8bit")
_SHAPES = ((3, 256), (2, 300))


def reproduces_reference(kernel: Kernel) -> bool:
    """Whether two steps of a few small weights give the reference's bits."""
    return all(_agrees(kernel, Recipe.from_name(name), shape) for name in _RECIPES for shape in _SHAPES)


def _agrees(kernel: Kernel, recipe: Recipe, shape: tuple[int, int]) -> bool:
    # No random generator: importing or stepping must not move the user's.
    values = torch.linspace(-3, 3, shape[0] * shape[1]).pow(5).view(shape)
    weight = QuantizedWeight.from_values(values, recipe)
    expected = Shard.of(weight, allocate_state(weight, second_moment=True), first_row=5, tensor_id=1)
    got = copy.deepcopy(expected)
    for step in (1, 2):
        grad = (values * step).sin()
        hyper = Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step)
        for backend, shard in ((ReferenceKernel(), expected), (kernel, got)):
            backend.step([Task(shard=shard, grad=grad, rule=Rule.ADAMW, hyper=hyper)], 7, None)
    pairs = [(expected.codes, got.codes), (expected.scales, got.scales)]
    pairs += [(value, got.state[key]) for key, value in expected.state.items()]
    return all(torch.equal(left, right) for left, right in pairs)
