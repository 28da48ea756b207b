"""The CPU kernel's AVX-512 build equals the reference where no processor has AVX-512.

Its intrinsics are replaced by AVX2 on both halves (`avx512_by_halves.h`); everything else, vectors of 16 lanes and what
depends on their width, is as it is built for such a processor.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eco_dist.optim.kernels import build
from eco_dist.optim.kernels.cpu import CpuKernel
from eco_dist.optim.rules import Rule
from eco_dist.recipe import RECIPES, Recipe
from tests.unit.kernel_cases import SHAPES, assert_equal_steps, every_recipe, shard_of, variants

HEADER = Path(__file__).with_name("avx512_by_halves.h")
NAME = "avx512-by-halves"

pytestmark = pytest.mark.skipif("avx2" not in build.supported_isas(), reason="both halves are AVX2's")


@pytest.fixture(scope="module")
def kernel() -> Iterator[CpuKernel]:
    digest = hashlib.blake2s(HEADER.read_bytes(), digest_size=8).hexdigest()
    flags = [*build.ISA_FLAGS["avx2"], "-O1", "-include", str(HEADER), f"-DHALVES_DIGEST=0x{digest}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build.ISA_FLAGS, NAME, flags)
        kernel = CpuKernel(NAME)
    assert kernel.name == "cpu, avx512"
    return kernel


@pytest.mark.parametrize("rule", Rule)
def test_every_recipe_is_bit_equal(kernel: CpuKernel, rule: Rule) -> None:
    """A third of all combinations for each rule."""
    for number, base in enumerate(every_recipe()[list(Rule).index(rule) :: len(Rule)]):
        recipe = variants(base)[number % len(variants(base))]
        assert_equal_steps(kernel, [shard_of(recipe, shape, rule, seed=number) for shape in ((2, 300), (3, 256))], rule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES.values() if recipe.quantizes], ids=lambda r: r.name)
def test_named_recipes_on_every_shape(kernel: CpuKernel, recipe: Recipe, dtype: torch.dtype) -> None:
    shards = [shard_of(recipe, shape, Rule.ADAMW, seed) for seed, shape in enumerate(SHAPES)]
    assert_equal_steps(kernel, shards, Rule.ADAMW, dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 2.0**63])
def test_gradients_that_cannot_be_used(kernel: CpuKernel, value: float) -> None:
    for place in (0, 15, 16, 36):
        grad = torch.ones(37)
        assert kernel.is_steppable(grad)
        grad[place] = value
        assert not kernel.is_steppable(grad)
