"""What the CPU kernel's C interface looks like from Python: structures of `cpu/shard.h`, filled from tasks."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from eco_dist.numerics import Format, Granularity, MomentFormat, Rounding
from eco_dist.numerics.moments import dynamic_map
from eco_dist.optim.rules import Rule, Scalars
from eco_dist.optim.shard import StateKey
from eco_dist.optim.step import PlainTask, Task
from eco_dist.recipe import Compensation, Injection, Recipe, ResidualFormat

_POINTERS = (
    "codes",
    "scales",
    "grad",
    "exp_avg",
    "exp_avg_scale",
    "exp_avg_sq",
    "exp_avg_sq_scale",
    "extra",
    "absmax",
)
_SCALARS = (
    "grad_scale",
    "beta1",
    "factor1",
    "beta2",
    "factor2",
    "root2",
    "eps",
    "decay",
    "step_size",
    "gain",
)
_KINDS = (
    "format",
    "granularity",
    "stochastic",
    "compensation",
    "residual_is_fp32",
    "moments",
    "stochastic_moments",
    "skip_idle",
    "grad_is_bf16",
    "rule",
)


class _Scalars(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_float) for name in _SCALARS)


class ShardStructure(ctypes.Structure):
    """`struct Shard`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "first_row")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("tensor", "step")),
        ("scalars", _Scalars),
    )


class Kind(ctypes.Structure):
    """`struct Kind`: what a call's shards have in common."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in _KINDS),
        ("dynamic_values", ctypes.c_void_p * 2),
        ("dynamic_middles", ctypes.c_void_p * 2),
    )


class Stats(ctypes.Structure):
    """`struct Stats`."""

    _fields_ = (
        ("squared_error", ctypes.c_double),
        ("squared_weight", ctypes.c_double),
        ("moved", ctypes.c_int64),
        ("elements", ctypes.c_int64),
    )


_FORMATS = {
    format: number for number, format in enumerate((Format.E4M3, Format.E5M2, Format.INT8, Format.INT4, Format.BF16))
}
_PLAIN_FORMAT = len(_FORMATS)
_GRANULARITIES = {Granularity.ROW: 0, Granularity.BLOCK: 1, Granularity.TENSOR: 2, None: 3}
_COMPENSATIONS = {
    Compensation.MOMENTUM: 0,
    Compensation.RESIDUAL: 1,
    Compensation.NONE: 2,
    Compensation.MASTER: 3,
}
_MOMENTS = {MomentFormat.FP32: 0, MomentFormat.BF16: 1, MomentFormat.FP8: 2, MomentFormat.DYNAMIC8: 3}
_ADAMW, _ADAMW_DISPLACEMENT, _SGD = range(3)


def ready(grad: Tensor) -> Tensor:
    """A gradient the kernel can read: contiguous fp32 or bf16."""
    if grad.dtype not in (torch.float32, torch.bfloat16):
        grad = grad.float()
    return grad.contiguous()


def by_kind(tasks: Sequence[Task]) -> list[tuple[Kind, list[Task]]]:
    """Tasks that one call steps together, with what they have in common."""
    # By identity: hashing a recipe's fields for every weight would cost more than describing the weight.
    groups: dict[tuple[int, Rule, bool, bool, bool], list[Task]] = {}
    for task in tasks:
        displaces = task.hyper.injection is Injection.DISPLACEMENT
        key = (id(task.shard.recipe), task.rule, displaces, task.skips_idle, task.grad.dtype is torch.bfloat16)
        groups.setdefault(key, []).append(task)
    return [(_kind(group[0].shard.recipe, *key[1:]), group) for key, group in groups.items()]


@functools.cache
def _kind(recipe: Recipe, rule: Rule, displaces: bool, skips_idle: bool, grad_is_bf16: bool) -> Kind:
    assert recipe.format is not None
    kind = Kind(
        format=_FORMATS[recipe.format],
        granularity=_GRANULARITIES[recipe.granularity],
        stochastic=recipe.rounding is Rounding.STOCHASTIC,
        compensation=_COMPENSATIONS[recipe.compensation],
        residual_is_fp32=recipe.residual is ResidualFormat.FP32,
        moments=_MOMENTS[recipe.moments],
        stochastic_moments=recipe.moments_rounding is Rounding.STOCHASTIC,
        skip_idle=skips_idle,
        grad_is_bf16=grad_is_bf16,
        rule=_SGD if rule is Rule.SGD else _ADAMW_DISPLACEMENT if displaces else _ADAMW,
    )
    for index, (values, middles) in enumerate(_dynamic_tables()):
        kind.dynamic_values[index] = values.data_ptr()
        kind.dynamic_middles[index] = middles.data_ptr()
    return kind


@functools.cache
def plain_kind(rule: Rule, grad_is_bf16: bool) -> Kind:
    """The kind of high-precision parameters."""
    return Kind(
        format=_PLAIN_FORMAT,
        granularity=_GRANULARITIES[None],
        compensation=_COMPENSATIONS[Compensation.NONE],
        moments=_MOMENTS[MomentFormat.FP32],
        grad_is_bf16=grad_is_bf16,
        rule=_SGD if rule is Rule.SGD else _ADAMW,
    )


@functools.cache
def _dynamic_tables() -> list[tuple[Tensor, Tensor]]:
    tables = [dynamic_map(signed) for signed in (True, False)]
    return [(table, (table[1:] + table[:-1]) / 2) for table in tables]


def describe(tasks: Sequence[Task], seed: int = 0) -> tuple[ctypes.Array[ShardStructure], list[Tensor]]:
    """C structures of the tasks, and tensors made for them that must outlive the call."""
    shards = (ShardStructure * len(tasks))()
    keep = []
    for entry, task in zip(shards, tasks, strict=True):
        shard, grad = task.shard, ready(task.grad)
        keep.append(grad)
        tensors: dict[str, Tensor | None] = {
            "codes": shard.codes,
            "scales": shard.scales if shard.scales.numel() or shard.recipe.granularity is not None else None,
            "grad": grad,
            "extra": shard.state.get(StateKey.RESIDUAL, shard.state.get(StateKey.MASTER)),
            "absmax": task.absmax,
        }
        tensors |= {key: shard.state.get(key) for key in _POINTERS if key.startswith("exp_avg")}
        for name, tensor in tensors.items():
            assert tensor is None or tensor.is_contiguous(), name
            setattr(entry, name, None if tensor is None else tensor.data_ptr())
        entry.rows = shard.rows
        entry.columns = shard.columns
        entry.first_row = shard.first_row
        entry.seed = seed & 0xFFFFFFFFFFFFFFFF
        entry.tensor = shard.tensor_id
        entry.step = task.hyper.step & 0xFFFFFFFF
        entry.scalars = _scalars(task.scalars)
    return shards, keep


def describe_plain(tasks: Sequence[PlainTask]) -> tuple[ctypes.Array[ShardStructure], list[Tensor]]:
    """`describe` for high-precision parameters."""
    shards = (ShardStructure * len(tasks))()
    keep = []
    for entry, task in zip(shards, tasks, strict=True):
        grad = ready(task.grad)
        keep.append(grad)
        entry.codes, entry.grad = task.weight.data_ptr(), grad.data_ptr()
        for key in (StateKey.EXP_AVG, StateKey.EXP_AVG_SQ):
            setattr(entry, key, task.state[key].data_ptr() if key in task.state else None)
        entry.rows, entry.columns = 1, task.weight.numel()
        entry.scalars = _scalars(task.scalars)
    return shards, keep


@functools.lru_cache(maxsize=64)
def _scalars(scalars: Scalars) -> _Scalars:
    """The scalars as C floats; most weights of a step share them."""
    return _Scalars(*(getattr(scalars, name) for name in _SCALARS))
