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
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from eco_dist.numerics import scale_shape
from eco_dist.numerics.codec import codes_scale_shape, codes_shape
from eco_dist.numerics.groups import Granularity
from eco_dist.optim import ECOOptimizer
from eco_dist.optim.shard import StateKey, first_row, local, reshard
from eco_dist.optim.state import allocate_state
from eco_dist.recipe import Recipe
from eco_dist.weights import QuantizedWeight

SCALE_SUFFIX = "_scale"
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")
"""What activation checkpointing, torch.compile and DDP put into names."""


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
    """Pieces and records of a model and its optimizer on this rank."""

    pieces: tuple[Piece, ...]
    records: Mapping[str, ParameterRecord]


def describe(model: nn.Module, optimizer: ECOOptimizer | None = None) -> Description:
    """The pieces this rank holds of a model, whole or sharded by FSDP2, and of its optimizer.

    Optimizer state that does not exist yet is made, zero as the first step would find it.

    Raises:
        ValueError: if the optimizer steps a parameter that the model does not have.
    """
    pieces: list[Piece] = []
    records: dict[str, ParameterRecord] = {}
    reshard(model)
    stepped = set() if optimizer is None else {id(p) for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        name = clean(name)
        state = _state_of(optimizer, parameter) if id(parameter) in stepped else {}
        stepped.discard(id(parameter))
        pieces += _parameter_pieces(name, parameter)
        pieces += _state_pieces(name, parameter, state)
        records[name] = _record(parameter, state, optimizer)
    for name, buffer in _persistent_buffers(model):
        pieces.append(Piece(name=clean(name), shape=tuple(buffer.shape), start=0, tensor=buffer, saved=_is_first()))
    if stepped:
        raise ValueError(
            f"expected an optimizer of this model's parameters, got {len(stepped)} that it does not have; "
            "make the optimizer after sharding, from model.parameters()"
        )
    return Description(pieces=tuple(pieces), records=records)


def clean(name: str) -> str:
    """A parameter's name without what wrappers add."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _state_of(optimizer: ECOOptimizer | None, parameter: Tensor) -> dict[str, Tensor]:
    assert optimizer is not None
    state = optimizer.state[parameter]
    if not state:
        state.update(allocate_state(parameter, second_moment=optimizer.has_second_moment))
    return cast(dict[str, Tensor], state)


def _parameter_pieces(name: str, parameter: Tensor) -> Iterator[Piece]:
    weight = local(parameter).detach()
    if not isinstance(weight, QuantizedWeight):
        yield _rows(name, parameter, weight, tuple(parameter.shape))
        return
    recipe, shape = weight.recipe, tuple(parameter.shape)
    assert recipe.format is not None
    codes = _rows(name, parameter, weight.codes, codes_shape(shape, recipe.format))
    yield dataclasses.replace(codes, stored_as=recipe.format.grid.float_dtype)
    whole = codes_scale_shape(shape, recipe.format, recipe.granularity)
    if recipe.granularity is Granularity.TENSOR:
        first = _writes(parameter) and first_row(parameter) == 0
        yield Piece(name=name + SCALE_SUFFIX, shape=whole, start=0, tensor=weight.scales, saved=first)
    elif recipe.granularity is not None:
        yield _rows(name + SCALE_SUFFIX, parameter, weight.scales, whole)


def _state_pieces(name: str, parameter: Tensor, state: Mapping[str, Tensor]) -> Iterator[Piece]:
    shape = tuple(parameter.shape)
    for key, value in state.items():
        if value.ndim == 0 and key in _SCALARS:
            continue
        is_scale = key in (StateKey.EXP_AVG_SCALE, StateKey.EXP_AVG_SQ_SCALE)
        yield _rows(
            f"{name}.{key}", parameter, local(value), scale_shape(shape, Granularity.BLOCK) if is_scale else shape
        )


_SCALARS = (StateKey.STEP, StateKey.LR_PEAK, StateKey.LR_LAST, StateKey.LAYOUT)


def _record(parameter: Tensor, state: Mapping[str, Tensor], optimizer: ECOOptimizer | None) -> ParameterRecord:
    weight = local(parameter)
    recipe: Recipe | None = weight.recipe if isinstance(weight, QuantizedWeight) else None
    stream = None
    if isinstance(weight, QuantizedWeight):
        stream = weight.tensor_id if optimizer is None or not state else optimizer.stream_of(parameter)
    return ParameterRecord(
        shape=tuple(parameter.shape),
        recipe=None if recipe is None else recipe.to_dict(),
        stream=stream,
        scalars={key: float(value) for key, value in state.items() if key in _SCALARS},
    )


def _rows(name: str, parameter: Tensor, tensor: Tensor, shape: tuple[int, ...]) -> Piece:
    """A run of whole rows; `shape` is that of the stored tensor, whose rows are the parameter's."""
    width = shape[-1] if len(shape) > 1 else 1  # the rows of a vector are its elements
    return Piece(name=name, shape=shape, start=first_row(parameter) * width, tensor=tensor, saved=_writes(parameter))


def _writes(parameter: Tensor) -> bool:
    """Whether this rank writes its part: the first of each set of replicas does."""
    if not isinstance(parameter, DTensor):
        return _is_first()
    mesh = parameter.device_mesh
    return all(
        mesh.get_local_rank(dim) == 0
        for dim, placement in enumerate(parameter.placements)
        if isinstance(placement, Replicate)
    )


def _is_first() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), cast(Any, local(buffer))
