"""From a model that FSDP1 has wrapped and its optimizer to codes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _lazy_init

from eco_dist.engines.flat.shards import PlannedWeight
from eco_dist.engines.fsdp1.chunk import Chunk
from eco_dist.engines.fsdp1.geometry import Geometry, Member
from eco_dist.engines.fsdp1.hollow import HollowHandle
from eco_dist.engines.fsdp1.optimizer import FlatOptimizer
from eco_dist.engines.fsdp1.originals import Originals
from eco_dist.engines.fsdp1.refusals import refuse_local_state_dict, refuse_unsupported
from eco_dist.optim import ECOOptimizer
from eco_dist.recipe import Recipe, resolve_recipe
from eco_dist.weights import DEFAULT_SKIP, ConversionReport, plan_conversion
from eco_dist.weights.convert import tensor_ids


def convert(
    model: nn.Module,
    optimizer: ECOOptimizer,
    *,
    recipe: Recipe | str,
    skip: Sequence[str] = DEFAULT_SKIP,
    also_skip: Sequence[str] = (),
    plain: str = "fp32",
) -> FlatOptimizer:
    """Make codes of a model that is wrapped in `FullyShardedDataParallel`, in place. Collective.

    Names in `skip` and `also_skip` are those the parameters had before wrapping. Flat parameters that the optimizer
    does not step are left as they are. The others are gathered in fp32, one at a time.

    Args:
        model: a plain model in FSDP, with or without `use_orig_params`, with or without mixed precision.
        optimizer: `ECOAdamW` or `ECOSGD` over `model.parameters()` or over `Originals.of(model).parameters()`, before
            its first step.
        recipe: a recipe or its name.
        skip: see `quantize_weights_`.
        also_skip: see `quantize_weights_`.
        plain: see `quantize_weights_`.

    Returns:
        The optimizer to step from now on; schedulers of the one that was given go on working.

    Raises:
        TypeError: for another model or optimizer.
        ValueError: for a recipe without codes, an option of FSDP this does not work with, or a weight that holds NaN or
            infinity. The model is then unchanged.
    """
    refuse_unsupported(model, optimizer, resolve_recipe(recipe))
    assert isinstance(model, FullyShardedDataParallel)
    _lazy_init(model, model)  # makes it the root, whichever module is summoned first
    originals = Originals.of(model)
    report = plan_conversion(originals, recipe, skip=skip, also_skip=also_skip, plain=plain)
    groups = {id(p): index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    planned = _plan(report)
    chunks: list[tuple[Any, Chunk]] = []
    untouched: list[tuple[Any, Geometry, int]] = []
    modules = [(m, m._handle) for m in FullyShardedDataParallel.fsdp_modules(model) if m._handle is not None]
    for module, handle in modules:
        geometry, rank = _geometry(handle, originals, planned, groups), _chunk_number(handle)
        if all(member.group is None for member in geometry.members):
            untouched.append((handle, geometry, rank))
            continue
        with FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False):
            chunk = Chunk(geometry, rank, handle.device, _group(handle))
            chunk.assign(handle.flat_param.detach())
        chunks.append((handle, chunk))
    model.register_state_dict_pre_hook(refuse_local_state_dict)
    nothing = torch.full((1,), torch.nan, device=chunks[0][1].device)
    return FlatOptimizer(
        optimizer,
        [HollowHandle(handle, chunk, nothing) for handle, chunk in chunks],
        untouched=untouched,
        group=_group(chunks[0][0]),
        writes=_is_first_replica(modules[0][0]),
        originals=originals,
        conversion=report,
    )


def _plan(report: ConversionReport) -> dict[str, PlannedWeight]:
    """How the weights that may become codes are stored, by name."""
    ids = tensor_ids(conversion.names[0] for conversion in report.conversions)
    return {
        conversion.names[0]: PlannedWeight(
            name=conversion.names[0],
            shape=conversion.shape,
            recipe=conversion.recipe,
            tensor_id=ids[conversion.names[0]],
        )
        for conversion in report.conversions
        if conversion.recipe is not None
    }


def _geometry(handle: Any, originals: Originals, planned: dict[str, PlannedWeight], groups: dict[int, int]) -> Geometry:
    """The layout of a flat parameter; its members that no group steps stay in high precision."""
    flat, names, members = handle.flat_param, originals.names_in(handle), []
    starts = itertools.accumulate(flat._numels_with_padding, initial=0)
    offsets = [start for start, is_padding in zip(starts, flat._is_padding_mask, strict=False) if not is_padding]
    stepped = [flat] * len(names) if flat._params is None else flat._params
    for name, offset, shape, tensor in zip(names, offsets, flat._shapes, stepped, strict=True):
        group = groups.get(id(tensor), groups.get(id(originals.named[name]))) if tensor.requires_grad else None
        members.append(
            Member(
                name=name,
                shape=tuple(shape),
                offset=offset,
                elements=shape.numel(),
                planned=None if group is None else planned.get(name),
                group=group,
            )
        )
    is_cut = handle.uses_sharded_strategy
    return Geometry(members=tuple(members), chunk=flat._sharded_size.numel(), ranks=handle.world_size if is_cut else 1)


def _chunk_number(handle: Any) -> int:
    return int(handle.rank) if handle.uses_sharded_strategy else 0


def _group(handle: Any) -> dist.ProcessGroup | None:
    """Ranks with the other chunks; None if there are none."""
    is_cut = handle.uses_sharded_strategy and handle.world_size > 1
    return handle.process_group if is_cut else None


def _is_first_replica(module: Any) -> bool:
    """Whether this rank is the first of those that hold the same."""
    if not module._handle.uses_sharded_strategy:
        return bool(module._handle.rank == 0)
    replicas = getattr(module, "_inter_node_pg", None)
    return replicas is None or dist.get_rank(replicas) == 0
