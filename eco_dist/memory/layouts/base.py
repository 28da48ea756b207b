"""The interface of a layout, and the table of engines.

A new engine describes itself here by its pools: which tensors it lays end to end, in what units it cuts them, and how
many bytes a run of units takes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from eco_dist.memory.layouts import fsdp, fsdp1
from eco_dist.memory.layouts.pools import Segmented
from eco_dist.memory.layouts.zero import Zero, ZeroOptions
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.report import TensorMemory
from eco_dist.memory.tensors import ModelTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """What one rank holds under an engine.

    Attributes:
        name: of the engine.
        pools: the pools of some tensors on a mesh; the last argument is whether there is a second moment.
        replicated: what every rank holds besides, whatever its position; the same arguments.
        shards_weights, shards_gradients: whether a rank holds only a part of them between uses.
        one_rank: whether it can have one rank only.
        zero: keys of the DeepSpeed JSON; None for other engines.
    """

    name: str
    pools: Callable[[Sequence[ModelTensor], Mesh, bool], Sequence[Segmented]]
    replicated: Callable[[Sequence[ModelTensor], Mesh, bool], list[TensorMemory]]
    shards_weights: bool
    shards_gradients: bool
    one_rank: bool = False
    zero: ZeroOptions | None = None


def _nothing(tensors: Sequence[ModelTensor], mesh: Mesh, second_moment: bool) -> list[TensorMemory]:
    return []


_FSDP = {
    "single": Layout(
        name="single",
        pools=fsdp.whole,
        replicated=_nothing,
        shards_weights=False,
        shards_gradients=False,
        one_rank=True,
    ),
    "fsdp2": Layout(name="fsdp2", pools=fsdp.fsdp2, replicated=_nothing, shards_weights=True, shards_gradients=True),
    "fsdp1": Layout(
        name="fsdp1",
        pools=fsdp1.fsdp1,
        replicated=fsdp1.hollow,
        shards_weights=True,
        shards_gradients=True,
    ),
}

ENGINES = (*_FSDP, "zero0", "zero1", "zero2", "zero3")
"""Names. HSDP is `fsdp2` on a mesh with fewer shards than ranks."""


def layout_of(engine: str, zero: ZeroOptions | None = None) -> Layout:
    """The layout of an engine.

    Args:
        engine: one of `ENGINES`.
        zero: keys of the DeepSpeed JSON; None for its defaults.

    Raises:
        ValueError: for an unknown engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"expected engine to be one of {', '.join(ENGINES)}, got '{engine}'")
    if engine in _FSDP:
        return _FSDP[engine]
    stage, options = int(engine[-1]), zero or ZeroOptions()
    described = Zero(stage, options)
    return Layout(
        name=engine,
        pools=described.pools,
        replicated=described.replicated,
        shards_weights=stage == 3,
        shards_gradients=stage >= 2,
        zero=options,
    )
