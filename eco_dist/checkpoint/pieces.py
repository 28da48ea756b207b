"""What a checkpoint holds, and which part of it this rank has.

[Note: pieces]
Every stored tensor has a name and a global shape that follow from the model and the recipe alone; a *piece* is the run
of elements [start, start + count) of it, flattened, that one rank holds. Any engine that cuts tensors into runs can say
what it holds in these words, so a checkpoint of one engine and world size loads into every other.

| tensor            | holds                                                 |
|-------------------|-------------------------------------------------------|
| `NAME`            | codes of a quantized weight, or a plain parameter     |
| `NAME_scale`      | its scales                                            |
| `NAME.exp_avg`, … | optimizer state, with the keys of `StateKey`          |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from eco_dist.checkpoint.holders import Held, Holder, clean, holder_of, is_first, named_parameters
from eco_dist.numerics import scale_shape
from eco_dist.numerics.codec import codes_scale_shape, codes_shape
from eco_dist.numerics.groups import Granularity
from eco_dist.optim import ECOOptimizer
from eco_dist.optim.shard import StateKey, local
from eco_dist.weights import QuantizedWeight

SCALE_SUFFIX = "_scale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A run of elements of a stored tensor.

    Attributes:
        name: of the tensor.
        shape: global shape of the tensor.
        start: first element of the run in the flattened tensor.
        tensor: the elements, contiguous, where they live: written from here, read into here.
        saved: whether this rank writes it; replicas do not.
        stored_as: dtype of the same bytes in the file, so that other tools see E4M3 where there is E4M3.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    tensor: Tensor
    saved: bool = True
    stored_as: torch.dtype | None = None

    @property
    def dtype_name(self) -> str:
        """Dtype in the file, as torch names it."""
        return str(self.stored_as or self.tensor.dtype).removeprefix("torch.")

    def as_stored(self) -> Tensor:
        """The elements in the file's dtype; shares their memory."""
        return self.tensor if self.stored_as is None else self.tensor.view(self.stored_as)

    @property
    def end(self) -> int:
        """Element behind the last one."""
        return self.start + self.tensor.numel()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterRecord:
    """What a checkpoint knows of a parameter beside its tensors.

    Attributes:
        shape: global shape.
        recipe: fields of its recipe; None if it is in high precision.
        stream: number of its stream of random bits; None if it is in high precision.
        scalars: optimizer state that is one number: step, learning rates, layout. Empty before the first step.
    """

    shape: tuple[int, ...]
    recipe: dict[str, str | None] | None
    stream: int | None
    scalars: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Description:
    """What this rank holds of a model and its optimizer.

    Attributes:
        pieces: of all stored tensors.
        records: of all parameters.
        runs: of all parameters, as the engine holds them.
    """

    pieces: tuple[Piece, ...]
    records: Mapping[str, ParameterRecord]
    runs: Mapping[str, Held]


def describe(model: nn.Module, optimizer: ECOOptimizer | Holder | None = None) -> Description:
    """The pieces this rank holds of a model and of its optimizer.

    Optimizer state that does not exist yet is made, zero as the first step would find it.

    Args:
        model: whole, sharded by FSDP2, or that of a DeepSpeed engine.
        optimizer: its optimizer, or the engine's.

    Raises:
        ValueError: if the optimizer steps a parameter that the model does not have.
        TypeError: if the optimizer cannot say what it holds.
    """
    pieces: list[Piece] = []
    records: dict[str, ParameterRecord] = {}
    holder = holder_of(optimizer, model)
    parameters = named_parameters(model, holder)
    _check_stepped(holder, parameters)
    runs = holder.checkpoint_runs(parameters)
    for name, held in runs.items():
        pieces += pieces_of(name, held)
        records[name] = _record(held)
    for name, buffer in _persistent_buffers(model):
        pieces.append(Piece(name=clean(name), shape=tuple(buffer.shape), start=0, tensor=buffer, saved=is_first()))
    return Description(pieces=tuple(pieces), records=records, runs=runs)


def pieces_of(name: str, held: Held) -> list[Piece]:
    """The pieces of one parameter and its optimizer state, without its scalars."""
    return [*_parameter_pieces(name, held), *_state_pieces(name, held)]


def _check_stepped(holder: Holder, parameters: Mapping[str, Tensor]) -> None:
    own = {id(parameter) for parameter in parameters.values()}
    foreign = [p for group in holder.checkpoint_groups() for p in group["params"] if id(p) not in own]
    if foreign:
        raise ValueError(
            f"expected an optimizer of this model's parameters, got {len(foreign)} that it does not have; "
            "make the optimizer after sharding, from model.parameters()"
        )


def _parameter_pieces(name: str, held: Held) -> Iterator[Piece]:
    weight = held.tensor
    if not isinstance(weight, QuantizedWeight):
        yield Piece(name=name, shape=held.shape, start=held.start, tensor=weight, saved=held.saved)
        return
    recipe = weight.recipe
    assert recipe.format is not None
    codes = _rows(name, held, weight.codes, codes_shape(held.shape, recipe.format))
    yield dataclasses.replace(codes, stored_as=recipe.format.grid.float_dtype)
    whole = codes_scale_shape(held.shape, recipe.format, recipe.granularity)
    if recipe.granularity is Granularity.TENSOR:
        first = held.saved and held.start == 0 and weight.numel() > 0
        yield Piece(name=name + SCALE_SUFFIX, shape=whole, start=0, tensor=weight.scales, saved=first)
    elif recipe.granularity is not None:
        yield _rows(name + SCALE_SUFFIX, held, weight.scales, whole)


def _state_pieces(name: str, held: Held) -> Iterator[Piece]:
    for key, value in held.state.items():
        if value.ndim == 0 and key in SCALARS:
            continue
        is_scale = key in (StateKey.EXP_AVG_SCALE, StateKey.EXP_AVG_SQ_SCALE)
        shape = scale_shape(held.shape, Granularity.BLOCK) if is_scale else held.shape
        yield _rows(f"{name}.{key}", held, value, shape)


SCALARS = frozenset((StateKey.STEP, StateKey.LR_PEAK, StateKey.LR_LAST, StateKey.LAYOUT))
"""Optimizer state that is one number."""


def _record(held: Held) -> ParameterRecord:
    weight = held.tensor
    return ParameterRecord(
        shape=held.shape,
        recipe=weight.recipe.to_dict() if isinstance(weight, QuantizedWeight) else None,
        stream=held.stream,
        scalars={key: float(value) for key, value in held.state.items() if key in SCALARS},
    )


def _rows(name: str, held: Held, tensor: Tensor, shape: tuple[int, ...]) -> Piece:
    """Whole rows (or units) of a stored tensor, as many as the run has of the parameter's."""
    row = held.tensor.shape[-1] if held.tensor.ndim > 1 else 1
    width = tensor.shape[-1] if tensor.ndim > 1 else 1
    return Piece(name=name, shape=shape, start=held.start // max(row, 1) * width, tensor=tensor, saved=held.saved)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), local(buffer)
