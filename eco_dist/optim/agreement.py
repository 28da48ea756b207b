"""What ranks must decide together: whether a step happens, and the scale of a group that a shard border cuts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.optim.shard import mesh_groups
from eco_dist.optim.step import Task


def agreed_bad(good: Sequence[bool | Tensor], parameters: Sequence[Tensor]) -> bool:
    """Whether any rank holding a part of these parameters has a flag that is not set.

    Args:
        good: this rank's flags, booleans or 0-dimensional tensors; may be empty.
        parameters: all parameters of the optimizer, the same on every rank: they name the process groups, so that a
            rank without gradients still takes part.
    """
    on_device = [flag for flag in good if isinstance(flag, Tensor)]
    flag = torch.tensor(float(not all(flag for flag in good if not isinstance(flag, Tensor))))
    if on_device:
        flag = flag.to(on_device[0].device).maximum((~torch.stack(on_device)).any().to(torch.float32))
    for group in mesh_groups(parameters):
        flag = flag.to(device_of(group))
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag.item())


def agree_on_absmax(tasks: Sequence[Task]) -> None:
    """Replace each absmax by the largest among the ranks that own the group: one all-reduce a process group."""
    by_group: dict[str, list[Task]] = {}
    for item in tasks:
        group = cast(dist.ProcessGroup, item.shard.scale_group)
        by_group.setdefault(group.group_name, []).append(item)
    for items in by_group.values():
        absmax = [cast(Tensor, item.absmax) for item in items]
        together = torch.cat([tensor.flatten() for tensor in absmax])
        dist.all_reduce(together, dist.ReduceOp.MAX, group=items[0].shard.scale_group)
        for item, part in zip(items, together.split([tensor.numel() for tensor in absmax]), strict=True):
            item.absmax = part.view_as(cast(Tensor, item.absmax))


def device_of(group: dist.ProcessGroup) -> torch.device:
    """A device the group's backend can reduce on."""
    backend = dist.get_backend(group)
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
