"""Codes under PyTorch's first FSDP: `convert` a model in `FullyShardedDataParallel` and its optimizer.

`originals` shows the parameters as they were before wrapping, `stored_weights` what they hold, `measure` the memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from eco_dist.engines.fsdp1 import FlatOptimizer, Originals, convert
from eco_dist.memory import MemoryReport
from eco_dist.memory import measure as _measure
from eco_dist.memory.report import Moment

__all__ = ["FlatOptimizer", "Originals", "convert", "measure", "originals", "stored_weights"]


def originals(model: FullyShardedDataParallel) -> Originals:
    """Names and shapes from before wrapping, on the meta device: an optimizer may be made of these parameters.

    With `use_orig_params=False` it is the only way to give parameters of one flat parameter different options, such as
    no weight decay for norms.

    Args:
        model: the FSDP model.
    """
    return Originals.of(model)


def stored_weights(model: FullyShardedDataParallel) -> Iterator[tuple[str, Tensor]]:
    """Name and stored weight, whole and in fp32, of every parameter; gathers one flat parameter at a time. Collective.

    Args:
        model: the FSDP model.
    """
    shown = Originals.of(model)
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle = module._handle
        if handle is None:
            continue
        with FullyShardedDataParallel.summon_full_params(module, recurse=False, writeback=False):
            views = list(handle._get_unflat_views(handle.flat_param.detach().clone()))
        yield from zip(shown.names_in(handle), views, strict=True)


def measure(
    model: nn.Module,
    optimizer: FlatOptimizer,
    *,
    check: bool = False,
    strict: bool = False,
    timeline: tuple[Moment, ...] = (),
) -> MemoryReport:
    """What every rank of a converted model holds between steps; `eco_dist.measure` with the model's own size.

    Args:
        model: the FSDP model.
        optimizer: what `convert` returned.
        check: see `eco_dist.memory.measure`.
        strict: see `eco_dist.memory.measure`.
        timeline: see `eco_dist.memory.measure`.

    Raises:
        MasterCopyError: if `strict`, and an fp32 tensor as large as a quantized weight belongs to nothing.
    """
    report = _measure(model, optimizer, check=check, strict=strict, timeline=timeline)
    return dataclasses.replace(
        report,
        engine="fsdp1",
        optimizer=type(optimizer.client).__name__,
        parameters=sum(parameter.numel() for parameter in optimizer.originals.named.values()),
    )
