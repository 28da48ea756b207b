"""The CPU kernel: shards described to the C library of `build.py`, one call for all shards of a kind."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eco_dist.numerics import Format, Granularity, MomentFormat, Rounding
from eco_dist.numerics.moments import dynamic_map
from eco_dist.optim.kernels.build import BuildError, library, supported_isas
from eco_dist.optim.kernels.selfcheck import reproduces_reference
from eco_dist.optim.rules import Rule, Scalars
from eco_dist.optim.shard import StateKey
from eco_dist.optim.step import PlainTask, StepStats, Task, step_plain
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


class _Shard(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "first_row")),
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("tensor", "step")),
        ("scalars", _Scalars),
    )


class _Kind(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in _KINDS),
        ("dynamic_values", ctypes.c_void_p * 2),
        ("dynamic_middles", ctypes.c_void_p * 2),
    )


class _Stats(ctypes.Structure):
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


class CpuKernel:
    """The native step for tensors on the CPU.

    Attributes:
        name: "cpu" and the instruction set it was built for.
    """

    def __init__(self, isa: str) -> None:
        """Load the library for an instruction set, building it if need be.

        Raises:
            BuildError: if it cannot be built.
            OSError: if it cannot be loaded.
        """
        self._library = ctypes.CDLL(str(library(isa)))
        self._library.eco_isa.restype = ctypes.c_char_p
        for function in (self._library.eco_is_steppable, self._library.eco_sum_of_squares):
            function.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int)
        self._library.eco_sum_of_squares.restype = ctypes.c_double
        self.name = f"cpu, {self._library.eco_isa().decode()}"

    def measure(self, tasks: Sequence[Task]) -> None:
        """Set the absmax of every task's updated weight; the shards do not change."""
        for kind, members in _by_kind(tasks):
            for task in members:
                task.absmax = task.shard.scales.new_zeros(task.shard.scales.shape)
            shards, keep = _describe(members)
            self._library.eco_absmax(shards, len(members), ctypes.byref(kind), torch.get_num_threads())
            del keep

    def step(self, tasks: Sequence[Task], seed: int, stats: StepStats | None) -> None:
        """Step every shard in place."""
        for kind, members in _by_kind(tasks):
            shards, keep = _describe(members, seed)
            counted = _Stats()
            pointer = None if stats is None else ctypes.byref(counted)
            self._library.eco_step(shards, len(members), ctypes.byref(kind), pointer, torch.get_num_threads())
            del keep
            if stats is not None:
                stats.sum_squared_error += counted.squared_error
                stats.sum_squared_weight += counted.squared_weight
                stats.moved += counted.moved
                stats.elements += counted.elements

    def step_plain(self, tasks: Sequence[PlainTask]) -> None:
        """Step high-precision parameters in place; those that are not contiguous fp32 take the reference."""
        groups: dict[tuple[Rule, bool], list[PlainTask]] = {}
        for task in tasks:
            if task.weight.dtype is torch.float32 and task.weight.is_contiguous():
                groups.setdefault((task.rule, task.grad.dtype is torch.bfloat16), []).append(task)
            else:
                step_plain(task)
        for (rule, grad_is_bf16), members in groups.items():
            shards, keep = _describe_plain(members)
            kind = _plain_kind(rule, grad_is_bf16)
            self._library.eco_step(shards, len(members), ctypes.byref(kind), None, torch.get_num_threads())
            del keep

    def touch(self, task: Task) -> None:
        """Read and write what a step of an `fp8` shard does, spoiling its contents: for measurements, nothing else."""
        shards, keep = _describe([task])
        is_bf16 = task.grad.dtype is torch.bfloat16
        self._library.eco_touch(shards, ctypes.c_int64(task.grad.numel()), int(is_bf16), torch.get_num_threads())
        del keep

    def is_steppable(self, grad: Tensor) -> bool:
        """Whether every element of a gradient is finite and its magnitude below 2^63."""
        return bool(self._read(self._library.eco_is_steppable, grad))

    def norm(self, grad: Tensor) -> float:
        """L2 norm of a gradient, the same for any number of threads."""
        return math.sqrt(self._read(self._library.eco_sum_of_squares, grad))

    @staticmethod
    def _read(function: Any, grad: Tensor) -> float:
        grad = _ready(grad)
        is_bf16 = grad.dtype is torch.bfloat16
        return float(function(grad.data_ptr(), grad.numel(), int(is_bf16), torch.get_num_threads()))


def load() -> CpuKernel:
    """The best kernel this machine can run and that reproduces the reference here.

    Raises:
        BuildError: if there is none.
    """
    reasons = []
    for isa in supported_isas():
        try:
            kernel = CpuKernel(isa)
        except (BuildError, OSError) as error:
            reasons.append(str(error))
            continue
        if reproduces_reference(kernel):
            return kernel
        reasons.append(f"the {isa} build does not reproduce the reference step on this processor")
    raise BuildError("; ".join(dict.fromkeys(reasons)))


def _ready(grad: Tensor) -> Tensor:
    """A gradient the kernel can read: contiguous fp32 or bf16."""
    if grad.dtype not in (torch.float32, torch.bfloat16):
        grad = grad.float()
    return grad.contiguous()


def _by_kind(tasks: Sequence[Task]) -> list[tuple[_Kind, list[Task]]]:
    # By identity: hashing a recipe's fields for every weight would cost more than describing the weight.
    groups: dict[tuple[int, Rule, bool, bool, bool], list[Task]] = {}
    for task in tasks:
        displaces = task.hyper.injection is Injection.DISPLACEMENT
        key = (id(task.shard.recipe), task.rule, displaces, task.skips_idle, task.grad.dtype is torch.bfloat16)
        groups.setdefault(key, []).append(task)
    return [(_kind(group[0].shard.recipe, *key[1:]), group) for key, group in groups.items()]


@functools.cache
def _kind(recipe: Recipe, rule: Rule, displaces: bool, skips_idle: bool, grad_is_bf16: bool) -> _Kind:
    assert recipe.format is not None
    kind = _Kind(
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
def _plain_kind(rule: Rule, grad_is_bf16: bool) -> _Kind:
    return _Kind(
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


def _describe(tasks: Sequence[Task], seed: int = 0) -> tuple[ctypes.Array[_Shard], list[Tensor]]:
    """C structures of the tasks, and tensors made for them that must outlive the call."""
    shards = (_Shard * len(tasks))()
    keep = []
    for entry, task in zip(shards, tasks, strict=True):
        shard, grad = task.shard, _ready(task.grad)
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


def _describe_plain(tasks: Sequence[PlainTask]) -> tuple[ctypes.Array[_Shard], list[Tensor]]:
    shards = (_Shard * len(tasks))()
    keep = []
    for entry, task in zip(shards, tasks, strict=True):
        grad = _ready(task.grad)
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
