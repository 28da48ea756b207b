"""Whether the gradients of a step can be used, and by what factor: all ranks come to the same answer.

No gradient is rewritten. Unscaling (a loss scale) and clipping become one factor that the kernels apply on the way.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from eco_dist.optim.agreement import agreed_bad, device_of
from eco_dist.optim.kernels import kernel_for
from eco_dist.optim.shard import local
from eco_dist.optim.step import GRADIENT_LIMIT

CLIP_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to do with the gradients of a step.

    Attributes:
        usable: whether every gradient on every rank is finite and below 2^63.
        bad_here: parameters of this rank whose gradient is not.
        scale: factor on every gradient.
        norm: global L2 norm after unscaling and before clipping; None unless it was asked for.
    """

    usable: bool
    bad_here: int = 0
    scale: float = 1.0
    norm: float | None = None


def examine(
    parameters: Sequence[Tensor],
    everyone: Sequence[Tensor],
    *,
    max_norm: float | None = None,
    loss_scale: float = 1.0,
    overflow: Tensor | None = None,
) -> Verdict:
    """Look at the gradients once; collective over the ranks that hold a part of the parameters.

    Args:
        parameters: those with a gradient.
        everyone: all parameters of the optimizer, the same on every rank, with or without one.
        max_norm: largest global norm; None does not clip.
        loss_scale: what the loss was multiplied with.
        overflow: not zero where a gradient scaler has found an infinity.
    """
    grads = [local(cast(Tensor, parameter.grad)) for parameter in parameters]
    if max_norm is None:
        good = [kernel_for(grad.device).is_steppable(grad) for grad in grads]
        norms = []
    else:
        norms = [kernel_for(grad.device).norm(grad) for grad in grads]
        good = [norm < GRADIENT_LIMIT for norm in norms]
    if agreed_bad(good if overflow is None else [*good, overflow == 0], everyone):
        return Verdict(usable=False, bad_here=sum(not bool(flag) for flag in good))
    if max_norm is None:
        return Verdict(usable=True, scale=1 / loss_scale)
    norm = math.sqrt(_sum_over_shards(parameters, [float(n) ** 2 for n in norms], everyone)) / loss_scale
    return Verdict(usable=True, scale=min(1.0, max_norm / (norm + CLIP_EPSILON)) / loss_scale, norm=norm)


def _sum_over_shards(parameters: Sequence[Tensor], values: Sequence[float], everyone: Sequence[Tensor]) -> float:
    """Sum of one value a shard over all shards of all parameters, replicas counted once."""
    sums: dict[tuple[str, ...], float] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    for parameter in everyone:  # so that all ranks reduce the same sums in the same order
        for group in _sharding_groups(parameter):
            groups[group.group_name] = group
        sums.setdefault(_names(parameter), 0.0)
    for parameter, value in zip(parameters, values, strict=True):
        sums[_names(parameter)] += value
    total = 0.0
    for names, value in sums.items():
        together = torch.tensor(value, dtype=torch.float64)
        for name in names:
            together = together.to(device_of(groups[name]))
            dist.all_reduce(together, group=groups[name])
        total += float(together)
    return total


def _sharding_groups(parameter: Tensor) -> list[dist.ProcessGroup]:
    if not isinstance(parameter, DTensor):
        return []
    mesh = parameter.device_mesh
    groups = [mesh.get_group(dim) for dim, place in enumerate(parameter.placements) if not isinstance(place, Replicate)]
    return [group for group in groups if group.size() > 1]


def _names(parameter: Tensor) -> tuple[str, ...]:
    return tuple(group.group_name for group in _sharding_groups(parameter))
