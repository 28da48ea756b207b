"""Measured memory: the unique storages that a live model and its optimizer hold, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from eco_dist.memory.attribution import Attribution, cross_check
from eco_dist.memory.categories import NOT_A_WEIGHTS, STATE_CATEGORIES, Category, category_of
from eco_dist.memory.report import Holding, MemoryReport, Moment, RankMemory, TensorMemory, tensor_entries
from eco_dist.memory.versions import versions
from eco_dist.optim.shard import local, reshard
from eco_dist.weights import QuantizedWeight


@runtime_checkable
class HoldsMemory(Protocol):
    """Whoever owns tensors that are no parameters: an engine with its flat partitions and buffers.

    An engine implements it to be measured; this package knows no engine by name.
    """

    def memory_tensors(self) -> Iterable[tuple[str, str, Tensor]]:
        """Name of the parameter or buffer, what the bytes are for, and the tensor.

        What they are for is a `Category` (or its word), or a key of optimizer state. Tensors may be views of one
        storage but not of the same bytes; the rest of their storage is padding.
        """
        ...

    def quantized_weights(self) -> Iterable[tuple[str, int, int]]:
        """Name, elements on this rank and elements in all of the weights among them that are codes."""
        ...


def measure(
    model: nn.Module,
    optimizer: Optimizer | HoldsMemory | None = None,
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
        optimizer: its optimizer, or the engine that owns its states, after a step if they are to be counted. Modules
            that are `HoldsMemory` are found by themselves.
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
    model: nn.Module, optimizer: Optimizer | HoldsMemory | None, *, check: bool, timeline: tuple[Moment, ...]
) -> RankMemory:
    found = Attribution()
    tensors: list[TensorMemory] = []
    quantized_bytes = quantized_parameters = 0
    for owner in (optimizer, *model.modules()):
        if isinstance(owner, HoldsMemory):
            held, own_bytes, own_parameters = _owned(owner, found)
            tensors += held
            quantized_bytes, quantized_parameters = quantized_bytes + own_bytes, quantized_parameters + own_parameters
    state = optimizer.state if isinstance(optimizer, Optimizer) else {}
    for name, parameter in model.named_parameters():
        weight = local(parameter)
        counts = list(_parameter_bytes(name, parameter, state.get(parameter, {}), found))
        if isinstance(weight, QuantizedWeight):
            quantized_parameters += weight.numel()
            quantized_bytes += _of_weight(counts)
        tensors += tensor_entries(name, counts)
    for name, buffer in model.named_buffers():
        tensors += tensor_entries(name, found.add(Category.BUFFERS, buffer))
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


def _owned(owner: HoldsMemory, found: Attribution) -> tuple[list[TensorMemory], int, int]:
    """What an engine holds; bytes and elements of the quantized weights among it."""
    sizes = {name: (here, whole) for name, here, whole in owner.quantized_weights()}
    for here, whole in sizes.values():
        found.expect(local_elements=here, elements=whole)
    by_name: dict[str, list[tuple[Category, int]]] = {}
    views = ((name, category_of(kind), tensor) for name, kind, tensor in owner.memory_tensors())
    for name, category, count in found.add_views(views):
        by_name.setdefault(name, []).append((category, count))
    tensors = [entry for name, counts in by_name.items() for entry in tensor_entries(name, counts)]
    quantized = sum(_of_weight(counts) for name, counts in by_name.items() if name in sizes)
    return tensors, quantized, sum(here for here, _ in sizes.values())


def _of_weight(counts: Iterable[tuple[Category, int]]) -> int:
    """Bytes that grow with a quantized weight and stay between steps."""
    return sum(count for kind, count in counts if kind.is_static and kind not in NOT_A_WEIGHTS)


def _parameter_bytes(
    name: str, parameter: Tensor, state: Mapping[str, Any], found: Attribution
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
    for key, value in state.items():
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
