"""One process, and PyTorch's FSDP2 (`fully_shard`), which cuts rows of each parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from eco_dist.memory.categories import Category
from eco_dist.memory.layouts.pools import Pool
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.storage import Bytes
from eco_dist.memory.tensors import ModelTensor


def whole(tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[Pool]:
    """One process, or `replicate()`: every rank holds every tensor."""
    return [_rows(tensor, mesh, second_moment, cut=False) for tensor in tensors]


def fsdp2(tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[Pool]:
    """FSDP2: dimension 0 of each parameter in pieces of ceil(rows / shards), the last ones what is left.

    A short piece is a view of a tensor as long as the longest one; its state is not padded. Experts are first cut into
    `ep` whole runs, then by the `edp` ranks that share one.
    """
    return [_rows(tensor, mesh, second_moment, cut=True) for tensor in tensors]


def parts(tensor: ModelTensor, mesh: Mesh) -> int:
    """Ranks that share a tensor once expert parallelism has dealt it out."""
    return mesh.edp if tensor.is_expert else mesh.shards


def local_shape(tensor: ModelTensor, mesh: Mesh) -> tuple[int, ...]:
    """Shape of a tensor on one expert-parallel rank, before its engine cuts it.

    Raises:
        ValueError: if the experts do not divide by `ep`.
    """
    if not tensor.is_expert or mesh.ep == 1 or tensor.count > 1:
        return tensor.shape  # experts kept apart stay whole, each rank has fewer of them: `local_count`
    if tensor.shape[0] % mesh.ep:
        raise ValueError(
            f"expected ep to divide the {tensor.shape[0]} rows of '{tensor.name}', got {mesh.ep}; "
            "every expert-parallel rank has the same number of experts"
        )
    return (tensor.shape[0] // mesh.ep, *tensor.shape[1:])


def local_count(tensor: ModelTensor, mesh: Mesh) -> int:
    """How many of the tensors that this one stands for are on one expert-parallel rank.

    Raises:
        ValueError: if the experts do not divide by `ep`.
    """
    if not tensor.is_expert or tensor.count == 1:
        return tensor.count
    if tensor.count % mesh.ep:
        raise ValueError(f"expected ep to divide the {tensor.count} experts of '{tensor.name}', got {mesh.ep}")
    return tensor.count // mesh.ep


def _rows(tensor: ModelTensor, mesh: Mesh, second_moment: bool, *, cut: bool) -> Pool:
    """A pool of one tensor in units of its rows."""
    rows = local_shape(tensor, mesh)[0]
    positions = parts(tensor, mesh) if cut else 1

    def describe(member: ModelTensor, held: int, room: int) -> Bytes:
        local = (held, *member.shape[1:])
        result = member.storage.weight(local)
        if cut:
            padded = sum(number for _, number in member.storage.weight((room, *member.shape[1:])))
            result.append((Category.PADDING, padded - sum(number for _, number in result)))
        if member.trainable:
            result += member.storage.state(local, second_moment=second_moment)
        return result

    unit = math.prod(tensor.shape[1:])
    chunk, spread = math.ceil(rows / positions), mesh.shards // positions
    return Pool(
        members=((tensor, rows),),
        unit=unit,
        parts=positions,
        chunk=chunk,
        describe=describe,
        spread=spread,
        times=local_count(tensor, mesh),
    )
