"""FP8 rounding of activations with a straight-through gradient (paper §2).

The paper rounds the *input* of every linear layer inside a transformer block to E4M3, always to nearest, with one scale
a token (row). Only the forward pass sees the rounded values: the gradient passes as if nothing had been rounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eco_dist.numerics import Format, Granularity, fake_quantize

__all__ = ["round_activations"]


class _StraightThrough(torch.autograd.Function):
    """Forward: the nearest E4M3 value. Backward: the identity, because no value is clipped (scale = absmax / 448)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return fake_quantize(x, Format.E4M3, Granularity.ROW).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def round_activations(x: Tensor) -> Tensor:
    """Round ``x`` to E4M3, nearest, one scale for each row of the last dimension: decode(encode(x)).

    Args:
        x: ``(..., features)``, float32 or bfloat16, the input of a linear layer; a row is one token.

    Returns:
        A tensor of the shape and dtype of ``x``. Its gradient with respect to ``x`` is the identity (straight-through).

    Source: arXiv 2601.22101, the quantizer of the 30M-800M runs: row-wise E4M3 activations, always round-to-nearest.
    """
    rounded: Tensor = _StraightThrough.apply(x)
    return rounded
