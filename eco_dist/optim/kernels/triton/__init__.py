"""The fused step for GPUs, in Triton (CUDA and ROCm); needs the package `triton`, which torch for GPUs brings along.

`descriptors` and `batch` describe shards to the device, `kind` says what a launch is compiled for, `kernel` launches,
`device` holds the code that Triton compiles, and `aot` compiles all of it without a GPU. This module does not import
triton.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import torch

from eco_dist.optim.kernels.build import BuildError
from eco_dist.optim.kernels.selfcheck import reproduces_reference

if TYPE_CHECKING:
    from eco_dist.optim.kernels.triton.kernel import TritonKernel


def load(device: torch.device) -> TritonKernel:
    """The Triton kernel, if it works and reproduces the reference on the device.

    Raises:
        BuildError: if it does not; says why.
    """
    if importlib.util.find_spec("triton") is None:
        raise BuildError("the package triton is not installed; it comes with torch for GPUs, or: pip install triton")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BuildError("expected TRITON_INTERPRET=1 to run Triton's code on the CPU, for tests; got no such variable")
    try:
        from eco_dist.optim.kernels.triton.kernel import TritonKernel

        kernel = TritonKernel()
        agrees = reproduces_reference(kernel, device)
    except Exception as error:
        # Compilers, drivers and devices fail in ways of their own; whichever it is, there is a step that works.
        raise BuildError(f"triton failed on {device}: {type(error).__name__}: {error}") from error
    if not agrees:
        raise BuildError(f"the Triton kernel does not reproduce the reference step on {device}")
    return kernel
