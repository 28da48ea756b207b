"""What a FSDP1 model must be like to be converted; everything is checked before anything is changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from eco_dist.engines.fsdp1.originals import Originals, handles_of
from eco_dist.optim import ECOOptimizer
from eco_dist.recipe import Recipe
from eco_dist.weights import QuantizedWeight


def refuse_unsupported(model: nn.Module, optimizer: Any, recipe: Recipe) -> None:
    """Check a model, its optimizer and a recipe.

    Raises:
        TypeError: for a model that FSDP1 has not wrapped, or another optimizer.
        ValueError: for what `convert` cannot work with.
    """
    if not isinstance(model, FullyShardedDataParallel):
        raise TypeError(
            f"expected a model in torch.distributed.fsdp.FullyShardedDataParallel, got {type(model).__name__}; wrap "
            "the plain model first (for fully_shard use eco_dist.shard_model)"
        )
    if not isinstance(optimizer, ECOOptimizer):
        raise TypeError(f"expected ECOAdamW or ECOSGD over model.parameters(), got {type(optimizer).__name__}")
    if not recipe.quantizes:
        raise ValueError(
            f"expected a recipe that stores weights as codes, got '{recipe.name}'; step FSDP's own parameters with the "
            "optimizer as it is"
        )
    probe = QuantizedWeight.from_values(torch.zeros(1, 1), recipe)
    for group in optimizer.param_groups:
        optimizer._check_group({**group, "params": [probe]})  # what a step would refuse
    if optimizer.state:
        raise ValueError("expected an optimizer before its first step, got one with state; convert before training")
    if model._is_root is False:
        raise ValueError("expected the outermost FSDP module, got one inside of another; convert that one")
    handles = handles_of(model)
    for handle in handles:
        _refuse_handle(handle)
    if len({(id(handle.process_group), handle.uses_sharded_strategy) for handle in handles}) > 1:
        raise ValueError(
            "expected one process group and one kind of sharding for the whole model, got several; wrap all modules "
            "with the same ones"
        )
    _refuse_strangers(model, handles, optimizer)
    if not any(parameter.requires_grad for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("expected an optimizer with parameters that train, got frozen ones alone; unfreeze some")


def refuse_local_state_dict(module: nn.Module, *_: Any) -> None:
    """A hook before `state_dict`: FSDP would save what stands for its chunks.

    Raises:
        NotImplementedError: for `LOCAL_STATE_DICT`.
    """
    kind: Any = module._state_dict_type
    if kind is StateDictType.LOCAL_STATE_DICT:
        raise NotImplementedError(
            "expected FULL_STATE_DICT or SHARDED_STATE_DICT of a converted FSDP1 model, got LOCAL_STATE_DICT, whose "
            "flat parameters hold no weights; use one of those, or eco_dist.checkpoint.save"
        )


def _refuse_handle(handle: Any) -> None:
    """Check a flat parameter."""
    flat, name = handle.flat_param, handle.flat_param._fqns[0]
    if "_all_gather_flat_param" in vars(handle):  # ours, see hollow.py
        raise ValueError(f"expected a plain FSDP model, got '{name}' as codes; convert a model once")
    if handle._offload_params:
        raise ValueError("expected FSDP without cpu_offload, got CPUOffload(offload_params=True); leave it out")
    if handle._fsdp_extension is not None:
        raise ValueError("expected FSDP without a device mesh of tensor parallelism, got one; use FSDP2 for it")
    if torch.float16 in (handle._fwd_bwd_param_dtype, handle._reduce_dtype):
        raise ValueError("expected compute and reduction in bf16 or fp32, got fp16, which needs loss scaling; use bf16")
    for parameter, is_contiguous in zip(flat._fqns, flat._contiguities, strict=True):
        if not is_contiguous:
            raise ValueError(f"expected contiguous parameters, got '{parameter}' transposed; call contiguous() on it")


def _refuse_strangers(model: FullyShardedDataParallel, handles: list[Any], optimizer: ECOOptimizer) -> None:
    """Refuse an optimizer of parameters that are in no flat parameter, such as those of `ignored_modules`."""
    own = {id(handle.flat_param) for handle in handles}
    own |= {id(parameter) for handle in handles for parameter in handle.flat_param._params or ()}
    own |= {id(parameter) for parameter in Originals.of(model).parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if strangers:
        raise ValueError(
            f"expected an optimizer of the FSDP model's parameters, got {len(strangers)} others; make it after "
            "wrapping, from model.parameters(), without parameters of ignored_modules"
        )
