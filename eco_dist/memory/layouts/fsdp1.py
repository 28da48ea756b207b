"""PyTorch's first FSDP: a flat parameter for each wrapped module, cut into equal chunks, one for each rank.

Under ordinary AdamW the chunks are parameters, padding included. Where weights become codes (`eco_dist.fsdp1`), a rank
owns the units that begin in its chunk, keeps a copy of the one that a border cuts in front of it, and high-precision
elements as FSDP cuts them, without padding.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from eco_dist.memory.categories import Category
from eco_dist.memory.layouts.fsdp import local_count, local_shape, parts
from eco_dist.memory.layouts.pools import Entry, Pool, Segment, Segmented, unit_columns
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.report import TensorMemory, tensor_entries
from eco_dist.memory.storage import Bytes, PlainStorage
from eco_dist.memory.tensors import ModelTensor
from eco_dist.numerics import Granularity

HOLLOW_BYTES = 4
"""One element stands for all flat parameters whose weights are codes."""


def fsdp1(tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[Segmented]:
    """A pool for each flat parameter, with `use_orig_params=False`; what is not trained stays in high precision."""
    converts = is_converted(tensors)
    groups: dict[tuple[str, bool, bool], list[ModelTensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.unit, tensor.is_expert, tensor.trainable), []).append(tensor)
    pools: list[Segmented] = []
    for (unit, _, trainable), members in groups.items():
        if converts and trainable:
            pools.append(_Chunks(tuple(members), mesh, second_moment))
        else:
            pools.append(_flat(unit, members, mesh, second_moment))
    return pools


def hollow(tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[TensorMemory]:
    """What stands on every rank for the flat parameters that hold no weights any more."""
    counts = [(Category.FRAMEWORK, HOLLOW_BYTES)] if is_converted(tensors) else []
    return tensor_entries("hollow flat parameters", counts)


def is_converted(tensors: Sequence[ModelTensor]) -> bool:
    """Whether any of them is codes."""
    return any(_is_codes(tensor) for tensor in tensors)


def _is_codes(tensor: ModelTensor) -> bool:
    return tensor.storage.is_quantized and tensor.trainable


def _flat(unit_name: str, members: list[ModelTensor], mesh: Mesh, second_moment: bool) -> Pool:
    """The pool of a flat parameter that FSDP holds itself: one tensor, wherever its members lie in it."""
    first = members[0]
    elements = sum(local_count(t, mesh) * math.prod(local_shape(t, mesh)) for t in members)
    storage = PlainStorage() if first.storage.is_quantized else first.storage
    name = f"{unit_name or 'root'}._flat_param"
    flat = dataclasses.replace(first, name=name, shape=(elements,), count=1, storage=storage)
    positions = parts(first, mesh)

    def describe(member: ModelTensor, held: int, room: int) -> Bytes:
        result = member.storage.weight((room,))  # FSDP1 pads its shards and steps the padding
        if member.trainable:
            result += member.storage.state((room,), second_moment=second_moment)
        return result

    return Pool(
        members=((flat, elements),),
        unit=1,
        parts=positions,
        chunk=math.ceil(elements / positions),
        describe=describe,
        spread=mesh.shards // positions,
    )


@dataclasses.dataclass(frozen=True)
class _Place:
    """A tensor in a flat parameter: where it begins, and the elements of what is not cut (1 in high precision)."""

    tensor: ModelTensor
    offset: int
    elements: int
    unit: int

    @property
    def has_one_scale(self) -> bool:
        recipe = self.tensor.storage.recipe
        return recipe is not None and recipe.granularity is Granularity.TENSOR


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """A flat parameter whose codes the optimizer owns; see the head of `eco_dist.engines.fsdp1.geometry`."""

    members: tuple[ModelTensor, ...]
    mesh: Mesh
    second_moment: bool

    def segments(self) -> Iterator[Segment]:
        """A segment for each position."""
        positions = parts(self.members[0], self.mesh)
        spread, chunk = self.mesh.shards // positions, self._chunk
        made: dict[tuple[int, int], Entry] = {}

        def entry(number: int, units: int) -> Entry:
            if (number, units) not in made:
                made[number, units] = _described(self._places[number], units, self.second_moment)
            return made[number, units]

        empty = [entry(number, 0) for number in range(len(self._places))]
        for position in range(positions):
            start, entries = position * chunk, list(empty)
            for number, place in enumerate(self._places):
                if place.offset < start + chunk and place.offset + place.elements > start:
                    first, end = self._owned(place, position), self._owned(place, position + 1)
                    entries[number] = entry(number, end - first)
                    if place.offset < start and (start - place.offset) % place.unit:
                        entries.append(_borrowed(place))
            yield Segment(position * spread, (position + 1) * spread, tuple(entries))

    @functools.cached_property
    def _places(self) -> tuple[_Place, ...]:
        places, offset = [], 0
        for tensor in self.members:
            elements = math.prod(local_shape(tensor, self.mesh))
            unit = 1
            if _is_codes(tensor):
                assert tensor.storage.recipe is not None
                unit = unit_columns(tensor.shape, tensor.storage.recipe)
            for _ in range(local_count(tensor, self.mesh)):
                places.append(_Place(tensor, offset, elements, unit))
                offset += elements
        return tuple(places)

    @property
    def _chunk(self) -> int:
        total = sum(place.elements for place in self._places)
        return math.ceil(total / parts(self.members[0], self.mesh))

    def _owned(self, place: _Place, position: int) -> int:
        """Number of the first unit of a tensor that begins in the chunk of a position or behind it."""
        before = math.ceil((position * self._chunk - place.offset) / place.unit)
        return min(max(before, 0), place.elements // place.unit)


def _described(place: _Place, units: int, second_moment: bool) -> Entry:
    storage, is_codes = place.tensor.storage, _is_codes(place.tensor)
    shape = (units, place.unit) if is_codes else (units,)
    counts = [*storage.weight(shape), *storage.state(shape, second_moment=second_moment)]
    return Entry(
        tensor=place.tensor.name,
        memory=tuple(tensor_entries(place.tensor.name, counts)),
        is_quantized=is_codes,
        elements=units * place.unit,
    )


def _borrowed(place: _Place) -> Entry:
    """The codes of the unit that a border cuts, on the rank behind it; of its scales, unless the tensor has one."""
    counts = place.tensor.storage.weight((1, place.unit))
    held = sum(number for kind, number in counts if kind is not Category.SCALES or not place.has_one_scale)
    memory = tensor_entries("borrowed units", [(Category.FRAMEWORK, held)])
    return Entry(tensor="borrowed units", memory=tuple(memory), is_quantized=False, elements=0)
