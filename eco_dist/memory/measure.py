"""Measured memory: the unique storages that a live model and its optimizer hold, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from eco_dist.memory.attribution import Attribution, cross_check
from eco_dist.memory.categories import NOT_A_WEIGHTS, STATE_CATEGORIES, Category
from eco_dist.memory.report import Holding, MemoryReport, Moment, RankMemory, TensorMemory, tensor_entries
from eco_dist.memory.versions import versions
from eco_dist.optim.shard import local, reshard
from eco_dist.weights import QuantizedWeight


@runtime_checkable
class HoldsMemory(Protocol):
    """An optimizer or module that owns tensors which are neither parameters nor state: an engine's flat partitions.

    An engine implements it to be measured; this package knows no engine by name.
    """

    def memory_tensors(self) -> Iterable[tuple[str, Category, Tensor]]:
        """Name of the parameter or buffer, what the bytes are for, and the tensor."""
        ...


def measure(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    check: bool = False,
    strict: bool = False,
    timeline: tuple[Moment, ...] = (),
) -> MemoryReport:
    """What every rank holds between steps. Collective: all ranks must call it.

    Storages are counted once, however many tensors share them; what a storage has beyond the tensor in it is padding.
    FSDP2 modules that are still unsharded after a forward are resharded first.

    Args:
        model: any model, sharded or not.
        optimizer: its optimizer, after a step if its state is to be counted.
        check: whether to list live tensors that belong to nothing the walk found; walks all objects of the process,
            which takes seconds in a large one.
        strict: whether a master copy among them is an error; for a process that holds this model and no other.
        timeline: transient bytes of a step as `track` measured them, for the report.

    Raises:
        MasterCopyError: if `strict`, and a floating-point tensor at least as wide as fp32 and as large as a quantized
            weight (or all of them) belongs to no parameter, moment, gradient or buffer; on every rank, naming the
            tensor and who holds it.
    """
    reshard(model)
    mine = _measure_rank(model, optimizer, check=check or strict, timeline=timeline)
    ranks = [mine]
    if dist.is_initialized():
        gathered: list[RankMemory | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        ranks = [rank for rank in gathered if rank is not None]
    if strict:
        Attribution.refuse_master_copies(ranks)
    return MemoryReport(
        source="measured",
        engine="",
        recipe="",
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        ranks=tuple(ranks),
        model=type(model).__name__,
        mesh="1 rank" if len(ranks) == 1 else f"{len(ranks):,} ranks",
        optimizer=type(optimizer).__name__ if optimizer is not None else "",
        versions=versions(),
        assumptions=("unique storages of parameters, optimizer state, gradients and buffers of the live ranks",),
    )


def _measure_rank(
    model: nn.Module, optimizer: Optimizer | None, *, check: bool, timeline: tuple[Moment, ...]
) -> RankMemory:
    found = Attribution()
    tensors: list[TensorMemory] = []
    quantized_bytes = quantized_parameters = 0
    for name, parameter in model.named_parameters():
        weight = local(parameter)
        held = list(_parameter_bytes(name, parameter, optimizer, found))
        if isinstance(weight, QuantizedWeight):
            quantized_parameters += weight.numel()
            kinds = (*NOT_A_WEIGHTS, Category.GRADIENTS)
            quantized_bytes += sum(count for kind, count in held if kind not in kinds)
        tensors += tensor_entries(name, held)
    for name, buffer in model.named_buffers():
        tensors += tensor_entries(name, found.add(Category.BUFFERS, buffer))
    for name, category, tensor in _owned_by_engine(model, optimizer):
        tensors += tensor_entries(name, found.add(category, tensor))
    unattributed, process = cross_check(model, found) if check else ((), None)
    return RankMemory(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        holding=Holding(
            tensors=tuple(tensors),
            quantized_bytes=quantized_bytes,
            quantized_parameters=quantized_parameters,
            timeline=timeline,
        ),
        unattributed=unattributed,
        process=process,
    )


def _parameter_bytes(
    name: str, parameter: Tensor, optimizer: Optimizer | None, found: Attribution
) -> Iterator[tuple[Category, int]]:
    weight = local(parameter)
    if isinstance(weight, QuantizedWeight):
        found.expect(local_elements=weight.numel(), elements=parameter.numel())
        yield from found.add(Category.CODES, weight.codes)
        yield from found.add(Category.SCALES, weight.scales)
    else:
        yield from found.add(Category.HIGH_PRECISION, weight)
    if parameter.grad is not None:
        yield from found.add(Category.GRADIENTS, local(parameter.grad))
    for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
        category = STATE_CATEGORIES.get(str(key), Category.OTHER_STATE)
        for tensor in _tensors(value):
            yield from found.add(category, tensor)
            if category is Category.OTHER_STATE and isinstance(weight, QuantizedWeight):
                found.suspect(tensor, f"held by '{key}' of the optimizer's state of '{name}'")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors with storage of a piece of optimizer state: itself, or what a subclass of others is made of."""
    if not isinstance(value, Tensor):
        return
    value = local(value)
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        for name in names:
            yield from _tensors(getattr(value, name))
    else:
        yield value


def _owned_by_engine(model: nn.Module, optimizer: Optimizer | None) -> Iterator[tuple[str, Category, Tensor]]:
    owners: tuple[object, ...] = (*model.modules(), optimizer)
    for owner in owners:
        if isinstance(owner, HoldsMemory):
            yield from owner.memory_tensors()
