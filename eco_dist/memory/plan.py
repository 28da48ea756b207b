"""Predicted memory: from a model's shapes and a recipe, before anything is converted. Works on the meta device.

Every number is a formula per tensor and rank, read from the same layout functions that allocate: nothing here counts
"bytes per parameter".
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from torch import nn

from eco_dist.memory.categories import STATE_CATEGORIES, Category
from eco_dist.memory.report import MemoryReport, RankMemory, TensorMemory, tensor_entries
from eco_dist.numerics import Granularity, codes_scale_shape, codes_shape
from eco_dist.optim.state import state_layout
from eco_dist.recipe import Recipe, resolve_recipe
from eco_dist.weights import DEFAULT_SKIP, Conversion, plan_conversion

ENGINES = ("single", "fsdp2")
OPTIMIZERS = ("adamw", "sgd")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """How an engine cuts dimension 0 of every parameter.

    Attributes:
        shards: number of shards; FSDP2 gives each ceil(rows / shards) rows and the last ones what is left.
        padded: whether short shards are stored in a tensor of full length.
    """

    shards: int = 1
    padded: bool = False

    def rows(self, total: int, shard: int) -> int:
        """Rows of a shard."""
        length = self.padded_rows(total)
        return max(0, min(length, total - shard * length))

    def padded_rows(self, total: int) -> int:
        """Rows that a shard's storage has room for."""
        return math.ceil(total / self.shards)


def plan(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    engine: str = "single",
    world_size: int = 1,
    shards: int | None = None,
    optimizer: str = "adamw",
    skip: Sequence[str] = DEFAULT_SKIP,
    also_skip: Sequence[str] = (),
    plain: str = "fp32",
) -> MemoryReport:
    """Static memory of a model before it is converted, for every rank.

    Args:
        model: the model as it is before `quantize_weights_`; the meta device will do.
        recipe: a recipe or its name; `fp32-master` for ordinary AdamW.
        engine: `single` or `fsdp2`.
        world_size: number of ranks.
        shards: ranks that share one copy of the model (HSDP: fewer than `world_size`); default all.
        optimizer: `adamw` or `sgd`.
        skip: see `quantize_weights_`.
        also_skip: see `quantize_weights_`.
        plain: see `quantize_weights_`.

    Raises:
        ValueError: for an unknown engine or optimizer, or a world size the engine cannot have.
    """
    recipe = resolve_recipe(recipe)
    _check(engine, world_size, shards, optimizer)
    conversions = plan_conversion(model, recipe, skip=skip, also_skip=also_skip, plain=plain).conversions
    trainable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    cut = Cut(shards=shards or world_size, padded=True) if engine == "fsdp2" else Cut()
    buffers = [
        entry
        for name, buffer in model.named_buffers()
        for entry in tensor_entries(name, [(Category.BUFFERS, buffer.numel() * buffer.element_size())])
    ]
    # Ranks with the same shard hold the same bytes: plan each shard once.
    by_shard = [
        _rank(shard, conversions, cut, trainable, buffers, second_moment=optimizer == "adamw")
        for shard in range(cut.shards)
    ]
    ranks = tuple(dataclasses.replace(by_shard[rank % cut.shards], rank=rank) for rank in range(world_size))
    parameters = sum(conversion.parameters for conversion in conversions)
    return MemoryReport(source="planned", engine=engine, recipe=recipe.name, parameters=parameters, ranks=ranks)


def _check(engine: str, world_size: int, shards: int | None, optimizer: str) -> None:
    if engine not in ENGINES:
        raise ValueError(f"expected engine to be one of {', '.join(ENGINES)}, got '{engine}'")
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"expected optimizer to be one of {', '.join(OPTIMIZERS)}, got '{optimizer}'")
    if world_size < 1 or (engine == "single" and world_size != 1):
        raise ValueError(f"expected world_size 1 for engine 'single' and at least 1 for others, got {world_size}")
    if shards is not None and (shards < 1 or world_size % shards):
        raise ValueError(f"expected shards to divide the world size {world_size}, got {shards}")


def _rank(
    shard: int,
    conversions: Sequence[Conversion],
    cut: Cut,
    trainable: set[str],
    buffers: list[TensorMemory],
    *,
    second_moment: bool,
) -> RankMemory:
    tensors: list[TensorMemory] = []
    quantized_bytes = quantized_parameters = 0
    for conversion in conversions:
        name, shape = conversion.names[0], conversion.shape
        rows = cut.rows(shape[0], shard) if shape else 0
        local = (rows, *shape[1:]) if shape else ()
        held = _weight_bytes(local, conversion.recipe)
        if conversion.names[0] in trainable:
            held += _state_bytes(local, conversion.recipe, second_moment=second_moment)
        if cut.padded and shape:
            full = (cut.padded_rows(shape[0]), *shape[1:])
            padding = sum(b for _, b in _weight_bytes(full, conversion.recipe)) - sum(
                b for _, b in _weight_bytes(local, conversion.recipe)
            )
            held.append((Category.PADDING, padding))
        if conversion.recipe is not None:
            quantized_parameters += math.prod(local)
            quantized_bytes += sum(b for kind, b in held if kind not in (Category.PADDING, Category.COUNTERS))
        tensors += tensor_entries(name, held)
    return RankMemory(
        rank=shard,
        tensors=(*tensors, *buffers),
        quantized_bytes=quantized_bytes,
        quantized_parameters=quantized_parameters,
    )


def _weight_bytes(shape: tuple[int, ...], recipe: Recipe | None) -> list[tuple[Category, int]]:
    """Bytes of the weight itself: 4 a parameter in high precision; codes and scales otherwise."""
    if recipe is None or recipe.format is None:
        return [(Category.HIGH_PRECISION, 4 * math.prod(shape))]
    codes = math.prod(codes_shape(shape, recipe.format)) * recipe.format.grid.storage_dtype.itemsize
    scale_shape = codes_scale_shape(shape, recipe.format, recipe.granularity)
    if recipe.granularity is Granularity.TENSOR:
        scale_shape = (1,)  # every rank has the one scale, whatever rows it has
    return [(Category.CODES, codes), (Category.SCALES, 4 * math.prod(scale_shape))]


def _state_bytes(shape: tuple[int, ...], recipe: Recipe | None, *, second_moment: bool) -> list[tuple[Category, int]]:
    return [
        (STATE_CATEGORIES[key], math.prod(piece.shape) * piece.dtype.itemsize)
        for key, piece in state_layout(shape, recipe, second_moment=second_moment).items()
    ]
