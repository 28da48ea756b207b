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
from torch import Tensor

from eco_dist.moe.grouped_product import grouped_outer, grouped_product
from eco_dist.moe.scaled import check_scaled, scaled_product
from eco_dist.weights import QuantizedWeight

MOST_ROWS = 2**31 - 1
"""Offsets of a grouped product are int32."""


class GroupedLinear(torch.autograd.Function):
    """y_i = x_i W_e^T or x_i W_e, holding codes instead of W between forward and backward.

    The gradient of the weight is multiplied by `grad_scale`, in fp32 for codes and in the weight's dtype otherwise.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, inwards: bool, grad_scale: float, scaled: bool
    ) -> Tensor:
        """Product in the dtype of `x`; `counts` int64 `[E]`; `scaled` as in scaled.py, where it can be."""
        ctx.save_for_backward(x, weight, counts)
        ctx.inwards, ctx.grad_scale, ctx.scaled = inwards, grad_scale, scaled
        return _product(x, weight, counts, transposed=inwards, scaled=scaled)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        """Gradients dx = dy W (or dy W^T);  dW_e = dy_e^T x_e (or x_e^T dy_e), summed over the rows of e."""
        x, weight, counts = ctx.saved_tensors
        # A gradient that was expanded from a scalar has strides of 0, which torch's kernel refuses.
        grad = grad.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _product(grad, weight, counts, transposed=not ctx.inwards, scaled=ctx.scaled)
        if ctx.needs_input_grad[1]:
            left, right = (grad, x) if ctx.inwards else (x, grad)
            product = grouped_outer(left, right, counts).to(weight.dtype).flatten(0, 1)
            grad_weight = product if ctx.grad_scale == 1.0 else product.mul_(ctx.grad_scale)
        return grad_x, grad_weight, None, None, None, None


def grouped_linear(
    x: Tensor, weight: Tensor, counts: Tensor, *, inwards: bool, grad_scale: float = 1.0, scaled: bool = False
) -> Tensor:
    """Apply each expert's matrix to its rows.

    Args:
        x: `[T, D]` or `[T, F]`, sorted by expert.
        weight: `[E * F, D]`, a quantized weight or a floating tensor.
        counts: int64 `[E]`, rows of each expert; they sum to T.
        inwards: see the module's note.
        grad_scale: factor on the weight's gradient.
        scaled: multiply E4M3 operands directly where the sum runs along stored rows.

    Raises:
        ValueError: if T does not fit in int32, or `scaled` is asked of a weight that is not E4M3 with row scales.
    """
    check_rows(x.shape[0])
    if scaled:
        check_scaled(weight)
    product: Tensor = GroupedLinear.apply(x, weight, counts, inwards, grad_scale, scaled)
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


def _product(x: Tensor, weight: Tensor, counts: Tensor, *, transposed: bool, scaled: bool) -> Tensor:
    """x_i W_e^T or x_i W_e in the dtype of `x`."""
    if scaled and transposed:
        assert isinstance(weight, QuantizedWeight)
        return scaled_product(x, weight, counts)
    values = weight.decode(x.dtype) if isinstance(weight, QuantizedWeight) else weight.to(x.dtype)
    matrices = values.view(counts.shape[0], -1, weight.shape[-1])
    return grouped_product(x, matrices.mT if transposed else matrices, counts)
