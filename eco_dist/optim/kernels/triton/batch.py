"""A set of shards of one kind, described on the device; kept from step to step."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from eco_dist.numerics import blocks_per_row
from eco_dist.optim.kernels.triton.descriptors import FIELDS, NUMBERS, Field, Number, Scalar
from eco_dist.optim.kernels.triton.kind import Kind, LaunchShape
from eco_dist.optim.rules import Scalars
from eco_dist.optim.shard import StateKey
from eco_dist.optim.step import PlainTask, Task

_ALIGNMENT = 16


@dataclasses.dataclass(slots=True)
class Described:
    """One shard, or one high-precision parameter taken as a single row.

    Attributes:
        grad: contiguous gradient, fp32 or bf16; kept because it may have been made for the launch.
        pointers: addresses of its tensors, `Field.CODES` to `Field.ABSMAX`; 0 for one it has not.
        rows, columns: of the shard.
        first_row: in the whole parameter.
        tensor_id, step: for the stream of random bits.
        scalars: what the step multiplies with.
    """

    grad: Tensor
    pointers: tuple[int, ...]
    rows: int
    columns: int
    first_row: int
    tensor_id: int
    step: int
    scalars: Scalars

    @property
    def is_aligned(self) -> bool:
        """Whether every row of every tensor with an entry an element can be read in vectors."""
        return functools.reduce(operator.or_, self.pointers[: Field.EXTRA + 1], self.columns) % _ALIGNMENT == 0

    def programs(self, kind: Kind, shape: LaunchShape) -> int:
        """Programs that step this shard."""
        if kind.walks_rows:
            return self.rows if self.columns else 0
        return -(-self.rows * blocks_per_row(self.columns) // shape.blocks)


def describe(task: Task, grad: Tensor) -> Described:
    """A quantized weight's shard."""
    shard, state = task.shard, task.shard.state
    pointers = (
        _pointer(shard.codes),
        grad.data_ptr(),
        _pointer(state.get(StateKey.EXP_AVG)),
        _pointer(state.get(StateKey.EXP_AVG_SQ)),
        _pointer(state.get(StateKey.RESIDUAL, state.get(StateKey.MASTER))),
        _pointer(shard.scales),
        _pointer(state.get(StateKey.EXP_AVG_SCALE)),
        _pointer(state.get(StateKey.EXP_AVG_SQ_SCALE)),
        _pointer(task.absmax),
    )
    stream = shard.tensor_id & 0x0FFFFFFF
    return Described(grad, pointers, shard.rows, shard.columns, shard.first_row, stream, task.hyper.step, task.scalars)


def describe_plain(task: PlainTask, grad: Tensor) -> Described:
    """A high-precision parameter."""
    moments = (_pointer(task.state.get(key)) for key in (StateKey.EXP_AVG, StateKey.EXP_AVG_SQ))
    pointers = (task.weight.data_ptr(), grad.data_ptr(), *moments, 0, 0, 0, 0, 0)
    return Described(grad, pointers, 1, task.weight.numel(), 0, 0, task.hyper.step, task.scalars)


def _pointer(tensor: Tensor | None) -> int:
    if tensor is None:
        return 0
    assert tensor.is_contiguous(), "codes, scales and state have no strides"
    return tensor.data_ptr()


class Batch:
    """Tables of one launch on the device.

    Attributes:
        table: int64 `[shards, FIELDS]`.
        numbers: int64 `[shards, NUMBERS]`; what changes from step to step.
        programs: programs of the launch.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        """Tables for `count` shards, not filled."""
        self.table = torch.zeros((count, FIELDS), dtype=torch.int64, device=device)
        self.numbers = torch.zeros((count, NUMBERS), dtype=torch.int64, device=device)
        self.programs = 0
        self._rows: list[tuple[int, ...]] = []

    def set_places(self, shards: Sequence[Described], kind: Kind, shape: LaunchShape) -> None:
        """Say where the shards lie; uploads only if that changed."""
        first, rows = 0, []
        for shard in shards:
            rows.append(_row(shard, first))
            first += shard.programs(kind, shape)
        if rows != self._rows:
            if is_capturing(self.table.device):
                raise RuntimeError(
                    "expected tensors that have not moved since the step before this CUDA graph's capture, got others; "
                    "take one step first, and keep the gradients' tensors (zero_grad(set_to_none=False))"
                )
            self.programs, self._rows = first, rows
            _upload(torch.tensor(rows, dtype=torch.int64), self.table)

    def set_numbers(self, shards: Sequence[Described], seed: int) -> None:
        """Say what this step multiplies with: one small copy that waits for nothing. No part of a captured graph."""
        if is_capturing(self.table.device):
            return
        numbers = torch.zeros((len(shards), NUMBERS), dtype=torch.int64)
        numbers[:, Number.SEED] = (seed + (1 << 63)) % (1 << 64) - (1 << 63)  # int64 with the same 64 bits
        numbers[:, Number.STEP] = torch.tensor([shard.step & 0xFFFFFFFF for shard in shards])
        scalars = torch.tensor([_as_list(shard.scalars) for shard in shards], dtype=torch.float32)
        numbers.view(torch.float32)[:, min(Scalar) : max(Scalar) + 1] = scalars
        _upload(numbers, self.numbers)


def is_capturing(device: torch.device) -> bool:
    """Whether launches on the device are being recorded into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _row(shard: Described, first_program: int) -> tuple[int, ...]:
    """The shard's row of the first table, in the order of `Field`."""
    per_row = blocks_per_row(shard.columns)
    blocks, first_block = shard.rows * per_row, shard.first_row * per_row
    return (*shard.pointers, first_program, blocks, per_row, shard.columns, first_block, shard.tensor_id)


@functools.lru_cache(maxsize=64)
def _as_list(scalars: Scalars) -> list[float]:
    """The scalars in the order of `Scalar`; most weights of a step share them."""
    return [getattr(scalars, scalar.name.lower()) for scalar in Scalar]


def _upload(values: Tensor, target: Tensor) -> None:
    """Copy without waiting: the caching allocator of pinned memory keeps the source until the copy is done."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)
