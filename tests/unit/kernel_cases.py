"""Shards, tasks and recipes that every kernel is held to the reference with."""

import copy
import itertools

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eco_dist.numerics import Format, Granularity, MomentFormat, Rounding
from eco_dist.optim.kernels import Kernel
from eco_dist.optim.kernels.reference import ReferenceKernel
from eco_dist.optim.rules import Hyper, Rule, Schedule
from eco_dist.optim.shard import Shard
from eco_dist.optim.state import allocate_state
from eco_dist.optim.step import StepStats, Task
from eco_dist.recipe import RECIPES, Compensation, Idle, Injection, Recipe, ResidualFormat
from eco_dist.weights import QuantizedWeight

REFERENCE = ReferenceKernel()
SHAPES = [(5, 300), (3, 128), (7, 1), (2, 3, 257), (0, 40), (1, 4099)]


def grid_of(format: Format) -> list[Granularity | None]:
    return list(Granularity) if format.is_scaled else [None]


def every_recipe() -> list[Recipe]:
    """All combinations that a recipe allows, but for idle groups and the moments' rounding: see `variants`."""
    recipes = set()
    for format, rounding, moments in itertools.product(Format, Rounding, MomentFormat):
        for granularity in grid_of(format):
            base = Recipe(format=format, granularity=granularity, rounding=rounding, moments=moments)
            recipes |= {base.replace(injection=injection) for injection in Injection}
            recipes |= {base.replace(compensation=c) for c in (Compensation.NONE, Compensation.MASTER)}
            recipes |= {base.replace(compensation=Compensation.RESIDUAL, residual=r) for r in ResidualFormat}
    return sorted(recipes, key=lambda recipe: recipe.name)


def variants(recipe: Recipe) -> list[Recipe]:
    """What idle groups and the rounding of moments may be under a recipe."""
    idles = [Idle.STEP] if recipe.granularity is Granularity.TENSOR else list(Idle)
    return [recipe.replace(idle=idle, moments_rounding=rounding) for idle in idles for rounding in Rounding]


def shard_of(recipe: Recipe, shape: tuple[int, ...], rule: Rule, seed: int, first_row: int = 0) -> Shard:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    values = values * torch.exp(2 * torch.randn(shape, generator=generator)) * 0.05  # subnormals in every block
    if shape[0] > 1:
        values[0] = 0
    weight = QuantizedWeight.from_values(values, recipe, tensor_id=77)
    return Shard.of(weight, allocate_state(weight, second_moment=rule is Rule.ADAMW), first_row=first_row)


def task_of(shard: Shard, rule: Rule, step: int, dtype: torch.dtype = torch.float32, maximize: bool = False) -> Task:
    generator = torch.Generator().manual_seed(1000 + step)
    grad = torch.randn(shard.shape, generator=generator) * torch.exp(3 * torch.randn(shard.shape, generator=generator))
    grad *= torch.rand(shard.shape, generator=generator) > 0.2
    grad[..., 128 * step : 128 * step + 128] = 0  # an idle block, and an idle row
    grad[1:2] = -0.0
    lr = 3e-3 if step < 3 else 3e-2  # a jump, which injection `auto` answers
    schedule = Schedule(peak=3e-3, last=3e-3) if step > 1 else Schedule()
    hyper = Hyper(
        lr=lr,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        step=step,
        maximize=maximize,
        injection=shard.recipe.injection_in_force,
        schedule=schedule,
    )
    return Task(shard=shard, grad=(grad * 1e-2).to(dtype), rule=rule, hyper=hyper)


def tensors_of(shard: Shard) -> dict[str, Tensor]:
    return {"codes": shard.codes, "scales": shard.scales, **{k: v for k, v in shard.state.items() if v.ndim}}


def take(kernel: Kernel, tasks: list[Task], stats: StepStats | None = None) -> None:
    kernel.measure([task for task in tasks if task.shard.recipe.granularity is Granularity.TENSOR])
    kernel.step(tasks, seed=0x1234567890ABCDEF, stats=stats)


def assert_equal_steps(
    kernel: Kernel, shards: list[Shard], rule: Rule, dtype: torch.dtype = torch.float32, steps: int = 3
) -> None:
    others = copy.deepcopy(shards)
    for step in range(1, steps + 1):
        take(REFERENCE, [task_of(shard, rule, step, dtype) for shard in shards])
        take(kernel, [task_of(shard, rule, step, dtype) for shard in others])
        for expected, got in zip(shards, others, strict=True):
            for key, tensor in tensors_of(expected).items():
                assert torch.equal(tensor, tensors_of(got)[key]), (expected.recipe.name, expected.shape, step, key)


def assert_other_gradients(kernel: Kernel, shape: tuple[int, int]) -> None:
    """A gradient in fp16, or with strides, is stepped as its fp32 values."""
    shards = [shard_of(RECIPES["fp8"], shape, Rule.ADAMW, seed=0) for _ in range(3)]
    tasks = [task_of(shard, Rule.ADAMW, 1, maximize=True) for shard in shards]
    half = tasks[0].grad.half()
    for task, grad in zip(tasks, (half.float(), half, half.float().t().contiguous().t()), strict=True):
        task.grad = grad
    take(REFERENCE, tasks[:1])
    take(kernel, tasks[1:])
    for shard in shards[1:]:
        assert all(torch.equal(shard_tensor, tensors_of(shards[0])[k]) for k, shard_tensor in tensors_of(shard).items())


class LargestAllocation(TorchDispatchMode):
    """Elements of the largest tensor an operation returned that is no view of what it was given."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.elements = max(self.elements, leaf.numel())
        return result
