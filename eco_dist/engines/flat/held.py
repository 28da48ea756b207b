"""A run of one parameter as checkpoints see it (`eco_dist.checkpoint.holders.Held`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from eco_dist.engines.flat.shards import ShardOptimizer, WeightShard


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldRun:
    """A run of one parameter's elements on this rank.

    Attributes:
        shape: global shape of the parameter.
        start: first element of the run in the flattened parameter.
        tensor: codes and scales as a quantized weight of units, or plain elements.
        state: optimizer state of the run.
        stream: number of its stream of random bits; None in high precision.
        saved: whether this rank writes it.
    """

    shape: tuple[int, ...]
    start: int
    tensor: Tensor
    state: Mapping[str, Tensor]
    stream: int | None = None
    saved: bool = True


def quantized_run(optimizer: ShardOptimizer, shard: WeightShard, *, saved: bool = True) -> HeldRun:
    """The units of a shard."""
    return HeldRun(
        shape=tuple(shard.plan.shape),
        start=shard.run.first * shard.plan.units.columns,
        tensor=shard.weight,
        state=optimizer.state[shard.weight],
        stream=shard.weight.tensor_id,
        saved=saved,
    )
