"""What ranks tell each other while they save and load: results, and failures that all of them then raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from eco_dist.checkpoint.manifest import CheckpointError

T = TypeVar("T")


def own_rank() -> int:
    """This rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def exchange(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The value of every rank on every rank; collective."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def agreed(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Do something on every rank; if it fails on one it fails on all, with the same sentence. Collective.

    Returns:
        This rank's result.
    """
    result: T | None = None
    failure = None
    try:
        result = work()
    except (OSError, ValueError) as error:
        kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
        failure = (kind, str(error))
    failures = exchange(failure, group)
    for rank, failed in enumerate(failures):
        if failed is not None:
            kind, message = failed
            raise kind(message if len(failures) == 1 else f"rank {rank}: {message}")
    return result  # type: ignore[return-value]


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """As `agreed`; the results of all ranks."""
    return exchange(agreed(work, group), group)
