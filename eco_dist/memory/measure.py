"""Measured memory: the unique storages that a live model and its optimizer hold, gathered from all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from eco_dist.memory.categories import STATE_CATEGORIES, Category
from eco_dist.memory.report import MemoryReport, RankMemory, TensorMemory, tensor_entries
from eco_dist.optim.shard import local
from eco_dist.weights import QuantizedWeight


def measure(model: nn.Module, optimizer: Optimizer | None = None) -> MemoryReport:
    """What every rank holds between steps. Collective: all ranks must call it.

    Storages are counted once, however many tensors share them; what a storage has beyond the tensor in it is padding.
    FSDP2 modules that are still unsharded after a forward are resharded first.

    Args:
        model: any model, sharded or not.
        optimizer: its optimizer, after a step if its state is to be counted.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    mine = _measure_rank(model, optimizer)
    ranks = [mine]
    if dist.is_initialized():
        gathered: list[RankMemory | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine)
        ranks = [rank for rank in gathered if rank is not None]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return MemoryReport(source="measured", engine="", recipe="", parameters=parameters, ranks=tuple(ranks))


def _measure_rank(model: nn.Module, optimizer: Optimizer | None) -> RankMemory:
    seen: set[int] = set()
    tensors: list[TensorMemory] = []
    quantized_bytes = quantized_parameters = 0
    for name, parameter in model.named_parameters():
        weight = local(parameter)
        held = list(_parameter_bytes(parameter, optimizer, seen))
        if isinstance(weight, QuantizedWeight):
            quantized_parameters += weight.numel()
            kinds = (Category.PADDING, Category.COUNTERS, Category.GRADIENTS)
            quantized_bytes += sum(count for kind, count in held if kind not in kinds)
        tensors += tensor_entries(name, held)
    for name, buffer in model.named_buffers():
        tensors += tensor_entries(name, _storage_bytes(Category.BUFFERS, buffer, seen))
    return RankMemory(
        rank=dist.get_rank() if dist.is_initialized() else 0,
        tensors=tuple(tensors),
        quantized_bytes=quantized_bytes,
        quantized_parameters=quantized_parameters,
    )


def _parameter_bytes(parameter: Tensor, optimizer: Optimizer | None, seen: set[int]) -> Iterator[tuple[Category, int]]:
    weight = local(parameter)
    if isinstance(weight, QuantizedWeight):
        yield from _storage_bytes(Category.CODES, weight.codes, seen)
        yield from _storage_bytes(Category.SCALES, weight.scales, seen)
    else:
        yield from _storage_bytes(Category.HIGH_PRECISION, weight, seen)
    if parameter.grad is not None:
        yield from _storage_bytes(Category.GRADIENTS, local(parameter.grad), seen)
    for key, value in (optimizer.state.get(parameter, {}) if optimizer else {}).items():
        if isinstance(value, Tensor):
            yield from _storage_bytes(STATE_CATEGORIES[key], local(value), seen)


def _storage_bytes(category: Category, tensor: Tensor, seen: set[int]) -> Iterator[tuple[Category, int]]:
    storage = tensor.untyped_storage()
    if tensor.numel() and storage.data_ptr() in seen:
        return
    seen.add(storage.data_ptr())
    content = tensor.numel() * tensor.element_size()
    yield category, content
    yield Category.PADDING if category.is_static else category, storage.nbytes() - content
