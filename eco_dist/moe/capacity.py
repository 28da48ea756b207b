"""A limit on the rows of an expert: memory that is known before, for tokens that are dropped.

[Note: capacity]
With a capacity factor C an expert takes at most max(1, floor(C K T / E)) rows, T the tokens of all ranks that share the
experts. Rows beyond, in order of rank and token, are dropped where they arrive: their expert adds nothing to them and
learns nothing from them. So one process with all tokens drops the same rows. (GShard, section 2.2; the rule is that of
`megablocks.layers.moe` without expert parallelism.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.moe.config import MoEConfig
from eco_dist.moe.router import Routing


def limited(routing: Routing, config: MoEConfig, group: dist.ProcessGroup | None) -> Routing:
    """The routing with its capacity and the share of rows beyond it; collective in the group if there is a limit."""
    if config.capacity_factor is None:
        return routing
    counts = routing.counts
    if group is not None:
        counts = counts.clone()
        dist.all_reduce(counts, group=group)
    rows = int(counts.sum())
    capacity = max(1, int(config.capacity_factor * (rows / config.experts)))
    dropped = (counts - capacity).clamp(min=0).sum() / max(rows, 1)
    return routing._replace(capacity=capacity, dropped=dropped)


def within_capacity(
    rows: Tensor, counts: Tensor, capacity: int | None, compute: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """`compute(rows, counts)` for the first `capacity` rows of each expert, zero for the others.

    Args:
        rows: `[T, D]`, sorted by expert.
        counts: int64 `[E]`, rows of each expert.
        capacity: most rows of an expert; None for no limit.
        compute: maps rows sorted by expert, and their counts, to rows.
    """
    if capacity is None or int(counts.max()) <= capacity:
        return compute(rows, counts)
    first = (counts.cumsum(0) - counts).repeat_interleave(counts, output_size=rows.shape[0])
    place = torch.arange(rows.shape[0], device=rows.device) - first
    kept = (place < capacity).nonzero().squeeze(1)
    out = compute(rows[kept], counts.clamp(max=capacity))
    return out.new_zeros(rows.shape[0], out.shape[-1]).index_copy(0, kept, out)
