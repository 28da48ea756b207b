"""How the Triton kernel launches, and what else it does, in the interpreter as `kernels_triton_interpreted.py` is."""

import copy
import dataclasses

import pytest
import torch

from eco_dist import ECOAdamW, quantize_weights_
from eco_dist.optim import kernels
from eco_dist.optim.kernels.triton import batch, load
from eco_dist.optim.kernels.triton import kernel as triton_kernel
from eco_dist.optim.kernels.triton.kernel import TritonKernel
from eco_dist.optim.rules import Hyper, Rule
from eco_dist.optim.state import allocate_state
from eco_dist.optim.step import PlainTask
from eco_dist.recipe import RECIPES
from tests.unit.kernel_cases import (
    REFERENCE,
    LargestAllocation,
    shard_of,
    take,
    task_of,
    tensors_of,
)


@pytest.fixture(scope="module")
def kernel() -> TritonKernel:
    return TritonKernel()


# --- high-precision parameters, finiteness ----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_plain_parameters_are_bit_equal(kernel: TritonKernel, rule: Rule, dtype: torch.dtype) -> None:
    """Many shapes in one launch; bf16 weights and weights with strides take the reference."""
    weights = [torch.randn(shape) for shape in ((300,), (16, 9), (1,), (0,), (3, 128))]
    weights += [torch.randn(8, 8).bfloat16(), torch.randn(8, 8).t()]
    pairs = [(weight, weight.clone()) for weight in weights]
    states = [[allocate_state(weight, second_moment=rule is Rule.ADAMW) for weight in pair] for pair in pairs]
    for step in (1, 2):
        hyper = Hyper(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=step)
        grads = [torch.randn(weight.shape).to(dtype) for weight in weights]
        for side, backend in enumerate((REFERENCE, kernel)):
            backend.step_plain(
                [
                    PlainTask(weight=pair[side], grad=grad, state=state[side], rule=rule, hyper=hyper)
                    for pair, state, grad in zip(pairs, states, grads, strict=True)
                ]
            )
    for pair, state in zip(pairs, states, strict=True):
        assert torch.equal(*pair)
        assert all(torch.equal(state[1][key], value) for key, value in state[0].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 2.0**63, -(2.0**63), 2.0**62, 0.0])
def test_gradients_that_cannot_be_used(kernel: TritonKernel, dtype: torch.dtype, value: float) -> None:
    grad = torch.randn(5001).to(dtype)
    grad[4000] = value
    usable = kernel.is_steppable(grad)
    assert usable.dtype is torch.bool
    assert usable.shape == ()
    assert bool(usable) == bool(REFERENCE.is_steppable(grad)) == bool(kernel.norm(grad) < 2.0**63)
    assert bool(kernel.is_steppable(grad[:0]))


# --- launching --------------------------------------------------------------------------------------------------------


def test_tables_are_uploaded_only_when_tensors_move(kernel: TritonKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    uploads = []
    upload = batch._upload
    monkeypatch.setattr(batch, "_upload", lambda *tables: (uploads.append(tables[1].shape[1]), upload(*tables)))
    shards = [shard_of(RECIPES["fp8"], (2, 128), Rule.ADAMW, seed) for seed in range(3)]
    tasks = [task_of(shard, Rule.ADAMW, 1) for shard in shards]
    places, numbers = batch.FIELDS, batch.NUMBERS
    kernel.step(tasks, 0, None)
    assert uploads == [places, numbers]
    tasks = [dataclasses.replace(task, hyper=dataclasses.replace(task.hyper, lr=1e-4, step=2)) for task in tasks]
    kernel.step(tasks, 0, None)
    assert uploads == [places, numbers, numbers]
    tasks[0].grad = tasks[0].grad.clone()
    kernel.step(tasks, 0, None)
    assert uploads == [places, numbers, numbers, places, numbers]


def test_a_captured_step_takes_the_numbers_of_the_last_refresh(
    kernel: TritonKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a CUDA graph records is the launch alone; here the launch is repeated by hand."""
    shards = [shard_of(RECIPES["fp8"], (2, 160), Rule.ADAMW, seed=0) for _ in range(2)]
    first = task_of(shards[0], Rule.ADAMW, 1)
    for step in (1, 2, 3):
        task = task_of(shards[0], Rule.ADAMW, step)
        task.grad = first.grad
        take(REFERENCE, [task])
    tasks = [task_of(shards[1], Rule.ADAMW, step) for step in (1, 2, 3)]
    for task in tasks:
        task.grad = first.grad
    kernel.step(tasks[:1], 0x1234567890ABCDEF, None)
    for task in tasks[1:]:
        kernel.refresh([task], 0x1234567890ABCDEF)
        with monkeypatch.context() as capture:
            capture.setattr(batch, "is_capturing", lambda _: True)
            kernel.step(tasks[:1], 0, None)  # as it was recorded
    assert all(torch.equal(tensor, tensors_of(shards[1])[key]) for key, tensor in tensors_of(shards[0]).items())
    moved = copy.deepcopy(tasks[0])
    monkeypatch.setattr(batch, "is_capturing", lambda _: True)
    with pytest.raises(RuntimeError, match="expected tensors that have not moved"):
        kernel.step([moved], 0, None)


@pytest.mark.parametrize("name", ["fp8", "paper", "int4"])
def test_a_step_allocates_nothing_of_a_parameters_size(kernel: TritonKernel, name: str) -> None:
    """Nor does the check of the gradient; the reference, which does, shows that this test can fail."""
    shard = shard_of(RECIPES[name], (24, 256), Rule.ADAMW, seed=0)  # more than the dynamic maps
    for backend, allocates in ((kernel, False), (REFERENCE, True)):
        task = task_of(shard, Rule.ADAMW, 1)
        with LargestAllocation() as largest:
            backend.is_steppable(task.grad)
        assert (largest.elements >= task.grad.numel()) == allocates
        with LargestAllocation() as largest:
            take(backend, [task])
        assert (largest.elements >= task.grad.numel()) == allocates


def test_what_is_read_in_vectors(kernel: TritonKernel) -> None:
    """Widths and addresses decide; scales, which many tensors may keep in one buffer, do not."""

    def aligned(recipe: str, shape: tuple[int, int]) -> list[bool]:
        tasks = [task_of(shard_of(RECIPES[recipe], shape, Rule.ADAMW, seed), Rule.ADAMW, 1) for seed in range(3)]
        kernel.measure(tasks)
        return [batch.describe(task, task.grad).is_aligned for task in tasks]

    assert aligned("int4", (2, 160)) == aligned("fp8", (2, 16)) == [True] * 3
    assert aligned("fp8", (16, 100)) == [False] * 3
    shard = shard_of(RECIPES["fp8"], (2, 160), Rule.ADAMW, seed=0)
    odd = torch.zeros(2 * 160 + 1)[1:].view(2, 160)
    assert not batch.describe(task_of(shard, Rule.ADAMW, 1), odd).is_aligned


def test_few_sets_of_tables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernel, "_KEPT_BATCHES", 2)
    kernel = TritonKernel()
    shards = [shard_of(RECIPES["fp8"], (1, 128), Rule.ADAMW, seed) for seed in range(3)]
    for shard in shards:
        kernel.step([task_of(shard, Rule.ADAMW, 1)], 0, None)
    assert len(kernel._batches) == 2


def test_it_reproduces_the_reference_as_the_self_check_wants() -> None:
    assert load(torch.device("cpu")).name.startswith("triton ")


def test_an_optimizer_steps_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for backend in ("reference", "triton"):
        monkeypatch.setenv("ECO_DIST_KERNEL", backend)
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(48, 160), torch.nn.Linear(160, 3))
        quantize_weights_(model, "fp8-8bit")
        optimizer = ECOAdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            model(torch.ones(2, 48)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([value.clone() for state in optimizer.state.values() for value in state.values()])
        assert kernels.kernel_for(torch.device("cpu")).name.startswith(backend)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
