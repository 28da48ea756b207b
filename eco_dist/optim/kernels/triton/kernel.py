"""The Triton kernel: shards described to the device, one launch for all shards of a kind."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
import triton
from torch import Tensor

from eco_dist.numerics import Granularity
from eco_dist.numerics.moments import dynamic_map
from eco_dist.optim import step as reference
from eco_dist.optim.kernels.triton.batch import Batch, Described, describe, describe_plain
from eco_dist.optim.kernels.triton.descriptors import Field
from eco_dist.optim.kernels.triton.device import step as device_code
from eco_dist.optim.kernels.triton.kind import Kind, LaunchShape, kind_of, launch_shape, plain_kind
from eco_dist.optim.step import GRADIENT_LIMIT, PlainTask, StepStats, Task
from eco_dist.recipe import Injection

_KEPT_BATCHES = 1024
"""Sets of shards whose tables (0.2 KB a shard) stay on the device; optimizer-in-backward has one set a weight."""


class TritonKernel:
    """The fused step for tensors on CUDA and ROCm devices.

    A step can be captured in a CUDA graph, except that of granularity `tensor`, if the tensors stay where they are:
    take one step first, capture `step`, and call `refresh` with the next step's tasks before each replay.
    """

    def __init__(self, shape_of: Callable[[Kind], LaunchShape] = launch_shape) -> None:
        """Nothing is compiled before the first step; results do not depend on the launch shape."""
        self.name = f"triton {triton.__version__}"
        self._shape_of = shape_of
        self._batches: collections.OrderedDict[tuple[Kind, tuple[int, ...]], Batch] = collections.OrderedDict()

    def measure(self, tasks: Sequence[Task]) -> None:
        """Set the absmax of every task's updated weight; the shards do not change."""
        if not tasks:
            return
        sizes = [task.shard.scales.numel() for task in tasks]
        together = torch.zeros(sum(sizes), dtype=torch.float32, device=tasks[0].grad.device)
        for task, part in zip(tasks, together.split(sizes), strict=True):
            task.absmax = part.view_as(task.shard.scales)
        for kind, shards in _by_kind(tasks, measures=True):
            batch = self._batch(kind, shards, 0, together.device)
            with _on(batch):
                self._launch(device_code.measure_blocks, kind, batch)

    def step(self, tasks: Sequence[Task], seed: int, stats: StepStats | None) -> None:
        """Step every shard in place."""
        whole = [task for task in tasks if task.shard.recipe.granularity is Granularity.TENSOR]
        self.measure([task for task in whole if task.absmax is None])
        for kind, shards in _by_kind(tasks, counts=stats is not None):
            batch = self._batch(kind, shards, seed, tasks[0].grad.device)
            totals = _totals(batch.table.device)
            with _on(batch):
                if kind.counts:
                    totals.zero_()
                self._launch(device_code.step_rows if kind.walks_rows else device_code.step_blocks, kind, batch)
                if kind.granularity == Granularity.TENSOR.value:
                    device_code.store_scales[(len(shards),)](
                        batch.table, KIND=kind, num_warps=1, enable_fp_fusion=False
                    )
            if stats is not None:
                error, weight, moved, elements = totals.tolist()
                stats.sum_squared_error += error
                stats.sum_squared_weight += weight
                stats.moved += int(moved)
                stats.elements += int(elements)

    def refresh(self, tasks: Sequence[Task], seed: int) -> None:
        """Before a captured `step` is replayed: the numbers of the step it is to take, for the same shards."""
        for kind, shards in _by_kind(tasks):
            self._batch(kind, shards, seed, tasks[0].grad.device)

    def step_plain(self, tasks: Sequence[PlainTask]) -> None:
        """Step high-precision parameters in place; those that are not contiguous fp32 take the reference."""
        groups: dict[Kind, list[Described]] = {}
        for task in tasks:
            if task.weight.dtype is not torch.float32 or not task.weight.is_contiguous():
                reference.step_plain(task)
                continue
            grad = _ready(task.grad)
            shard = describe_plain(task, grad)
            kind = plain_kind(task.rule, grad_is_bf16=grad.dtype is torch.bfloat16, aligned=shard.is_aligned)
            groups.setdefault(kind, []).append(shard)
        for kind, shards in groups.items():
            batch = self._batch(kind, shards, 0, tasks[0].grad.device)
            with _on(batch):
                self._launch(device_code.step_blocks, kind, batch)

    def is_steppable(self, grad: Tensor) -> Tensor:
        """Whether every element of a gradient is finite and its magnitude below 2^63; nothing waits for the device."""
        if grad.numel() == 0:
            return torch.ones((), dtype=torch.bool, device=grad.device)
        # One pass and no temporary of the gradient's size, unlike abs().amax().
        largest: Tensor = torch.linalg.vector_norm(grad, float("inf"))
        return largest < GRADIENT_LIMIT

    def norm(self, grad: Tensor) -> Tensor:
        """L2 norm of a gradient, a 0-dimensional tensor on its device."""
        norm: Tensor = torch.linalg.vector_norm(grad, dtype=torch.float32)
        return norm

    def _batch(self, kind: Kind, shards: Sequence[Described], seed: int, device: torch.device) -> Batch:
        """The tables of a set of shards, up to date."""
        key = (kind, tuple(shard.pointers[Field.CODES] for shard in shards))
        batch = self._batches.get(key) or Batch(len(shards), device)
        batch.set_places(shards, kind, self._shape_of(kind))
        batch.set_numbers(shards, seed)
        self._batches[key] = batch
        self._batches.move_to_end(key)
        if len(self._batches) > _KEPT_BATCHES:
            self._batches.popitem(last=False)
        return batch

    def _launch(self, function: triton.JITFunction, kind: Kind, batch: Batch) -> None:
        if batch.programs == 0:
            return
        shape, device = self._shape_of(kind), batch.table.device
        function[(batch.programs,)](
            batch.table,
            batch.numbers,
            batch.numbers.view(torch.float32),
            _maps(device),
            _totals(device),
            len(batch.table),
            KIND=kind,
            BLOCKS=shape.blocks,
            num_warps=shape.warps,
            enable_fp_fusion=False,  # products and sums round apart, as in the reference
        )


def _on(batch: Batch) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device."""
    device = batch.table.device
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _ready(grad: Tensor) -> Tensor:
    """A gradient the kernel can read: contiguous fp32 or bf16."""
    if grad.dtype not in (torch.float32, torch.bfloat16):
        grad = grad.float()
    return grad.contiguous()


def _by_kind(
    tasks: Sequence[Task], *, counts: bool = False, measures: bool = False
) -> Iterator[tuple[Kind, list[Described]]]:
    # By identity: hashing a recipe's fields for every weight would cost more than describing the weight.
    groups: dict[tuple[int, int, bool, bool, bool, bool, bool], tuple[Task, list[Described]]] = {}
    for task in tasks:
        grad = _ready(task.grad)
        shard = describe(task, grad)
        key = (
            id(task.shard.recipe),
            id(task.rule),
            task.hyper.injection is Injection.DISPLACEMENT,
            grad.dtype is torch.bfloat16,
            task.skips_idle and not measures,
            task.absmax is not None and not measures,
            shard.is_aligned,
        )
        groups.setdefault(key, (task, []))[1].append(shard)
    for (_, _, displaces, bf16, skips, given, aligned), (task, shards) in groups.items():
        kind = kind_of(
            task.shard.recipe,
            task.rule,
            displaces=displaces,
            grad_is_bf16=bf16,
            skips_idle=skips,
            absmax_is_given=given,
            aligned=aligned,
            counts=counts,
            measures=measures,
        )
        yield kind, shards


@functools.cache
def _totals(device: torch.device) -> Tensor:
    """Sums for `StepStats`, in the order of its fields."""
    return torch.zeros(4, dtype=torch.float64, device=device)


@functools.cache
def _maps(device: torch.device) -> Tensor:
    """Dynamic map of the first and of the second moment: 256 values, 255 middles."""
    maps = torch.zeros((2, 2, 256))
    for entry, signed in zip(maps, (True, False), strict=True):
        entry[0] = dynamic_map(signed)
        entry[1, :255] = (entry[0, 1:] + entry[0, :-1]) / 2
    return maps.to(device)
