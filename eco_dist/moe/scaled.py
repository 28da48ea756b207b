"""Products of E4M3 tokens with E4M3 experts as they are stored, without decoding them.

[Note: scaled]
Tensor cores multiply E4M3 operands whose scales can be taken out of the sum: one a token, one a row of the result. With
row scales, W[f, d] = s_f q[f, d], that is the case where the sum runs along a stored row, over d:
    forward of w1 and v1:  y = x W^T        backward of w2:  dh = dy W^T
The other two products sum over f and decode the weight, as do gradients of weights. The token operand is rounded to
E4M3 with a scale a token, on every device, so that a run does not depend on where it is.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eco_dist.moe.grouped_product import grouped_product, offsets
from eco_dist.numerics import Format, Granularity, decode, encode
from eco_dist.weights import QuantizedWeight

_MULTIPLE, _CAPABILITY = 16, (9, 0)
"""What `torch._scaled_grouped_mm` asks of both inner sizes, and of the GPU."""


def check_scaled(weight: Tensor) -> None:
    """Refuse a weight that is not stored as E4M3 rows with a scale each.

    Raises:
        ValueError: says what it is instead.
    """
    if not isinstance(weight, QuantizedWeight):
        raise ValueError(
            "expected experts that are codes in the forward pass for products 'fp8', got "
            f"{weight.dtype} (FSDP2 decodes what it gathers); use products 'full'"
        )
    recipe = weight.recipe
    if recipe.format is not Format.E4M3 or recipe.granularity is not Granularity.ROW:
        granularity = "no" if recipe.granularity is None else recipe.granularity.value
        raise ValueError(
            f"expected E4M3 experts with row scales for products 'fp8', got {recipe.format} with {granularity} scales; "
            "choose granularity 'row' or products 'full'"
        )


def scaled_product(x: Tensor, weight: QuantizedWeight, counts: Tensor) -> Tensor:
    """y_i = x_i W_e^T for the rows i of expert e, the rows of `x` rounded to E4M3: `[T, D] -> [T, F]` in its dtype.

    Args:
        x: `[T, D]`, sorted by expert.
        weight: `[E F, D]`, row scales.
        counts: int64 `[E]`.
    """
    codes, scales = encode(x.float(), Format.E4M3, Granularity.ROW)
    experts, columns = counts.shape[0], x.shape[-1]
    if not _kernel_takes(x, weight.shape[0] // experts):
        rounded = decode(codes, scales, Format.E4M3, Granularity.ROW, columns).to(x.dtype)
        return grouped_product(rounded, weight.decode(x.dtype).view(experts, -1, columns).mT, counts)
    return torch._scaled_grouped_mm(
        codes.view(torch.float8_e4m3fn),
        weight.codes.view(torch.float8_e4m3fn).view(experts, -1, columns).mT,
        scales.flatten(),
        weight.scales.view(experts, -1),
        offs=offsets(counts),
        out_dtype=torch.bfloat16,
    )


def _kernel_takes(x: Tensor, features: int) -> bool:
    """Whether torch has a kernel for these tokens: bf16 on CUDA from Hopper on, sizes in multiples of 16."""
    if not x.is_cuda or x.dtype is not torch.bfloat16 or not hasattr(torch, "_scaled_grouped_mm"):
        return False
    fits = x.shape[0] > 0 and x.shape[-1] % _MULTIPLE == 0 and features % _MULTIPLE == 0
    return fits and torch.cuda.get_device_capability(x.device) >= _CAPABILITY
