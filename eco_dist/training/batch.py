"""How a global batch is dealt out: to ranks, and on each of them to micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from eco_dist.training.config import TrainConfig

__all__ = ["BatchSplit", "split_batch"]


@dataclass(frozen=True, kw_only=True)
class BatchSplit:
    """Shares of a global batch.

    Attributes:
        micro: sequences a rank computes at a time.
        accumulate: how many times in an optimizer step.
    """

    micro: int
    accumulate: int


def split_batch(config: TrainConfig, world_size: int) -> BatchSplit:
    """Shares of ``data.batch`` on so many ranks.

    Raises:
        ValueError: it does not split evenly over ranks and micro-batches.
    """
    batch, accumulate = config.data.batch, config.run.accumulate
    if batch % (world_size * accumulate):
        raise ValueError(
            f"expected data.batch divisible by ranks * run.accumulate = {world_size} * {accumulate}, "
            f"got {batch}; change data.batch"
        )
    share = batch // world_size
    if config.data.micro_batch is not None:
        fewest = -(-share // config.data.micro_batch)
        accumulate = next(parts for parts in range(fewest, share + 1) if share % parts == 0)
    return BatchSplit(micro=share // accumulate, accumulate=accumulate)
