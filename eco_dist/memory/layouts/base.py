"""The interface of a layout, and the table of engines.

A new engine describes itself here by its pools: which tensors it lays end to end, in what units it cuts them, and how
many bytes a run of units takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from eco_dist.memory.layouts import fsdp, zero
from eco_dist.memory.layouts.pools import Pool
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.report import TensorMemory
from eco_dist.memory.tensors import ModelTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What one rank holds under an engine.

    Attributes:
        name: of the engine.
        pools: the pools of some tensors on a mesh; the last argument is whether there is a second moment.
        replicated: what every rank holds besides, whatever its position.
        is_verified: whether tests hold its static bytes to those of live ranks.
        shards_weights, shards_gradients: whether a rank holds only a part of them between uses.
        one_rank: whether it can have one rank only.
    """

    name: str
    pools: Callable[[Sequence[ModelTensor], Mesh, bool], list[Pool]]
    replicated: Callable[[Sequence[ModelTensor], Mesh], list[TensorMemory]]
    is_verified: bool
    shards_weights: bool
    shards_gradients: bool
    one_rank: bool = False


def _nothing(tensors: Sequence[ModelTensor], mesh: Mesh) -> list[TensorMemory]:
    return []


def _layouts() -> dict[str, Layout]:
    def layout(
        name: str, pools: Callable[..., list[Pool]], weights: bool, gradients: bool, *, verified: bool = False
    ) -> Layout:
        return Layout(
            name=name,
            pools=pools,
            replicated=zero.REPLICATED.get(name, _nothing),
            is_verified=verified,
            shards_weights=weights,
            shards_gradients=gradients,
            one_rank=name == "single",
        )

    entries = (
        layout("single", fsdp.whole, False, False, verified=True),
        layout("fsdp2", fsdp.fsdp2, True, True, verified=True),
        layout("fsdp1", fsdp.fsdp1, True, True),
        layout("zero0", zero.stage0, False, False),
        layout("zero1", zero.stage12, False, False),
        layout("zero2", zero.stage12, False, True),
        layout("zero3", zero.stage3, True, True),
    )
    return {entry.name: entry for entry in entries}


ENGINES = _layouts()
"""Layouts by engine. HSDP is `fsdp2` on a mesh with fewer shards than ranks."""


def layout_of(engine: str) -> Layout:
    """The layout of an engine.

    Raises:
        ValueError: for an unknown engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"expected engine to be one of {', '.join(ENGINES)}, got '{engine}'")
    return ENGINES[engine]
