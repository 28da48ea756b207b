"""Our layers of experts in DeepSpeed's expert-parallel groups, at stage 1 and 2.

DeepSpeed reduces the gradients of a parameter marked `allreduce=False` and `group_name="ep_size_N"` over the ranks with
the same experts alone, and partitions its optimizer state among them. It looks for such parameters only where it finds
one of its own `MoE` modules, so experts become one by name. Its checkpoints of them want its own module names; without
that mark experts travel with the partitions, which hold every one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups as process_groups
from torch import nn

from eco_dist.moe.experts import Experts
from eco_dist.moe.parallel import check_divides_world, expert_layers, rows_of


class ZeroExperts(Experts, MoE):
    """Experts of which this rank holds a part, in groups that DeepSpeed made."""

    num_experts: int

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Nothing to do: `shard_experts` has made the groups."""


def shard_experts(model: nn.Module, expert_parallel: int) -> None:
    """Keep this rank's experts of every `MoELayer`, in place; collective over all ranks.

    Call it after `deepspeed.init_distributed()` and before `deepspeed.initialize`, which is given the parameters that
    are left. Neighbouring ranks share the experts, as under FSDP2.

    Args:
        model: a plain model, equal on all ranks.
        expert_parallel: ranks that share one set of experts, a divisor of the world size.

    Raises:
        RuntimeError: without an initialized process group.
        ValueError: if there are no experts, they do not split evenly, or ranks differ.
    """
    if not dist.is_initialized():
        raise RuntimeError("expected an initialized process group; call deepspeed.init_distributed() first")
    check_divides_world(expert_parallel)
    layers = expert_layers(model, expert_parallel)
    if expert_parallel == 1:
        return
    name = f"ep_size_{expert_parallel}"
    if name not in process_groups._get_expert_parallel_group_dict():
        process_groups._create_expert_and_data_parallel(expert_parallel)
    group = process_groups._get_expert_parallel_group(name)
    for layer in layers:
        for key, parameter in list(layer.mlp.named_parameters()):
            mine = nn.Parameter(rows_of(parameter.detach(), dist.get_rank(group), expert_parallel))
            vars(mine).update(allreduce=False, group_name=name)
            setattr(layer.mlp, key, mine)
        layer.group = group
        layer.__class__ = ZeroExperts
        vars(layer)["num_experts"] = layer.config.experts


@contextmanager
def as_plain_model(engine: Any) -> Iterator[None]:
    """Let DeepSpeed's checkpoints treat a model with `ZeroExperts` as one without experts of its own."""
    ours = any(isinstance(module, ZeroExperts) for module in engine.module.modules())
    had = engine.has_moe_layers
    engine.has_moe_layers = had and not ours
    try:
        yield
    finally:
        engine.has_moe_layers = had
