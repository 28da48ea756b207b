"""The Triton kernel, run by Triton's interpreter on the CPU, equals the reference bit for bit.

`test_kernels_triton.py` runs this file in a process of its own: the interpreter is chosen when triton is imported.
"""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from eco_dist.numerics import Format, Granularity, MomentFormat, Rounding, grid_step, round_to_grid
from eco_dist.numerics.codec import pack, unpack
from eco_dist.optim.kernels.triton.device import grids
from eco_dist.optim.kernels.triton.kernel import TritonKernel
from eco_dist.optim.kernels.triton.kind import LaunchShape
from eco_dist.optim.rules import Rule
from eco_dist.optim.step import StepStats
from eco_dist.recipe import RECIPES, Compensation, Idle, Injection, Recipe, ResidualFormat
from tests.unit.kernel_cases import (
    REFERENCE,
    assert_equal_steps,
    assert_other_gradients,
    grid_of,
    shard_of,
    take,
    task_of,
    tensors_of,
    variants,
)

NAMED = [name for name, recipe in RECIPES.items() if recipe.quantizes]
SHAPES = [(2, 300), (2, 128), (3, 1), (2, 1, 257), (0, 40)]


@pytest.fixture(scope="module")
def kernel() -> TritonKernel:
    return TritonKernel()


# --- the pieces -------------------------------------------------------------------------------------------------------


@triton.jit
def decode_kernel(codes, values, GRID: tl.constexpr):
    place = tl.arange(0, 256)
    tl.store(values + place, grids.value_of(tl.load(codes + place).to(tl.int32), GRID))


@triton.jit
def round_kernel(x, halves, rounded, codes, steps, GRID: tl.constexpr, STOCHASTIC: tl.constexpr, N: tl.constexpr):
    place = tl.arange(0, N)
    result = grids.round_to_grid(tl.load(x + place), tl.load(halves + place), GRID, STOCHASTIC)
    tl.store(rounded + place, result)
    tl.store(codes + place, grids.code_of(result, GRID))
    tl.store(steps + place, grids.grid_step(result, GRID))


@pytest.mark.parametrize("format", [Format.E4M3, Format.E5M2, Format.INT8], ids=str)
def test_every_code_is_decoded(format: Format) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    values = torch.zeros(256)
    decode_kernel[(1,)](codes, values, GRID=format.grid)
    expected = unpack(codes.view(format.grid.storage_dtype), format, 256)
    used = expected.isfinite() & (expected.abs() <= format.grid.max)  # rounding never makes the others
    assert used.sum() >= 246
    assert torch.equal(values[used].view(torch.int32), expected[used].view(torch.int32))


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("format", [f for f in Format if f is not Format.INT4], ids=str)
def test_every_rounding_case(format: Format, stochastic: bool) -> None:
    """On the grid, between, a hair off each middle, subnormal, either sign; extreme and middling random integers."""
    grid = format.grid
    top = torch.linspace(0, grid.max if grid.bits < 16 else 3.0, 97)
    near = torch.cat((torch.tensor([0.0, 2.0**-9, 2.0**-16, 1.5 * 2.0**-9, 1.0, 0.5, 2.5, 3.5]), top))
    values = torch.cat((near, near * (1 + 2.0**-23), near * 2.0**-7, near / 3))
    values = torch.cat((values, -values)).clamp(-grid.max, grid.max)
    cases = [-32768, -1, 0, 12345, 32767] if stochastic else [0]
    missing = (0, 8192 - len(cases) * len(values))
    x = torch.nn.functional.pad(values.repeat(len(cases)), missing)
    halves = torch.nn.functional.pad(torch.tensor(cases).repeat_interleave(len(values)), missing).int()
    rounded, steps, codes = torch.zeros(8192), torch.zeros(8192), torch.zeros(8192, dtype=torch.int32)
    round_kernel[(1,)](x, halves, rounded, codes, steps, GRID=grid, STOCHASTIC=stochastic, N=8192)
    expected = round_to_grid(x, format, halves if stochastic else None)
    assert torch.equal(rounded.view(torch.int32), expected.view(torch.int32))
    assert torch.equal(codes.to(torch.int16).view(torch.uint16).int() & (2**grid.bits - 1), bits(expected, format))
    assert torch.equal(steps, grid_step(expected, format))


def bits(values: torch.Tensor, format: Format) -> torch.Tensor:
    packed = pack(values, format)
    return packed.view(torch.uint8 if format.grid.bits == 8 else torch.uint16).int()


# --- the step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMED)
def test_named_recipes_on_every_shape(kernel: TritonKernel, name: str) -> None:
    """Many tensors in one launch, full and odd widths, three steps; idle groups and stochastic moments in turn."""
    shards = [
        shard_of(recipe, shape, Rule.ADAMW, seed, first_row=seed * 2**31)
        for recipe in variants(RECIPES[name])
        for seed, shape in enumerate(SHAPES if recipe == RECIPES[name] else SHAPES[:1])
    ]
    assert_equal_steps(kernel, shards, Rule.ADAMW)


@pytest.mark.parametrize("injection", Injection)
@pytest.mark.parametrize("name", ["fp8-8bit", "paper"])
def test_every_injection_with_bf16_gradients(kernel: TritonKernel, name: str, injection: Injection) -> None:
    shards = [shard_of(RECIPES[name].replace(injection=injection), (2, 160), Rule.ADAMW, seed=5)]
    assert_equal_steps(kernel, shards, Rule.ADAMW, torch.bfloat16)


def every_kind() -> list[Recipe]:
    """Formats x granularities x moments, the rest in turn: every value of every field beside every format."""
    rest = itertools.cycle(
        itertools.product(
            [*((c, ResidualFormat.INT8) for c in Compensation), (Compensation.RESIDUAL, ResidualFormat.FP32)],
            Rounding,
            Rounding,
            Idle,
        )
    )
    recipes = []
    for format, moments in itertools.product(Format, MomentFormat):
        for granularity in grid_of(format):
            (compensation, residual), rounding, moments_rounding, idle = next(rest)
            recipes.append(
                Recipe(
                    format=format,
                    granularity=granularity,
                    moments=moments,
                    compensation=compensation,
                    residual=residual,
                    rounding=rounding,
                    moments_rounding=moments_rounding,
                    idle=Idle.STEP if granularity is Granularity.TENSOR else idle,
                )
            )
    return recipes


@pytest.mark.parametrize("rule", Rule)
def test_recipes_without_a_name(kernel: TritonKernel, rule: Rule) -> None:
    recipes = every_kind()
    assert len(recipes) == 13 * 4
    for number, recipe in enumerate(recipes[rule is Rule.SGD :: 2]):
        assert_equal_steps(kernel, [shard_of(recipe, (1, 140), rule, number)], rule, steps=2)


@pytest.mark.parametrize("name", ["fp8", "paper", "int4"])
def test_a_cut_scale_group(kernel: TritonKernel, name: str) -> None:
    """Where owners agree on an absmax, its scale is taken, and what was measured is what the reference measures."""
    shards = [shard_of(RECIPES[name], (4, 200), Rule.ADAMW, seed=1) for _ in range(2)]
    tasks = [task_of(shard, Rule.ADAMW, 1) for shard in shards]
    for backend, task in zip((REFERENCE, kernel), tasks, strict=True):
        backend.measure([task])
    assert torch.equal(tasks[0].absmax, tasks[1].absmax)
    for backend, task in zip((REFERENCE, kernel), tasks, strict=True):
        task.absmax = task.absmax * 1.5
        backend.step([task], 3, None)
    for key, tensor in tensors_of(shards[0]).items():
        assert torch.equal(tensor, tensors_of(shards[1])[key]), key


@pytest.mark.parametrize("name", ["fp8-8bit", "paper"])
def test_the_launch_shape_changes_nothing(kernel: TritonKernel, name: str) -> None:
    other = TritonKernel(lambda kind: LaunchShape(blocks=2, warps=1))
    shards = [shard_of(RECIPES[name], (3, 700), Rule.ADAMW, seed=1) for _ in range(2)]
    for backend, shard in zip((kernel, other), shards, strict=True):
        take(backend, [task_of(shard, Rule.ADAMW, 1)])
    assert all(torch.equal(tensor, tensors_of(shards[1])[key]) for key, tensor in tensors_of(shards[0]).items())


def test_a_whole_tensor_that_nobody_measured(kernel: TritonKernel) -> None:
    shards = [shard_of(RECIPES["int4"], (4, 200), Rule.ADAMW, seed=1) for _ in range(2)]
    for backend, shard in zip((REFERENCE, kernel), shards, strict=True):
        backend.step([task_of(shard, Rule.ADAMW, 1)], 3, None)
    assert all(torch.equal(tensor, tensors_of(shards[1])[key]) for key, tensor in tensors_of(shards[0]).items())


@pytest.mark.parametrize("recipe", [RECIPES["int4"], RECIPES["bf16"], RECIPES["fp8-master"],
                                    RECIPES["paper"].replace(idle="skip")], ids=lambda recipe: recipe.name)  # fmt: skip
def test_statistics(kernel: TritonKernel, recipe: Recipe) -> None:
    shards = [shard_of(recipe, (5, 300), Rule.ADAMW, seed=0) for _ in range(2)]
    expected, got = StepStats(), StepStats()
    for step in (1, 2):
        take(REFERENCE, [task_of(shards[0], Rule.ADAMW, step)], expected)
        take(kernel, [task_of(shards[1], Rule.ADAMW, step)], got)
    assert (got.moved, got.elements) == (expected.moved, expected.elements)
    assert got.sum_squared_error == pytest.approx(expected.sum_squared_error, rel=1e-12)
    assert got.sum_squared_weight == pytest.approx(expected.sum_squared_weight, rel=1e-12)


@pytest.mark.parametrize("seed", [0, 2**64 - 1, 2**63, -1])
def test_all_64_bits_of_a_seed(kernel: TritonKernel, seed: int) -> None:
    shards = [shard_of(RECIPES["fp8"], (2, 128), Rule.ADAMW, seed=0) for _ in range(2)]
    for backend, shard in zip((REFERENCE, kernel), shards, strict=True):
        backend.step([task_of(shard, Rule.ADAMW, 1)], seed, None)
    assert torch.equal(shards[0].codes, shards[1].codes)


def test_maximize_and_other_gradients(kernel: TritonKernel) -> None:
    assert_other_gradients(kernel, (32, 48))
