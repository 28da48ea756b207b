"""Products of rows sorted by expert with one matrix an expert: torch's kernel, or a loop where its limits bite."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_KERNEL_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
}
_ROW_BYTES = 16
"""Rows must start at multiples of this many bytes for torch's kernel."""


def grouped_product(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """y_i = x_i M_e for the rows i of expert e.

    Args:
        x: `[T, A]`, contiguous.
        matrices: `[E, A, B]`, may be a transposed view.
        counts: int64 `[E]`.
    """
    if _kernel_takes(x, matrices.shape[-1]):
        return F.grouped_mm(x, matrices, offs=offsets(counts))
    parts = x.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def grouped_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """M_e = left_e^T right_e, the sum over the rows of expert e: `[T, A], [T, B] -> [E, A, B]`."""
    if _kernel_takes(left, right.shape[-1]):
        return F.grouped_mm(left.t(), right, offs=offsets(counts))
    lengths = counts.tolist()
    return torch.stack([a.t() @ b for a, b in zip(left.split(lengths), right.split(lengths), strict=True)])


def _kernel_takes(x: Tensor, columns: int) -> bool:
    """Whether torch's kernel can multiply: its dtypes, and rows that start at multiples of 16 bytes."""
    aligned = all(size * x.element_size() % _ROW_BYTES == 0 for size in (x.shape[-1], columns))
    return aligned and x.dtype in _KERNEL_DTYPES.get(x.device.type, ())


def offsets(counts: Tensor) -> Tensor:
    """Where each expert's rows end, int32."""
    return counts.cumsum(0).to(torch.int32)
