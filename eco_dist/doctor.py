"""What this machine has for eco_dist: versions, devices, the kernel of each device, optional packages."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from eco_dist.moe import megablocks_import
from eco_dist.optim.kernels import kernel_for
from eco_dist.optim.kernels.build import supported_isas

if TYPE_CHECKING:
    from rich.table import Table

OPTIONAL = {
    "matplotlib": ("plot", "loss plots"),
    "tokenizers": ("bpe", "byte-pair tokenizers"),
    "tensorboard": ("tensorboard", "TensorBoard events"),
    "transformers": ("hf", "Hugging Face models"),
    "triton": ("dev", "the step on GPUs; torch for GPUs brings it along"),
}
"""Package -> the extra that brings it, and what it is for."""


def diagnose() -> list[tuple[str, str, str]]:
    """Rows (what, found, meaning)."""
    rows = [
        ("Python", platform.python_version(), "3.11 or newer is needed"),
        ("torch", torch.__version__, "2.11 or newer is needed; tested with 2.13"),
        ("CPU instruction sets", ", ".join(supported_isas()), "the kernel is built for the first one"),
        ("CPU kernel", kernel_for(torch.device("cpu")).name, "what steps weights on the CPU"),
        ("threads", str(torch.get_num_threads()), "of torch and of the kernel; OMP_NUM_THREADS sets them"),
    ]
    if torch.cuda.is_available():
        devices = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        rows.append(("GPUs", devices, f"kernel: {kernel_for(torch.device('cuda')).name}"))
    else:
        rows.append(("GPUs", "none", "this torch or this machine has no CUDA"))
    backends = [name for name in ("gloo", "nccl") if dist.is_backend_available(name)]
    rows.append(("collectives", ", ".join(backends) or "none", "gloo for CPUs, nccl for GPUs"))
    for package, (extra, purpose) in OPTIONAL.items():
        found = importlib.util.find_spec(package) is not None
        version = importlib.metadata.version(package) if found else "not installed"
        rows.append((package, version, purpose if found else f"{purpose}: pip install 'eco-dist[{extra}]'"))
    rows.append(("megablocks", megablocks_import.describe(), "moves and multiplies experts on CUDA"))
    return rows


def table() -> Table:
    """The rows for a terminal."""
    from rich.table import Table

    result = Table(title="eco-dist doctor")
    for column in ("what", "found", "meaning"):
        result.add_column(column)
    for row in diagnose():
        result.add_row(*row)
    return result
