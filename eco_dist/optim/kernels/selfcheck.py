"""A kernel is used only if it reproduces the reference on this device.

The builds for other instruction sets and GPUs come from one source, but a compiler or a processor that was never tried
may still differ. A few hundred elements, once a process, tell.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from eco_dist.numerics import Granularity
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


def reproduces_reference(kernel: Kernel, device: torch.device | None = None) -> bool:
    """Whether two steps of a few small weights give the reference's bits; on the CPU unless told otherwise."""
    recipes = map(Recipe.from_name, _RECIPES)
    return not any(differences(kernel, recipe, shape, device=device) for recipe in recipes for shape in _SHAPES)


def differences(
    kernel: Kernel,
    recipe: Recipe,
    shape: tuple[int, int],
    *,
    device: torch.device | None = None,
    grad_dtype: torch.dtype = torch.float32,
) -> dict[str, int]:
    """How many stored numbers of a weight differ from the reference's after two AdamW steps.

    Args:
        kernel: the backend.
        recipe: of the weight.
        shape: of the weight.
        device: where; the CPU unless told otherwise.
        grad_dtype: fp32 or bf16.

    Returns:
        Tensor (codes, scales, or a key of `StateKey`) -> count; tensors without a difference are left out.
    """
    # No random generator: importing or stepping must not move the user's.
    values = torch.linspace(-3, 3, shape[0] * shape[1], device=device).pow(5).view(shape)
    weight = QuantizedWeight.from_values(values, recipe)
    expected = Shard.of(weight, allocate_state(weight, second_moment=True), first_row=5, tensor_id=1)
    got = copy.deepcopy(expected)
    for step in (1, 2):
        grad = (values * step).sin().to(grad_dtype)
        hyper = Hyper(
            lr=1e-2,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            weight_decay=0.1,
            step=step,
            injection=recipe.injection_in_force,
        )
        for backend, shard in ((ReferenceKernel(), expected), (kernel, got)):
            task = Task(shard=shard, grad=grad, rule=Rule.ADAMW, hyper=hyper)
            if recipe.granularity is Granularity.TENSOR:
                backend.measure([task])
            backend.step([task], 7, None)
    pairs = {"codes": (expected.codes, got.codes), "scales": (expected.scales, got.scales)}
    pairs |= {key: (value, got.state[key]) for key, value in expected.state.items()}
    counts = {key: int((left != right).sum()) for key, (left, right) in pairs.items()}
    return {key: count for key, count in counts.items() if count}
