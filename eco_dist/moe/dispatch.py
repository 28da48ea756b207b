"""Tokens to their experts and back: sorted on one rank, exchanged among the ranks of an expert-parallel group.

[Note: dispatch]
A rank has T tokens, each for K experts: T K rows, sorted by expert (stably, so the order within an expert is that of
the tokens). Rank r of R owns experts r E/R .. (r+1) E/R - 1, so the rows for one rank lie together: the ranks exchange
counts, then rows, sort what arrived by expert again, compute, and do all of it backwards. Any rank may send or receive
nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.moe.config import Wire
from eco_dist.moe.grouped import check_rows
from eco_dist.numerics import Format, Granularity, decode, encode

_SCALE_BYTES = 4


class Reorder(torch.autograd.Function):
    """Rows in another order, each `copies` times: y_j = x_(order_j // copies).

    Backward adds a row's copies up in a fixed order, where indexing would scatter with atomics.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, undo: Tensor, copies: int) -> Tensor:
        """`order` is a permutation of `copies * T` positions, `undo` its inverse."""
        ctx.save_for_backward(undo)
        ctx.copies = copies
        return x[order if copies == 1 else order // copies]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        """dx_i = the sum of its copies' gradients."""
        (undo,) = ctx.saved_tensors
        rows = grad[undo]
        if ctx.copies > 1:
            rows = rows.view(-1, ctx.copies, grad.shape[-1]).sum(1)
        return rows, None, None, None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Order:
    """Rows sorted by a key, stably, and the way back.

    Attributes:
        order: int64, row at each sorted position; row i belongs to token i // copies.
        undo: its inverse.
        copies: rows of a token.
    """

    order: Tensor
    undo: Tensor
    copies: int = 1

    @classmethod
    def by(cls, key: Tensor, copies: int = 1) -> Order:
        """The stable order of an integer key, one a row."""
        order = torch.argsort(key, stable=True)
        undo = torch.empty_like(order)
        undo[order] = torch.arange(order.numel(), device=order.device)
        return cls(order=order, undo=undo, copies=copies)

    def sorted_rows(self, x: Tensor) -> Tensor:
        """Rows of the tokens `x [T, D]`, sorted: `[T * copies, D]`."""
        rows: Tensor = Reorder.apply(x, self.order, self.undo, self.copies)
        return rows

    def original_rows(self, rows: Tensor) -> Tensor:
        """Sorted rows in the order they had, `[T * copies, D]`."""
        original: Tensor = Reorder.apply(rows, self.undo, self.order, 1)
        return original


def combine(rows: Tensor, weights: Tensor) -> Tensor:
    """Sum over a token's K rows times their weights: `[T K, D]`, fp32 `[T, K]` -> `[T, D]` in the dtype of the rows."""
    by_token = rows.view(*weights.shape, rows.shape[-1])
    return (by_token * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


class AllToAll(torch.autograd.Function):
    """Exchange rows: `send[r]` of them to rank r, `receive[r]` from it; backward the other way round.

    With `wire` `fp8` a row travels as E4M3 codes and its scale, `D + 4` bytes, and so does its gradient; what arrives
    is decoded in the dtype that was sent. Float8 never meets a collective: codes are uint8.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None, wire: Wire
    ) -> Tensor:
        """Rows `[sum(send), D]` to rows `[sum(receive), D]`."""
        ctx.send, ctx.receive, ctx.group, ctx.wire = send, receive, group, wire
        return exchange_rows(x, send, receive, group, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The gradients go back where the rows came from."""
        return exchange_rows(grad, ctx.receive, ctx.send, ctx.group, ctx.wire), None, None, None, None


def exchange_rows(
    x: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup | None, wire: Wire
) -> Tensor:
    """Exchange rows without autograd; no group means this rank alone, which still rounds to the wire's format."""
    payload = _packed(x) if wire == "fp8" else x.contiguous()
    if group is not None:
        arrived = payload.new_empty((sum(receive), *payload.shape[1:]))
        dist.all_to_all_single(arrived, payload, receive, send, group=group)
        payload = arrived
    return _unpacked(payload, x.dtype) if wire == "fp8" else payload


def _packed(x: Tensor) -> Tensor:
    """Rows as bytes `[T, D + 4]`: E4M3 codes, rounded to nearest, and an fp32 scale."""
    codes, scales = encode(x.float(), Format.E4M3, Granularity.ROW)
    return torch.cat((codes, scales.view(torch.uint8)), dim=-1)


def _unpacked(payload: Tensor, dtype: torch.dtype) -> Tensor:
    codes, scales = payload[:, :-_SCALE_BYTES], payload[:, -_SCALE_BYTES:].contiguous().view(torch.float32)
    return decode(codes.contiguous(), scales, Format.E4M3, Granularity.ROW, codes.shape[-1]).to(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
    """How the rows of one layer travel.

    Attributes:
        send, receive: rows to and from each rank of the group.
        counts: int64 `[E / R]`, rows that arrive for each expert of this rank, on the device of the tokens.
        order: the arrived rows sorted by expert; None if they stay where they are.
        group: expert-parallel ranks; None for this rank alone.
        wire: how a row travels.
    """

    send: list[int]
    receive: list[int]
    counts: Tensor
    order: Order | None
    group: dist.ProcessGroup | None
    wire: Wire

    @classmethod
    def among(cls, counts: Tensor, group: dist.ProcessGroup | None, wire: Wire) -> Exchange:
        """Agree on who sends how much; collective in the group.

        Args:
            counts: int64 `[E]`, this rank's rows for each expert.
            group: expert-parallel ranks.
            wire: how a row travels.

        Raises:
            ValueError: if more rows arrive than int32 can count.
        """
        if group is None or group.size() == 1:
            return cls(send=[], receive=[], counts=counts, order=None, group=None, wire=wire)
        ranks = group.size()
        arriving = torch.empty_like(counts)
        dist.all_to_all_single(arriving, counts, group=group)
        # One transfer to the host for both: the splits of a collective are Python lists.
        send, receive = torch.stack((counts, arriving)).view(2, ranks, -1).sum(-1).tolist()
        check_rows(sum(receive))
        by_rank = arriving.view(ranks, -1)
        expert = torch.arange(by_rank.shape[1], device=counts.device).repeat(ranks)
        order = Order.by(expert.repeat_interleave(arriving, output_size=sum(receive)))
        return cls(send=send, receive=receive, counts=by_rank.sum(0), order=order, group=group, wire=wire)

    def to_experts(self, rows: Tensor) -> Tensor:
        """Rows sorted by expert on the rank of their token -> rows sorted by expert on the rank of their expert."""
        if self.group is None and self.wire == "full":
            return rows
        arrived: Tensor = AllToAll.apply(rows, self.send, self.receive, self.group, self.wire)
        return arrived if self.order is None else self.order.sorted_rows(arrived)

    def to_tokens(self, rows: Tensor) -> Tensor:
        """The way back."""
        if self.group is None and self.wire == "full":
            return rows
        if self.order is not None:
            rows = self.order.original_rows(rows)
        back: Tensor = AllToAll.apply(rows, self.receive, self.send, self.group, self.wire)
        return back
