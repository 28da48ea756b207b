"""What a step moves and holds of a block, or of what is outside of blocks, under FSDP."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Sequence
from typing import Literal

from eco_dist.memory.categories import Category
from eco_dist.memory.layouts.base import Layout
from eco_dist.memory.layouts.fsdp import local_count, local_shape, parts
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.report import Moment
from eco_dist.memory.tensors import ModelTensor
from eco_dist.numerics import decoded_at_once

Backend = Literal["nccl", "gloo"]
"""What carries gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """Bytes of one communication unit on the fullest rank; letters as in the note of `fsdp2.py`."""

    layer: int
    is_nested: bool
    weights: int
    wire: int
    landed: int
    gradient: int
    early: int
    reduce_input: int
    reduced: int
    largest_gradient: int
    decoding: int

    @classmethod
    def of(
        cls,
        tensors: Sequence[ModelTensor],
        layout: Layout,
        mesh: Mesh,
        compute: int,
        *,
        backend: Backend,
        late: Container[str] = (),
        layer: int = -1,
        is_nested: bool = False,
    ) -> Unit:
        """Sum over the unit's tensors.

        Args:
            tensors: its members.
            layout: of the engine.
            mesh: ranks.
            compute: bytes of the compute dtype.
            backend: gloo for CPUs, which decode less at a time.
            late: names of those whose gradient comes at the end of backward.
            layer: number of the block; -1 for the root.
            is_nested: whether these are experts inside their block's unit.
        """
        totals = dict.fromkeys(("weights", "wire", "landed", "gradient", "early", "reduce_input", "reduced"), 0)
        largest = decoding = 0
        at_once = decoded_at_once("cpu" if backend == "gloo" else "cuda")
        for tensor in tensors:
            count = local_count(tensor, mesh)
            elements = count * math.prod(local_shape(tensor, mesh))
            trained = elements if tensor.trainable else 0
            shards = parts(tensor, mesh) if layout.shards_gradients else 1
            totals["weights"] += compute * elements
            carried = tensor.storage.on_wire(elements, compute)
            totals["wire"] += carried if parts(tensor, mesh) > 1 else 0
            totals["landed"] += carried if tensor.storage.is_quantized else 0
            totals["gradient"] += compute * trained
            totals["early"] += 0 if tensor.name in late else compute * trained
            totals["reduce_input"] += 4 * trained
            totals["reduced"] += math.ceil(4 * trained / shards)
            largest = max(largest, trained // count)
            if tensor.storage.is_quantized:
                decoding = max(decoding, 12 * min(elements // count, at_once))
        return cls(**totals, largest_gradient=compute * largest, decoding=decoding, layer=layer, is_nested=is_nested)


def moment(
    name: str,
    *,
    unsharded: int = 0,
    communication: int = 0,
    gradients: int = 0,
    activations: int = 0,
    temporaries: int = 0,
) -> Moment:
    """A moment of a step with the transient bytes of each category."""
    return Moment(
        name=name,
        bytes={
            Category.GRADIENTS: gradients,
            Category.UNSHARDED: unsharded,
            Category.COMMUNICATION: communication,
            Category.ACTIVATIONS: activations,
            Category.TEMPORARIES: temporaries,
        },
    )
