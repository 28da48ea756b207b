"""The CPU kernel equals the reference bit for bit: codes, scales, moments, residuals, master weights, statistics."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eco_dist import ECOAdamW, quantize_weights_
from eco_dist.numerics import Granularity
from eco_dist.optim.kernels.build import ISA_FLAGS, supported_isas
from eco_dist.optim.kernels.cpu import CpuKernel
from eco_dist.optim.rules import Hyper, Rule
from eco_dist.optim.state import allocate_state
from eco_dist.optim.step import PlainTask, StepStats
from eco_dist.recipe import RECIPES, Recipe
from tests.unit.kernel_cases import (
    REFERENCE,
    SHAPES,
    LargestAllocation,
    assert_equal_steps,
    assert_other_gradients,
    every_recipe,
    shard_of,
    take,
    task_of,
    tensors_of,
    variants,
)

BUILDS = [isa for isa in ISA_FLAGS if isa in supported_isas()]


@pytest.fixture(scope="module", params=BUILDS)
def kernel(request: pytest.FixtureRequest) -> CpuKernel:
    return CpuKernel(request.param)


@pytest.mark.parametrize("rule", Rule)
def test_every_recipe_is_bit_equal(kernel: CpuKernel, rule: Rule) -> None:
    """Formats x granularities x rounding x compensations x injections x moments, full and short blocks, three steps."""
    recipes = every_recipe()
    assert len(recipes) == 13 * 2 * 4 * 7
    for number, base in enumerate(recipes):
        recipe = variants(base)[(number + (rule is Rule.SGD)) % len(variants(base))]
        shards = [shard_of(recipe, shape, rule, seed=number) for shape in ((2, 300), (1, 5), (3, 256))]
        assert_equal_steps(kernel, shards, rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.quantizes])
def test_named_recipes_on_every_shape(kernel: CpuKernel, name: str, dtype: torch.dtype) -> None:
    """Many tensors of many shapes in one call, with gradients in fp32 and bf16."""
    shards = [
        shard_of(recipe, shape, Rule.ADAMW, seed)
        for recipe in variants(RECIPES[name])
        for seed, shape in enumerate(SHAPES)
    ]
    assert_equal_steps(kernel, shards, Rule.ADAMW, dtype)


@settings(max_examples=40)
@given(
    rows=st.integers(0, 6),
    columns=st.integers(1, 600),
    first_row=st.integers(0, 2**40),
    recipe=st.sampled_from([recipe for recipe in RECIPES.values() if recipe.quantizes]),
)
def test_any_shape_and_offset(rows: int, columns: int, first_row: int, recipe: Recipe) -> None:
    kernel = CpuKernel(BUILDS[0])
    shards = [shard_of(recipe, (rows, columns), Rule.ADAMW, columns, first_row)]
    assert_equal_steps(kernel, shards, Rule.ADAMW, steps=2)


@pytest.mark.parametrize("name", ["fp8", "paper", "int4", "fp8-8bit", "fp8-residual-8bit", "bf16"])
def test_a_cut_tensor_is_stepped_as_the_whole(kernel: CpuKernel, name: str) -> None:
    """Rows 0-2 and 3-6 stepped apart hold the bits of rows 0-6 stepped together."""
    whole = shard_of(RECIPES[name], (7, 300), Rule.ADAMW, seed=1)
    parts = []
    for start, end in ((0, 3), (3, 7)):
        part = copy.deepcopy(whole)
        rows = {key: tensor[start:end].clone() for key, tensor in part.state.items() if tensor.ndim}
        one_scale = whole.recipe.granularity is Granularity.TENSOR
        scales = part.scales if one_scale else part.scales[start:end].clone()
        codes = part.codes[start:end].clone()
        parts.append(dataclasses.replace(part, codes=codes, scales=scales, state=rows, first_row=start))
    task = task_of(whole, Rule.ADAMW, 1)
    pieces = [dataclasses.replace(task, shard=part, grad=task.grad[rows]) for part, rows in zip(
        parts, (slice(0, 3), slice(3, 7)), strict=True
    )]  # fmt: skip
    take(kernel, [task])
    if whole.recipe.granularity is Granularity.TENSOR:
        kernel.measure(pieces)
        agreed = torch.maximum(pieces[0].absmax, pieces[1].absmax)
        for piece in pieces:
            piece.absmax = agreed.clone()
        kernel.step(pieces, seed=0x1234567890ABCDEF, stats=None)
    else:
        take(kernel, pieces)
    for key, tensor in tensors_of(whole).items():
        joined = [tensors_of(part)[key] for part in parts]
        if key == "scales" and whole.recipe.granularity is Granularity.TENSOR:
            assert all(torch.equal(part, tensor) for part in joined)
        else:
            assert torch.equal(torch.cat(joined), tensor), key


@pytest.mark.parametrize("name", ["fp8", "paper", "fp8-8bit", "fp8-residual", "bf16"])
@pytest.mark.parametrize("backend", ["kernel", "reference"])
def test_idle_groups_are_left_alone(kernel: CpuKernel, name: str, backend: str) -> None:
    """Codes, scales, moments, residual: not a bit of a group without gradient changes, whatever momentum it has."""
    recipe = RECIPES[name].replace(idle="skip", rounding="nearest")
    shard = shard_of(recipe, (5, 384), Rule.ADAMW, seed=0)
    stepper = kernel if backend == "kernel" else REFERENCE
    grad = torch.randn(5, 384)
    task = task_of(shard, Rule.ADAMW, 1)
    task.grad = grad
    take(stepper, [task])
    before = copy.deepcopy(shard)
    grad = grad.clone()
    grad[2] = 0
    grad[0, 128:256] = 0
    task = task_of(shard, Rule.ADAMW, 2)
    task.grad = grad
    take(stepper, [task])
    for key, tensor in tensors_of(shard).items():
        old = tensors_of(before)[key]
        assert torch.equal(tensor[2], old[2]), key
        assert key != "exp_avg" or not torch.equal(tensor[1], old[1])
        if recipe.granularity is not Granularity.ROW and tensor.shape[-1] == 384:
            assert torch.equal(tensor[0, 128:256], old[0, 128:256]), key


def test_idle_groups_take_the_step_that_rescales_momenta(kernel: CpuKernel) -> None:
    """Or what is pending in them would be paid back in the old learning rate's units."""
    shard = shard_of(RECIPES["fp8"].replace(idle="skip"), (2, 128), Rule.ADAMW, seed=0)
    take(kernel, [task_of(shard, Rule.ADAMW, 1)])
    momentum = shard.state["exp_avg"].clone()
    assert momentum.abs().sum() > 0
    task = task_of(shard, Rule.ADAMW, 3)  # ten times the last learning rate
    task.grad = torch.zeros(2, 128)
    assert task.hyper.momentum_rescale == pytest.approx(0.1)
    take(kernel, [task])
    assert not torch.equal(shard.state["exp_avg"], momentum)


def test_threads_change_nothing(kernel: CpuKernel) -> None:
    results = []
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            shard = shard_of(RECIPES["fp8-8bit"], (37, 4099), Rule.ADAMW, seed=0)
            take(kernel, [task_of(shard, Rule.ADAMW, 1)])
        finally:
            torch.set_num_threads(before)
        results.append(tensors_of(shard))
    for other in results[1:]:
        assert all(torch.equal(other[key], tensor) for key, tensor in results[0].items())


STATISTICS = [RECIPES[name] for name in ("fp8", "int4", "bf16")]
STATISTICS += [RECIPES[name].replace(idle="skip") for name in ("fp8", "paper")]


@pytest.mark.parametrize("recipe", STATISTICS, ids=lambda recipe: recipe.name)
def test_statistics(kernel: CpuKernel, recipe: Recipe) -> None:
    shards = [shard_of(recipe, (5, 300), Rule.ADAMW, seed=0) for _ in range(2)]
    expected, got = StepStats(), StepStats()
    take(REFERENCE, [task_of(shards[0], Rule.ADAMW, 1)], expected)
    take(kernel, [task_of(shards[1], Rule.ADAMW, 1)], got)
    assert (got.moved, got.elements) == (expected.moved, expected.elements)
    assert got.sum_squared_error == pytest.approx(expected.sum_squared_error, rel=1e-12)
    assert got.sum_squared_weight == pytest.approx(expected.sum_squared_weight, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**63, 2.0**62, 0.0])
@pytest.mark.parametrize("place", [0, 5, 16_384, 40_000])
def test_gradients_that_cannot_be_used(kernel: CpuKernel, dtype: torch.dtype, value: float, place: int) -> None:
    grad = torch.randn(40_001).to(dtype)
    grad[place] = value
    assert kernel.is_steppable(grad) == bool(REFERENCE.is_steppable(grad)) == (abs(value) < 2.0**63)


def test_maximize_and_other_dtypes(kernel: CpuKernel) -> None:
    assert_other_gradients(kernel, (64, 96))


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("shape", [(300,), (128, 3), (1,), (0,), (4, 128), (1000, 37)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_parameters_are_bit_equal(
    kernel: CpuKernel, rule: Rule, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    weights = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    states = [allocate_state(weight, second_moment=rule is Rule.ADAMW) for weight in weights]
    for step in (1, 2, 3):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step)
        for backend, weight, state in zip((REFERENCE, kernel), weights, states, strict=True):
            backend.step_plain([PlainTask(weight=weight, grad=grad, state=state, rule=rule, hyper=hyper)])
        assert torch.equal(*weights)
        assert all(torch.equal(states[1][key], value) for key, value in states[0].items())


def test_plain_parameters_of_another_kind_take_the_reference(kernel: CpuKernel) -> None:
    """bf16, and fp32 with strides."""
    for weight in (torch.randn(8, 8).bfloat16(), torch.randn(8, 8).t()):
        other = weight.clone()
        states = [allocate_state(w, second_moment=True) for w in (weight, other)]
        hyper = Hyper(lr=1e-1, beta1=0.9, beta2=0.95, eps=1e-8)
        grad = torch.randn(8, 8)
        for backend, w, state in zip((REFERENCE, kernel), (weight, other), states, strict=True):
            backend.step_plain([PlainTask(weight=w, grad=grad, state=state, rule=Rule.ADAMW, hyper=hyper)])
        assert torch.equal(weight, other)


@pytest.mark.parametrize("name", ["fp8", "fp8-8bit", "fp8-residual", "paper", "bf16", "fp32-master"])
def test_a_step_allocates_nothing_of_a_parameters_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel works in blocks; the plain torch step, which does allocate, shows that this test can fail."""
    layer = torch.nn.Linear(256, 512)
    quantize_weights_(layer, name)
    optimizer = ECOAdamW(layer.parameters(), lr=1e-3)
    for backend, allocates in (("cpu", False), ("reference", True)):
        monkeypatch.setenv("ECO_DIST_KERNEL", backend)
        for parameter in layer.parameters():
            parameter.grad = torch.ones(parameter.shape)
        optimizer.step()  # the first one allocates the state
        with LargestAllocation() as largest:
            optimizer.step()
        assert (largest.elements >= layer.weight.numel()) == allocates
