"""PyTorch FSDP2 (`fully_shard`): the sharded parameter is codes, the all-gather carries codes.

Two ways lead here. Existing scripts call `quantize_weights_(model, recipe)` once and keep their own `fully_shard`
calls; `shard_model` does both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy, fully_shard

from eco_dist.moe import Router
from eco_dist.moe.parallel import EXPERT_DATA, expert_mesh, shard_experts
from eco_dist.recipe import Recipe
from eco_dist.weights import DEFAULT_SKIP, ConversionReport, quantize_weights_


def shard_model(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    mesh: DeviceMesh | None = None,
    compute_dtype: torch.dtype = torch.float32,
    blocks: Sequence[nn.Module] | None = None,
    skip: Sequence[str] = DEFAULT_SKIP,
    also_skip: Sequence[str] = (),
    plain: str = "fp32",
    reshard_after_forward: bool | None = None,
    offload_policy: OffloadPolicy | None = None,
    expert_parallel: int = 1,
) -> ConversionReport:
    """Quantize a model and shard it, each block as one communication unit, in place.

    Args:
        model: the whole model, equal on all ranks, on the compute device or on meta.
        recipe: a recipe or its name.
        mesh: one dimension (shard) or two (replicate, shard); default: all ranks in one.
        compute_dtype: dtype of unsharded weights and activations; gradients are reduced in fp32 whatever it is.
        blocks: modules to shard one by one, inner ones first; default: the children of the longest `nn.ModuleList`.
        skip: see `quantize_weights_`.
        also_skip: see `quantize_weights_`.
        plain: see `quantize_weights_`.
        reshard_after_forward: see `fully_shard`; an int is not possible with quantized weights.
        offload_policy: `CPUOffloadPolicy(pin_memory=False)` keeps shards and the step on the CPU.
        expert_parallel: ranks that share one set of experts (`eco_dist.moe.parallel`), a divisor of the world size.

    Returns:
        What was converted, what was not, and why.

    Raises:
        RuntimeError: without an initialized process group.
        ValueError: for an int `reshard_after_forward`, a mesh of two dimensions together with expert parallelism, and
            as `quantize_weights_` and `shard_experts`.
    """
    if not dist.is_initialized():
        raise RuntimeError("expected an initialized process group; start with torchrun and init_process_group() first")
    if isinstance(reshard_after_forward, int) and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"expected reshard_after_forward True, False or None, got {reshard_after_forward}: FSDP2 cannot reshard "
            "to a smaller mesh where a weight has its own all-gather"
        )
    if expert_parallel > 1 and mesh is not None and mesh.ndim > 1:
        raise ValueError("expected a mesh of one dimension with expert parallelism, got two (HSDP); leave mesh out")
    device_type = _device_type(model)
    experts_mesh = expert_mesh(expert_parallel, device_type) if expert_parallel > 1 else None
    report = quantize_weights_(model, recipe, skip=skip, also_skip=also_skip, plain=plain)
    mesh = mesh or init_device_mesh(device_type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype is torch.float32 else compute_dtype, reduce_dtype=torch.float32
    )
    options: dict[str, Any] = {
        "reshard_after_forward": reshard_after_forward,
        "offload_policy": offload_policy or OffloadPolicy(),
    }
    if experts_mesh is not None:
        # Routing weights stay fp32; the tokens already have the compute dtype of their block.
        kept = dataclasses.replace(policy, cast_forward_inputs=False)
        for experts in shard_experts(model, experts_mesh):
            fully_shard(experts, mesh=experts_mesh[EXPERT_DATA], mp_policy=kept, **options)
    if policy.param_dtype is not None:
        for router in [module for module in model.modules() if isinstance(module, Router)]:
            exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
            fully_shard(router, mesh=mesh, mp_policy=exact, **options)
    for module in (*(default_blocks(model) if blocks is None else blocks), model):
        fully_shard(module, mesh=mesh, mp_policy=policy, **options)
    return report


def default_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: children of its longest `nn.ModuleList`; none if it has no such list."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=[])


def _device_type(model: nn.Module) -> str:
    types = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    if len(types) > 1:
        raise ValueError(f"expected all parameters on one kind of device, got {sorted(types)}")
    return types.pop() if types else ("cuda" if torch.cuda.is_available() else "cpu")
