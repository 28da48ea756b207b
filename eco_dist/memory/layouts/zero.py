"""DeepSpeed ZeRO: flat partitions beside a working copy.

| stage | working copy | partition |
|---|---|---|
| 0 | whole | whole |
| 1, 2 | whole on every rank | of one flat run for each parameter group |
| 3 | cut like the partition | of each parameter by itself |

For a quantized weight the partition is codes, scales and moments in whole units (a block of 128 where a row is whole
blocks, else a row), and the working copy at stages 1 and 2 is the codes of all ranks (`working_copy="replica"`, the
engine's default). A high-precision parameter is what DeepSpeed always makes of it: 16 bits, an fp32 master and fp32
moments. DeepSpeed's own formula for stage 2, 2N + 18N/P, is 2N working + (4 + 8)N/P here, and 6N/P of gradients, which
are transient; its stage 3 formula has 4 bytes for each parameter of the largest layer besides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from eco_dist.memory.categories import Category
from eco_dist.memory.layouts.fsdp import local_count, local_shape, parts
from eco_dist.memory.layouts.pools import Pool
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.report import TensorMemory, tensor_entries
from eco_dist.memory.storage import Bytes
from eco_dist.memory.tensors import ModelTensor
from eco_dist.numerics import Granularity
from eco_dist.numerics.groups import BLOCK_SIZE

PERSISTENT_ELEMENTS = 100_000
"""Stage 3 keeps parameters up to this size whole (`stage3_param_persistence_threshold`); never quantized ones."""


def stage0(tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[Pool]:
    """Nothing is cut: every rank has the whole partition."""
    _check(tensors)
    return [_partitions([tensor], mesh, second_moment, count=1, with_working=True) for tensor in tensors]


def stage12(tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[Pool]:
    """One flat run for each parameter group: equal units, experts apart."""
    _check(tensors)
    groups: dict[tuple[int, bool], list[ModelTensor]] = {}
    for tensor in tensors:
        if tensor.trainable:
            groups.setdefault((_unit(tensor), tensor.is_expert), []).append(tensor)
    return [_partitions(members, mesh, second_moment, count=parts(members[0], mesh)) for members in groups.values()]


def stage3(tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[Pool]:
    """Every parameter by itself, padded to the ranks; the working copy is cut alike."""
    _check(tensors)
    return [_partitions([t], mesh, second_moment, count=parts(t, mesh), with_working=True) for t in tensors]


def working_copies(tensors: Sequence[ModelTensor], mesh: Mesh) -> list[TensorMemory]:
    """Stages 1 and 2: what forward reads, whole on every rank."""
    return [
        entry
        for tensor in tensors
        for entry in _entries(tensor, mesh, tensor.storage.working(local_shape(tensor, mesh)))
    ]


def persistent_copies(tensors: Sequence[ModelTensor], mesh: Mesh) -> list[TensorMemory]:
    """Stage 3: small parameters stay gathered after their first use."""
    small = [t for t in tensors if not t.storage.is_quantized and math.prod(t.shape) <= PERSISTENT_ELEMENTS]
    return [
        entry for t in small for entry in _entries(t, mesh, [(Category.WORKING, 2 * math.prod(local_shape(t, mesh)))])
    ]


REPLICATED = {"zero1": working_copies, "zero2": working_copies, "zero3": persistent_copies}
"""What every rank holds beside its pools, by engine."""


def _entries(tensor: ModelTensor, mesh: Mesh, held: Bytes) -> list[TensorMemory]:
    count = local_count(tensor, mesh)
    return tensor_entries(tensor.name, [(kind, number * count) for kind, number in held], count=count)


def _check(tensors: Sequence[ModelTensor]) -> None:
    if not all(tensor.storage.runs_under_zero for tensor in tensors):
        raise ValueError(
            "expected an engine without flat partitions for torchao-8bit, got DeepSpeed ZeRO, which would hand its "
            "optimizer an fp32 partition; choose single or fsdp2"
        )


def _unit(tensor: ModelTensor) -> int:
    """Elements of a unit: what is never cut."""
    recipe = tensor.storage.recipe
    if recipe is None:
        return 1
    blocks = tensor.shape[-1] % BLOCK_SIZE == 0 and recipe.granularity is not Granularity.ROW
    return BLOCK_SIZE if blocks else tensor.shape[-1]


def _partitions(
    members: Sequence[ModelTensor], mesh: Mesh, second_moment: bool, *, count: int, with_working: bool = False
) -> Pool:
    """The pool of a parameter group (stages 1, 2) or of one parameter.

    DeepSpeed pads a flat run to two elements for every rank, ours to whole units besides.
    """
    unit = _unit(members[0])
    flat = not with_working
    counted = []
    for member in members:
        elements = math.prod(local_shape(member, mesh))
        counted.append((member, (local_count(member, mesh) if flat else 1) * math.ceil(elements / unit)))
    total = sum(units for _, units in counted)
    quantum = math.lcm(2, unit) // unit if flat else 1
    chunk = math.ceil(total / (count * quantum)) * quantum

    def describe(member: ModelTensor, held: int, room: int) -> Bytes:
        storage = member.storage
        local = (held, unit) if storage.is_quantized else (held,)
        result = storage.working(local) if with_working else []
        if member.trainable:
            result += storage.partition(local, second_moment=second_moment)
        return result

    return Pool(
        members=tuple(counted),
        unit=unit,
        parts=count,
        chunk=chunk,
        describe=describe,
        spread=mesh.shards // count,
        times=1 if flat else local_count(members[0], mesh),
    )
