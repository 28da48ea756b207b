"""DeepSpeed ZeRO: flat partitions beside a working copy in 16 bits.

| stage | working copy | partition |
|---|---|---|
| 0 | whole | whole |
| 1, 2 | whole on every rank | of one flat run for each parameter group |
| 3 | cut like the partition; small parameters whole besides | of each parameter by itself |

A high-precision parameter is what DeepSpeed always makes of it: 16 bits, a master and moments, in fp32 unless its JSON
says bf16. A quantized weight is codes, scales and moments in whole units (a block of 128 where a row is whole blocks,
else a row) in the place of the partition, and its working copy at stages 1 and 2 is what `working_copy` says.

What does not grow with a rank's part is the same on all ranks and in `replicated`: working copies, step counters,
buckets, and one-element tensors that stand where DeepSpeed's flat tensors were. Everything else is in the pools.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

from eco_dist.memory.categories import Category
from eco_dist.memory.layouts.fsdp import local_count, local_shape, parts
from eco_dist.memory.layouts.pools import Pool, unit_columns
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.report import TensorMemory, tensor_entries
from eco_dist.memory.storage import Bytes
from eco_dist.memory.tensors import ModelTensor
from eco_dist.numerics import Granularity

WorkingCopy = Literal["replica", "transient", "kept"]

_ALIGNMENT = 16
"""Codes of a group begin and end at multiples of so many bytes in what ranks send one another."""
_PLACEHOLDER = 2 + 4
"""Bytes of the one-element tensors that a group of weights leaves of DeepSpeed's 16-bit and fp32 flat tensors."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """Keys of a DeepSpeed JSON that change what a rank holds.

    Attributes:
        working_copy: `eco.working_copy`, at stages 1 and 2.
        reduce_bucket: `reduce_bucket_size`, elements; resident at stage 3.
        persistence: `stage3_param_persistence_threshold`: parameters up to this size stay whole, never quantized ones.
        sub_group: `sub_group_size`, elements of a rank that stage 3 steps together.
    """

    working_copy: WorkingCopy = "replica"
    reduce_bucket: int = 500_000_000
    persistence: int = 100_000
    sub_group: int = 1_000_000_000


@dataclasses.dataclass(frozen=True)
class Zero:
    """The layout of a stage.

    Attributes:
        stage: 0 to 3.
        options: of the DeepSpeed JSON.
    """

    stage: int
    options: ZeroOptions

    # --- what a rank has a part of ----------------------------------------------------------------------------------

    def pools(self, tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[Pool]:
        """Flat runs of parameter groups (stages 1, 2), or parameters one by one (stages 0, 3)."""
        self._check(tensors)
        if self.stage in (1, 2):
            return [_flat(group, mesh, second_moment) for group in _groups(tensors)]
        return [self._alone(tensor, mesh, second_moment) for tensor in tensors]

    def _check(self, tensors: Sequence[ModelTensor]) -> None:
        if not all(tensor.storage.runs_under_zero for tensor in tensors):
            raise ValueError(
                "expected an engine without flat partitions for torchao-8bit, got DeepSpeed ZeRO, which would hand its "
                "optimizer an fp32 partition; choose single or fsdp2"
            )
        if self.stage == 0 and any(_is_codes(tensor) for tensor in tensors):
            raise ValueError("expected ZeRO stage 1, 2 or 3 for a recipe with codes, got 0; choose zero1")

    def _alone(self, tensor: ModelTensor, mesh: Mesh, second_moment: bool) -> Pool:
        """Stage 3: padded to the ranks. Stage 0: whole."""
        count = parts(tensor, mesh) if self.stage == 3 else 1
        unit = _unit(tensor)
        units = math.prod(local_shape(tensor, mesh)) // unit

        def stored(units: int) -> Bytes:
            """What is stored with room for padding: everything but the state of codes."""
            if _is_codes(tensor):
                return tensor.storage.weight((units, unit))
            return [(Category.WORKING, 2 * units), *_partition(tensor, units, unit, second_moment)]

        def describe(member: ModelTensor, held: int, room: int) -> Bytes:
            result = _partition(member, held, unit, second_moment) if _is_codes(member) else stored(held)
            return [*result, (Category.PADDING, _total(stored(room)) - _total(stored(held)))]

        return Pool(
            members=((tensor, units),),
            unit=unit,
            parts=count,
            chunk=math.ceil(units / count),
            describe=describe,
            spread=mesh.shards // count,
            times=local_count(tensor, mesh),
        )

    # --- what every rank has ----------------------------------------------------------------------------------------

    def replicated(self, tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[TensorMemory]:
        """Working copies, step counters, buckets and placeholders."""
        found: list[TensorMemory] = []
        for tensor in tensors:
            count = local_count(tensor, mesh)
            held = [*self._working(tensor, mesh), *self._counters(tensor, second_moment)]
            found += tensor_entries(tensor.name, [(kind, number * count) for kind, number in held], count=count)
        if self.stage in (1, 2):
            found += self._of_groups(tensors, mesh, second_moment)
        if self.stage == 3:
            found += self._of_stage3(tensors, mesh, second_moment)
        return found

    def _working(self, tensor: ModelTensor, mesh: Mesh) -> Bytes:
        elements = math.prod(local_shape(tensor, mesh))
        if self.stage == 3:
            count = parts(tensor, mesh)
            if _is_codes(tensor) or elements > self.options.persistence or count == 1:
                return []  # or, on one rank, the partition itself
            gathered = 2 * _ceil(elements, count)
            return [(Category.WORKING, 2 * elements), (Category.PADDING, gathered - 2 * elements)]
        if self.stage == 0:
            return []  # in the pools
        released = _is_codes(tensor) and self.options.working_copy != "kept"
        return [(Category.WORKING, 2 if released else 2 * elements)]

    def _counters(self, tensor: ModelTensor, second_moment: bool) -> Bytes:
        """Of a weight's state, on every rank, and its only scale where it has one."""
        if not _is_codes(tensor):
            return [(Category.COUNTERS, 4)] if self.stage == 0 and tensor.trainable else []
        counters = tensor.storage.state((0, _unit(tensor)), second_moment=second_moment)
        result: Bytes = [(kind, number) for kind, number in counters if kind is Category.COUNTERS]
        if _has_one_scale(tensor):
            result.append((Category.SCALES, 4))
        return result

    def _of_groups(self, tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[TensorMemory]:
        """Of each parameter group: its padding and step, or its placeholders and the codes of other ranks."""
        found: list[TensorMemory] = []
        runs: dict[tuple[bool, int], list[tuple[int, int]]] = {}  # scales and codes of a rank, by process group
        for group in _groups(tensors):
            pool = _flat(group, mesh, second_moment)
            units = sum(count for _, count in pool.members)
            if _is_codes(group[0]):
                scales = 4 * (sum(local_count(t, mesh) for t in group) if _has_one_scale(group[0]) else 0)
                scales += _only(Category.SCALES, group[0], pool.chunk) * (not _has_one_scale(group[0]))
                codes = _only(Category.CODES, group[0], pool.chunk)
                runs.setdefault((group[0].is_expert, pool.parts), []).append((scales, codes))
                held: Bytes = [(Category.FRAMEWORK, _PLACEHOLDER)]
            else:
                held = [(Category.PADDING, 2 * (pool.chunk * pool.parts - units)), (Category.COUNTERS, 4)]
            found += tensor_entries("parameter groups", held)
        for (_, ranks), sections in runs.items():
            scales = sum(each for each, _ in sections)
            run = _ceil(scales, _ALIGNMENT) + sum(_ceil(codes, _ALIGNMENT) for _, codes in sections)
            held = [(Category.PADDING, run - scales - sum(codes for _, codes in sections))]
            if self.options.working_copy == "replica":
                held.append((Category.WORKING, (ranks - 1) * run))
            found += tensor_entries("codes of other ranks", held)
        return found

    def _of_stage3(self, tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[TensorMemory]:
        gradients = 0
        held: Bytes = [(Category.FRAMEWORK, 2 * self.options.reduce_bucket + 1)]  # and whether anything overflowed
        for group in _groups(tensors):
            sizes = []
            for tensor in group:
                pool = self._alone(tensor, mesh, second_moment)
                sizes += [pool.chunk * pool.unit] * local_count(tensor, mesh)
            gradients += 2 * sum(sizes)
            number = _sub_groups(sizes, self.options.sub_group)
            quantized = _is_codes(group[0])
            held.append((Category.FRAMEWORK, number * _PLACEHOLDER) if quantized else (Category.COUNTERS, 4 * number))
        if not any(_is_codes(tensor) for tensor in tensors):  # DeepSpeed's own optimizer never frees them
            held.append((Category.FRAMEWORK, gradients))
        return tensor_entries("sub-groups and buckets", held)


def _flat(members: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> Pool:
    """The pool of a parameter group, padded so that every rank has an even number of whole units."""
    first, unit, count = members[0], _unit(members[0]), parts(members[0], mesh)
    counted = []
    for member in members:
        units = local_count(member, mesh) * math.prod(local_shape(member, mesh)) // unit
        counted.append((member, units))
    quantum = math.lcm(2, unit) // unit

    def describe(member: ModelTensor, held: int, room: int) -> Bytes:
        return _partition(member, held, unit, second_moment)

    def rest(free: int) -> Bytes:
        if _is_codes(first):
            return [(Category.PADDING, _only(Category.CODES, first, free) + _only(Category.SCALES, first, free))]
        return [(Category.PADDING, _total(_partition(first, free, unit, second_moment)))]

    return Pool(
        members=tuple(counted),
        unit=unit,
        parts=count,
        chunk=_ceil(math.ceil(sum(units for _, units in counted) / count), quantum),
        describe=describe,
        rest=rest,
        spread=mesh.shards // count,
    )


def _groups(tensors: Sequence[ModelTensor]) -> Iterator[list[ModelTensor]]:
    """Parameter groups: what has equal units; experts apart, and the groups of the user's optimizer."""
    groups: dict[tuple[int, bool, bool, int], list[ModelTensor]] = {}
    for tensor in tensors:
        if tensor.trainable:
            key = (tensor.group, tensor.is_expert, _is_codes(tensor), _unit(tensor))
            groups.setdefault(key, []).append(tensor)
    yield from groups.values()


def _partition(tensor: ModelTensor, units: int, unit: int, second_moment: bool) -> Bytes:
    """What the optimizer owns of a run of units; counters are on every rank, and so is the one scale of a tensor."""
    storage = tensor.storage
    if _is_codes(tensor):
        held = [*storage.weight((units, unit)), *storage.state((units, unit), second_moment=second_moment)]
    else:
        held = storage.partition((units * unit,), second_moment=second_moment) if tensor.trainable else []
    left_out = (Category.COUNTERS, Category.SCALES) if _has_one_scale(tensor) else (Category.COUNTERS,)
    return [(kind, number) for kind, number in held if kind not in left_out]


def _only(category: Category, tensor: ModelTensor, units: int) -> int:
    """Bytes of one category of a run of units of a quantized weight; 0 scales where it has one in all."""
    if category is Category.SCALES and _has_one_scale(tensor):
        return 0
    return sum(number for kind, number in tensor.storage.weight((units, _unit(tensor))) if kind is category)


def _is_codes(tensor: ModelTensor) -> bool:
    """Whether DeepSpeed holds codes of it: frozen weights stay in 16 bits."""
    return tensor.storage.is_quantized and tensor.trainable


def _has_one_scale(tensor: ModelTensor) -> bool:
    recipe = tensor.storage.recipe
    return _is_codes(tensor) and recipe is not None and recipe.granularity is Granularity.TENSOR


def _unit(tensor: ModelTensor) -> int:
    """Elements of a unit: what is never cut."""
    recipe = tensor.storage.recipe
    if recipe is None or not _is_codes(tensor):
        return 1
    return unit_columns(tensor.shape, recipe)


def _sub_groups(sizes: Sequence[int], limit: int) -> int:
    """How many runs of parameters of at least `limit` elements stage 3 makes."""
    number, filled = 0, 0
    for size in sizes:
        number, filled = (number + 1, size) if filled == 0 else (number, filled + size)
        filled = 0 if filled >= limit else filled
    return number


def _total(counts: Bytes) -> int:
    return sum(number for _, number in counts)


def _ceil(number: int, quantum: int) -> int:
    return math.ceil(number / quantum) * quantum
