"""Models under FSDP1 for tests: wrapped as a user would, converted, and stepped with chosen gradients."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from eco_dist import ECOAdamW
from eco_dist.engines.fsdp1.optimizer import FlatOptimizer
from eco_dist.fsdp1 import convert
from tests.distributed.models import Block

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def wrap(model: nn.Module, blocks: set[type[nn.Module]], **options: Any) -> FullyShardedDataParallel:
    options = {"use_orig_params": False, "sharding_strategy": ShardingStrategy.FULL_SHARD, **options}
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(blocks), device_id=torch.device("cpu"), **options
    )


def converted(
    model: nn.Module, recipe: Any, blocks: set[type[nn.Module]] = frozenset({Block}), **options: Any
) -> tuple[FullyShardedDataParallel, FlatOptimizer]:
    """A wrapped and converted model and its optimizer; options are FSDP's, or the optimizer's."""
    chosen = {key: options.pop(key) for key in ("lr", "weight_decay", "seed", "max_grad_norm") if key in options}
    wrapped = wrap(model, blocks, **options)
    client = ECOAdamW(wrapped.parameters(), **{"lr": 3e-3, "weight_decay": 0.1, "seed": 7, **chosen})
    return wrapped, convert(wrapped, client, recipe=recipe)


def contents(optimizer: FlatOptimizer) -> dict[str, dict[str, Tensor]]:
    """Codes, scales and moments of this rank's units of every weight, and where they begin; fp32 elements likewise."""
    result: dict[str, dict[str, Tensor]] = {}
    for handle in optimizer.handles:
        geometry = handle.chunk.geometry
        for number, member in enumerate(geometry.members):
            if number in handle.chunk.plain:
                tensor = handle.chunk.plain[number]
                first = torch.tensor(geometry.piece(member, handle.chunk.rank)[0])
                stored = {"codes": tensor.clone()}
            else:
                shard = handle.chunk.shards[number]
                tensor, first = shard.weight, torch.tensor(shard.run.first)
                stored = {"codes": shard.weight.codes.clone(), "scales": shard.weight.scales.clone()}
            state = {key: value.clone() for key, value in optimizer.state[tensor].items()}
            result[member.name] = {"first": first, **stored, **state}
    return result
