"""The fallback without a kernel: the reference's bits, and nothing of a weight's size allocated."""

import copy

import pytest
import torch

from eco_dist import ECOAdamW, quantize_weights_
from eco_dist.optim.kernels import chunked
from eco_dist.optim.kernels.chunked import ChunkedKernel
from eco_dist.optim.rules import Rule
from eco_dist.optim.step import StepStats
from eco_dist.recipe import RECIPES
from tests.unit.kernel_cases import REFERENCE, LargestAllocation, shard_of, take, task_of, tensors_of


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.quantizes])
def test_chunks_are_bit_equal(name: str, rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked, "CHUNK", 700)  # two rows of 300
    shards = [shard_of(RECIPES[name], shape, rule, 1) for shape in ((5, 300), (2, 3, 257), (0, 40), (1, 1))]
    others = copy.deepcopy(shards)
    expected, got = StepStats(), StepStats()
    for step in (1, 2, 3):
        take(REFERENCE, [task_of(shard, rule, step) for shard in shards], expected)
        take(ChunkedKernel(), [task_of(shard, rule, step) for shard in others], got)
    for left, right in zip(shards, others, strict=True):
        assert all(torch.equal(value, tensors_of(right)[key]) for key, value in tensors_of(left).items())
    assert (got.moved, got.elements) == (expected.moved, expected.elements)


@pytest.mark.parametrize("name", ["fp8-8bit", "int4"])
def test_nothing_of_a_weights_size_is_allocated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECO_DIST_KERNEL", "chunked")
    layer = torch.nn.Linear(1024, 1024, bias=False)
    quantize_weights_(layer, name)
    layer.weight.grad = torch.ones(layer.weight.shape)
    optimizer = ECOAdamW(layer.parameters(), lr=1e-3, max_grad_norm=1.0)
    optimizer.step()  # the first one allocates the state
    with LargestAllocation() as largest:
        optimizer.step()
    assert 0 < largest.elements <= 4 * chunked.CHUNK  # of philox's words
