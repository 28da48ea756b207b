"""Products of sorted tokens with their experts' matrices, from codes if need be.

[Note: grouped]
    T rows sorted by expert, `counts[e]` of them for expert e; matrices stored as megablocks stores them, rows of all
    experts below each other: `[E * F, D]`, so that a cut along dimension 0 is a cut between experts (or inside one).
    inwards  (w1, v1):  y_i = x_i W_e^T    [T, D] -> [T, F]
    outwards (w2):      y_i = x_i W_e      [T, F] -> [T, D]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eco_dist.weights import QuantizedWeight

MOST_ROWS = 2**31 - 1
"""Offsets of a grouped product are int32."""

_KERNEL_DTYPES = {
    "cpu": (torch.float32, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16,),
}
_ROW_BYTES = 16
"""Rows must start at multiples of this many bytes for torch's kernel."""


class GroupedLinear(torch.autograd.Function):
    """y_i = x_i W_e^T or x_i W_e, holding codes instead of W between forward and backward.

    The gradient of the weight is multiplied by `grad_scale`, in fp32 for codes and in the weight's dtype otherwise.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, inwards: bool, grad_scale: float) -> Tensor:
        """Product in the dtype of `x`; `counts` int64 `[E]`."""
        ctx.save_for_backward(x, weight, counts)
        ctx.inwards, ctx.grad_scale = inwards, grad_scale
        matrices = _matrices(weight, counts, x.dtype)
        return grouped_product(x, matrices.mT if inwards else matrices, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """Gradients dx = dy W (or dy W^T);  dW_e = dy_e^T x_e (or x_e^T dy_e), summed over the rows of e."""
        x, weight, counts = ctx.saved_tensors
        # A gradient that was expanded from a scalar has strides of 0, which torch's kernel refuses.
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            matrices = _matrices(weight, counts, grad.dtype)
            grad_x = grouped_product(grad, matrices if ctx.inwards else matrices.mT, counts)
        if ctx.needs_input_grad[1]:
            left, right = (grad, x) if ctx.inwards else (x, grad)
            product = grouped_outer(left, right, counts).to(weight.dtype).flatten(0, 1)
            grad_weight = product if ctx.grad_scale == 1.0 else product.mul_(ctx.grad_scale)
        return grad_x, grad_weight, None, None, None


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, *, inwards: bool, grad_scale: float = 1.0) -> Tensor:
    """Apply each expert's matrix to its rows.

    Args:
        x: `[T, D]` or `[T, F]`, sorted by expert.
        weight: `[E * F, D]`, a quantized weight or a floating tensor.
        counts: int64 `[E]`, rows of each expert; they sum to T.
        inwards: see the module's note.
        grad_scale: factor on the weight's gradient.

    Raises:
        ValueError: if T does not fit in int32.
    """
    check_rows(x.shape[0])
    product: Tensor = GroupedLinear.apply(x, weight, counts, inwards, grad_scale)
    return product


def check_rows(rows: int) -> None:
    """Refuse more rows than int32 offsets can count.

    Raises:
        ValueError: says so.
    """
    if rows > MOST_ROWS:
        raise ValueError(
            f"expected at most {MOST_ROWS} tokens x top_k on a rank (offsets are int32), got {rows}; "
            "lower the batch, the sequence length or top_k"
        )


def grouped_product(x: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """y_i = x_i M_e for the rows i of expert e.

    Args:
        x: `[T, A]`, contiguous.
        matrices: `[E, A, B]`, may be a transposed view.
        counts: int64 `[E]`.
    """
    if _kernel_takes(x, matrices.shape[-1]):
        return F.grouped_mm(x, matrices, offs=_offsets(counts))
    parts = x.split(counts.tolist())
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def grouped_outer(left: Tensor, right: Tensor, counts: Tensor) -> Tensor:
    """M_e = left_e^T right_e, the sum over the rows of expert e: `[T, A], [T, B] -> [E, A, B]`."""
    if _kernel_takes(left, right.shape[-1]):
        return F.grouped_mm(left.t(), right, offs=_offsets(counts))
    lengths = counts.tolist()
    return torch.stack([a.t() @ b for a, b in zip(left.split(lengths), right.split(lengths), strict=True)])


def _matrices(weight: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    values = weight.decode() if isinstance(weight, QuantizedWeight) else weight
    return values.to(dtype).view(counts.shape[0], -1, weight.shape[-1])


def _kernel_takes(x: Tensor, columns: int) -> bool:
    """Whether torch's kernel can multiply: its dtypes, and rows that start at multiples of 16 bytes."""
    aligned = all(size * x.element_size() % _ROW_BYTES == 0 for size in (x.shape[-1], columns))
    return aligned and x.dtype in _KERNEL_DTYPES.get(x.device.type, ())


def _offsets(counts: Tensor) -> Tensor:
    return counts.cumsum(0).to(torch.int32)
