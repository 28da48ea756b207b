"""The CPU kernel: shards described to the C library of `build.py`, one call for all shards of a kind."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eco_dist.optim.kernels.build import BuildError, library, supported_isas
from eco_dist.optim.kernels.cpu_abi import Stats, by_kind, describe, describe_plain, plain_kind, ready
from eco_dist.optim.kernels.selfcheck import reproduces_reference
from eco_dist.optim.rules import Rule
from eco_dist.optim.step import PlainTask, StepStats, Task, step_plain


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
        for kind, members in by_kind(tasks):
            for task in members:
                task.absmax = task.shard.scales.new_zeros(task.shard.scales.shape)
            shards, keep = describe(members)
            self._library.eco_absmax(shards, len(members), ctypes.byref(kind), torch.get_num_threads())
            del keep

    def step(self, tasks: Sequence[Task], seed: int, stats: StepStats | None) -> None:
        """Step every shard in place."""
        for kind, members in by_kind(tasks):
            shards, keep = describe(members, seed)
            counted = Stats()
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
            shards, keep = describe_plain(members)
            kind = plain_kind(rule, grad_is_bf16)
            self._library.eco_step(shards, len(members), ctypes.byref(kind), None, torch.get_num_threads())
            del keep

    def touch(self, task: Task) -> None:
        """Read and write what a step of an `fp8` shard does, spoiling its contents: for measurements, nothing else."""
        shards, keep = describe([task])
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
        grad = ready(grad)
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
