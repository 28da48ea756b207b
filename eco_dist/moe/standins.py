"""Plain torch in place of megablocks' compiled parts.

megablocks 0.10 needs two CUDA extensions, `megablocks_ops` (its own; does not compile against CUDA 13) and
`grouped_gemm`, and Triton kernels that need a GPU. What is missing is replaced by the functions here, which compute the
same on any device; what is there is used. The numbers do not change: sorting is stable in both, gathers copy, and the
grouped product is torch's.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eco_dist.moe.grouped_product import grouped_outer, grouped_product

# --- megablocks_ops: the arguments are those of the extension, results go into its output tensors --------------------


def histogram(x: Tensor, bins: int) -> Tensor:
    """How often each of `bins` values occurs in int `x`, int32."""
    return torch.bincount(x.flatten(), minlength=bins).to(torch.int32)


def sort(x: Tensor, end_bit: int, sorted_out: Tensor, order_out: Tensor) -> None:
    """Stable sort of `x`, whose values fit in `end_bit` bits, and the order."""
    del end_bit
    values, order = torch.sort(x, stable=True)
    sorted_out.copy_(values)
    order_out.copy_(order)


def inclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Running sums."""
    torch.cumsum(x, dim, dtype=out.dtype, out=out)


def exclusive_cumsum(x: Tensor, dim: int, out: Tensor) -> None:
    """Running sums without the element itself."""
    out.copy_(torch.cumsum(x, dim, dtype=out.dtype) - x)


def replicate_forward(x: Tensor, bins: Tensor, out: Tensor) -> None:
    """Column i of `x [rows, n]` as often as bin i is long; `bins` are running sums."""
    lengths = torch.diff(bins, prepend=bins.new_zeros(1))
    out.copy_(torch.repeat_interleave(x, lengths, dim=1, output_size=out.shape[1]))


def indices(padded_bins: Tensor, block: int, block_rows: int, block_columns: int, out: Tensor) -> None:
    """Column of every block of the sparse `[tokens, E * F]` matrix, in blocks of `block` elements."""
    del block_rows
    blocks = torch.diff(padded_bins // block, prepend=padded_bins.new_zeros(1))
    expert = torch.repeat_interleave(torch.arange(blocks.numel(), device=blocks.device), blocks)
    columns = torch.arange(block_columns, device=blocks.device)
    out.copy_((expert[:, None] * block_columns + columns).flatten())


def megablocks_ops() -> types.ModuleType:
    """The module in plain torch; without `replicate_backward`, through which megablocks never differentiates."""
    module = types.ModuleType("megablocks_ops", megablocks_ops.__doc__)
    for function in (histogram, sort, inclusive_cumsum, exclusive_cumsum, replicate_forward, indices):
        setattr(module, function.__name__, function)
    return module


# --- grouped_gemm -----------------------------------------------------------------------------------------------------


def gmm(
    a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False, c: Tensor | None = None
) -> Tensor:
    """Grouped product without autograd: a_e b_e, a_e b_e^T, or with `trans_a` a_e^T b_e; into `c` if given."""
    counts = batch_sizes.to(a.device)
    if trans_a:
        out = grouped_outer(a.contiguous(), b.contiguous(), counts)
    else:
        out = grouped_product(a.contiguous(), b.mT if trans_b else b, counts)
    return out if c is None else c.copy_(out)


class _Gmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool) -> Tensor:
        ctx.save_for_backward(a, b, batch_sizes)
        ctx.trans_b = trans_b
        return gmm(a, b, batch_sizes, trans_b=trans_b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        a, b, batch_sizes = ctx.saved_tensors
        grad_a = gmm(grad, b, batch_sizes, trans_b=not ctx.trans_b) if ctx.needs_input_grad[0] else None
        left, right = (grad, a) if ctx.trans_b else (a, grad)
        return grad_a, gmm(left, right, batch_sizes, trans_a=True) if ctx.needs_input_grad[1] else None, None, None


def _differentiable_gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
    out: Tensor = _Gmm.apply(a, b, batch_sizes, trans_b)
    return out


def grouped_gemm() -> types.ModuleType:
    """The module in plain torch, with its two namespaces: `ops` with autograd, `backend` without."""
    module = types.ModuleType("grouped_gemm", grouped_gemm.__doc__)
    module.ops = types.SimpleNamespace(gmm=_differentiable_gmm)  # type: ignore[attr-defined]
    module.backend = types.SimpleNamespace(gmm=gmm)  # type: ignore[attr-defined]
    return module


# --- the Triton kernels of the grouped path and of the layer with a capacity -----------------------------------------


def gather(x: Tensor, order: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """Rows of the tokens `x [T, D]` in sorted order, times their weights if given: `[T K, D]`."""
    return _weighted(x[order.long() // top_k], weights, order.long())


def scatter(x: Tensor, order: Tensor, bin_ids: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """Sorted rows `[T K, D]` back to their tokens, times their weights if given, and summed: `[T, D]`."""
    rows = _weighted(x, weights, order.long())
    by_token = torch.empty_like(rows)
    by_token[order.long()] = rows
    return by_token.view(-1, top_k, x.shape[1]).sum(1) if top_k > 1 else by_token


def scatter_wgrad(x: Tensor, grad: Tensor, order: Tensor, bin_ids: Tensor, bins: Tensor, top_k: int) -> Tensor:
    """Gradient of `scatter` for the weights: row i of `x` times the gradient of its token."""
    products = (x.float() * grad[order.long() // top_k].float()).sum(1).to(x.dtype)
    out = torch.empty_like(products)
    out[order.long()] = products
    return out


def binned_gather(x: Tensor, order: Tensor, weights: Tensor | None, bins: Tensor, capacity: int, top_k: int) -> Tensor:
    """The first `capacity` rows of each expert, times their weights if given, zeros behind: `[E, capacity, D]`."""
    slots, rows = _kept(order, bins, capacity)
    out = x.new_zeros(bins.numel() * capacity, x.shape[1])
    out[slots] = _weighted(x[rows // top_k], weights, rows)
    return out.view(bins.numel(), capacity, x.shape[1])


def binned_scatter(x: Tensor, order: Tensor, weights: Tensor | None, bins: Tensor, top_k: int) -> Tensor:
    """Rows `[E, capacity, D]` back to their tokens, times their weights if given, and summed: `[T, D]`."""
    slots, rows = _kept(order, bins, x.shape[1])
    by_token = x.new_zeros(order.numel(), x.shape[2])
    by_token[rows] = _weighted(x.flatten(0, 1)[slots], weights, rows)
    return by_token.view(-1, top_k, x.shape[2]).sum(1) if top_k > 1 else by_token


def binned_scatter_wgrad(x: Tensor, grad: Tensor, order: Tensor, bins: Tensor, top_k: int) -> Tensor:
    """Gradient of `binned_scatter` for the weights; 0 for dropped rows."""
    slots, rows = _kept(order, bins, x.shape[1])
    out = x.new_zeros(order.numel())
    out[rows] = (x.flatten(0, 1)[slots].float() * grad[rows // top_k].float()).sum(1).to(x.dtype)
    return out


def _kept(order: Tensor, bins: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Slots among `E * capacity` that are taken, and the rows that take them; `bins` are running sums."""
    counts = torch.diff(bins, prepend=bins.new_zeros(1))
    expert = torch.repeat_interleave(torch.arange(bins.numel(), device=bins.device), counts)
    place = torch.arange(order.numel(), device=bins.device) - (bins - counts)[expert]
    kept = place < capacity
    return (expert * capacity + place)[kept], order.long()[kept]


def _weighted(rows: Tensor, weights: Tensor | None, numbers: Tensor) -> Tensor:
    return rows if weights is None else (rows.float() * weights[numbers].float()[:, None]).to(rows.dtype)


KERNELS: dict[str, Callable[..., Tensor]] = {
    function.__name__: function
    for function in (gather, scatter, scatter_wgrad, binned_gather, binned_scatter, binned_scatter_wgrad)
}
"""Functions of `megablocks.backend.kernels` and what computes the same where Triton cannot."""
