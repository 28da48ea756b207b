"""Backends of the step, one a device, all bit-equal to the reference.

| backend | device | needs |
|---|---|---|
| `cpu` | CPU | a C++ compiler at first use, or a wheel that carries the library |
| `triton` | CUDA, ROCm | the package triton |
| `chunked` | any | nothing: what runs where those two cannot, with a warning |
| `reference` | any | nothing; temporaries of a weight's size |

`ECO_DIST_KERNEL=reference` (or `cpu`, `triton`, `chunked`) chooses by hand.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eco_dist.optim.kernels.build import BuildError
from eco_dist.optim.kernels.chunked import ChunkedKernel
from eco_dist.optim.kernels.cpu import load
from eco_dist.optim.kernels.reference import ReferenceKernel
from eco_dist.optim.kernels.triton import load as load_triton
from eco_dist.optim.step import PlainTask, StepStats, Task

logger = logging.getLogger(__name__)


class Kernel(Protocol):
    """What a backend can do with tasks whose tensors are on its device."""

    name: str

    def measure(self, tasks: Sequence[Task]) -> None:
        """Set the absmax of every task's updated weight; the shards do not change."""

    def step(self, tasks: Sequence[Task], seed: int, stats: StepStats | None) -> None:
        """Step every shard in place."""

    def step_plain(self, tasks: Sequence[PlainTask]) -> None:
        """Step high-precision parameters in place, with the same rule and nothing to round."""

    def is_steppable(self, grad: Tensor) -> bool | Tensor:
        """Whether every element of a gradient is finite and its magnitude below 2^63."""

    def norm(self, grad: Tensor) -> float | Tensor:
        """L2 norm of a gradient; not below 2^63 if an element is not, NaN if one is."""


def kernel_for(device: torch.device) -> Kernel:
    """The backend for a device.

    Raises:
        ValueError: if ECO_DIST_KERNEL names no backend.
        BuildError: if the backend it names does not work for the device.
    """
    choice = os.environ.get("ECO_DIST_KERNEL", "")
    if choice not in ("", "cpu", "triton", "chunked", "reference"):
        names = "'cpu', 'triton', 'chunked', 'reference' or unset"
        raise ValueError(f"expected ECO_DIST_KERNEL to be {names}, got {choice!r}")
    if choice == "reference":
        return _reference()
    if choice != "chunked" and (device.type == "cuda" or choice == "triton"):
        return _triton(device.type, choice == "triton")
    if choice == "chunked" or device.type != "cpu":
        return _chunked()
    return _cpu(choice == "cpu")


@functools.cache
def _reference() -> Kernel:
    return ReferenceKernel()


@functools.cache
def _chunked() -> Kernel:
    return ChunkedKernel()


@functools.cache
def _triton(device_type: str, required: bool) -> Kernel:
    try:
        return load_triton(torch.device(device_type))
    except BuildError as error:
        if required:
            raise
        logger.warning("the fused GPU step is not available (%s); the plain torch step is used, far slower", error)
        return _chunked()


@functools.cache
def _cpu(required: bool) -> Kernel:
    try:
        return load()
    except BuildError as error:
        if required:
            raise
        logger.warning(
            "the fused CPU step is not available (%s); the plain torch step is used, many times slower", error
        )
        return _chunked()
