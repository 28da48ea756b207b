"""Forward and backward with a quantized weight in place (no FSDP2): explicit dequantization, nothing kept.

Under FSDP2 modules see ordinary unsharded tensors and none of this runs. In one process the parameter itself is used:
`F.linear` dequantizes the codes in forward and again in backward, so that no layer's weight outlives its product, and
the other functions listed here dequantize once. Functions that are not listed raise (`operations.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from eco_dist.weights.tensor import QuantizedWeight


class Dequantize(torch.autograd.Function):
    """codes * scale as an ordinary tensor; its gradient is the weight's, in fp32."""

    @staticmethod
    def forward(ctx: Any, weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
        """Decode and cast."""
        return weight.decode(dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The identity, in fp32."""
        return grad.float(), None


class QuantizedLinear(torch.autograd.Function):
    """y = x W^T + b, holding codes instead of W between forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
        """Product with the weight in the dtype of `x`."""
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight.decode(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The three gradients: dx = dy W;  dW = dy^T x in fp32;  db = sum dy."""
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x = grad @ weight.decode(grad.dtype) if needs_x else None
        grad_weight = (rows.t() @ x.reshape(-1, x.shape[-1])).float() if needs_weight else None
        grad_bias = rows.sum(0) if ctx.has_bias and needs_bias else None
        return grad_x, grad_weight, grad_bias


def _compute_dtype(arguments: Any) -> torch.dtype:
    """Dtype of the product: autocast's if it is on, else that of the other floating operands, else fp32."""
    others = [
        leaf
        for leaf in pytree.tree_leaves(arguments)
        if isinstance(leaf, Tensor) and not isinstance(leaf, QuantizedWeight) and leaf.is_floating_point()
    ]
    device = others[0].device.type if others else "cpu"
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return others[0].dtype if others else torch.float32


def _linear(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, weight, bias = named["input"], named["weight"], named.get("bias")
    if not isinstance(weight, QuantizedWeight) or isinstance(x, QuantizedWeight) or weight.ndim != 2:
        return _dequantized(func, args, kwargs)
    dtype = _compute_dtype((x,))
    with torch.autocast(x.device.type, enabled=False):
        return QuantizedLinear.apply(x.to(dtype), weight, None if bias is None else bias.to(dtype))


def _dequantized(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtype = _compute_dtype((args, kwargs))

    def plain(leaf: Any) -> Any:
        return leaf.dequantize(dtype) if isinstance(leaf, QuantizedWeight) else leaf

    args, kwargs = pytree.tree_map(plain, (args, kwargs), is_leaf=lambda leaf: isinstance(leaf, QuantizedWeight))
    return func(*args, **kwargs)


def _getter(name: str) -> Callable[..., Any]:
    """What `__torch_function__` receives for a property."""
    return cast(Callable[..., Any], getattr(Tensor, name).__get__)


def _set_data(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise NotImplementedError(
        "assigning .data of a quantized weight would leave its codes as they are; use weight.copy_(values) under "
        "torch.no_grad(), or replace the parameter"
    )


COMPUTE_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    cast(Callable[..., Any], F.linear): _linear,
    **dict.fromkeys(
        (
            F.embedding,
            F.bilinear,
            F.conv1d,
            F.conv2d,
            F.grouped_mm,
            torch.einsum,
            torch.matmul,
            torch.mm,
            torch.bmm,
            torch.addmm,
            torch.baddbmm,
            torch._grouped_mm,
            Tensor.matmul,
            Tensor.__matmul__,
            Tensor.__rmatmul__,
            Tensor.mm,
            Tensor.bmm,
            Tensor.t,
            Tensor.transpose,
            Tensor.permute,
            _getter("T"),
            _getter("mT"),
            Tensor.__getitem__,
            torch.transpose,
            torch.permute,
        ),
        _dequantized,
    ),
    cast(Callable[..., Any], vars(torch._C.TensorBase)["data"].__set__): _set_data,
}
"""Functions that use a quantized weight by value."""
