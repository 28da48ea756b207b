"""The transient bytes of a step: a model, checked against FSDP2 runs on CPU.

[Note: a step under FSDP2]
For unit u (a block, or the root): P its weights in the compute dtype, W what its all-gather carries, G its gradient in
the compute dtype, R its reduce-scatter's input and S this rank's part of the result, both fp32.

* The root (embedding, head) stays unsharded from its forward to the end of backward.
* A block's all-gather holds W, its parts (of codes; those of plain weights are P), then P, and three fp32 copies of its
  largest weight while codes are decoded. FSDP2 keeps the last W until the next gather, and gathers ahead in backward.
* A block's backward starts with everything it kept, three tensors of its hidden width, and the gradient of one
  weight; it ends with G. Then P is freed and G is copied into R, of which S remains.
* With expert parallelism the experts are a unit of their own inside the block's: gathered after it, and reduced before
  the backward of its attention begins. Where one rank has them alone there is no W, and S is as large as R.
* The optimizer's step finds S of all units; a fused kernel adds nothing.

A single process keeps whole gradients. DeepSpeed is in `peak_zero.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from eco_dist.memory.activations import (
    Batch,
    kept_bytes,
    layer_bytes,
    logits_bytes,
    output_bytes,
    routed_bytes,
)
from eco_dist.memory.categories import Category
from eco_dist.memory.layouts.base import Layout
from eco_dist.memory.layouts.fsdp import local_count, local_shape, parts
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.peak_zero import ZeroStep, moment
from eco_dist.memory.report import Moment
from eco_dist.memory.tensors import ModelShape, ModelTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """Bytes of one communication unit on the fullest rank; letters as in the note above."""

    layer: int
    is_nested: bool
    weights: int
    wire: int
    landed: int
    gradient: int
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
        layer: int = -1,
        is_nested: bool = False,
    ) -> Unit:
        """Sum over the unit's tensors; `layer` is -1 for the root, nested are experts inside their block's unit."""
        totals = dict.fromkeys(("weights", "wire", "landed", "gradient", "reduce_input", "reduced"), 0)
        largest = decoding = 0
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
            totals["reduce_input"] += 4 * trained
            totals["reduced"] += math.ceil(4 * trained / shards)
            largest = max(largest, trained // count)
            if tensor.storage.is_quantized:
                decoding = max(decoding, 12 * (elements // count))
        return cls(**totals, largest_gradient=compute * largest, decoding=decoding, layer=layer, is_nested=is_nested)


def timeline(
    model: ModelShape, layout: Layout, mesh: Mesh, batch: Batch | None, *, in_backward: bool = False
) -> tuple[Moment, ...]:
    """Transient bytes of the fullest rank over one step.

    Args:
        model: shapes.
        layout: of the engine.
        mesh: ranks.
        batch: what a rank computes; None, or a model without known layers, leaves activations out.
        in_backward: whether weights are stepped as soon as their gradient is there (`step_in_backward`).
    """
    if layout.zero is not None:
        return tuple(ZeroStep(model, layout, mesh, batch).moments())
    members: dict[str, tuple[list[ModelTensor], list[ModelTensor]]] = {"": ([], [])}
    for tensor in model.tensors:
        is_nested = tensor.is_expert and mesh.ep > 1
        members.setdefault(tensor.unit, ([], []))[is_nested].append(tensor)
    compute = batch.compute_bytes if batch is not None else 2
    outside, experts = members.pop("")
    root = Unit.of([*outside, *experts], layout, mesh, compute)
    units = []
    for layer, (block, experts) in enumerate(members.values()):
        units.append(Unit.of(block, layout, mesh, compute, layer=layer))
        if experts:
            units.append(Unit.of(experts, layout, mesh, compute, layer=layer, is_nested=True))
    return tuple(_Step(model, layout, mesh, batch, root, units, in_backward).moments())


class _Step:
    """One step, moment by moment."""

    def __init__(
        self,
        model: ModelShape,
        layout: Layout,
        mesh: Mesh,
        batch: Batch | None,
        root: Unit,
        units: Sequence[Unit],
        in_backward: bool,
    ) -> None:
        self.shape, self.batch = model.transformer, batch
        self.layout, self.mesh, self.root, self.units = layout, mesh, root, units
        self.in_backward = in_backward
        self.sharded = layout.shards_weights

    def moments(self) -> Iterator[Moment]:
        """Moments in order."""
        count = len(self.units)
        for number in range(count):
            yield self._forward(number)
        yield self._loss()
        for number in reversed(range(count)):
            yield self._backward(number)
            yield self._reduce(number)
        yield self._end_of_backward()
        yield Moment(name="optimizer step", bytes={Category.GRADIENTS: self._reduced(-1)})

    # --- moments ----------------------------------------------------------------------------------------------------

    def _forward(self, number: int) -> Moment:
        unit = self.units[number]
        return self._moment(
            f"forward {_name(unit)}",
            unsharded=self._around(number) + unit.weights,
            communication=unit.wire + unit.landed,
            activations=self._kept(unit.layer) + self._own(number),
            temporaries=unit.decoding,
        )

    def _loss(self) -> Moment:
        output = logits = 0
        if self.shape is not None and self.batch is not None:
            output, logits = output_bytes(self.shape, self.batch), logits_bytes(self.shape, self.batch)
        last = self.units[-1].wire if self.units else 0
        return self._moment(
            "loss",
            unsharded=self.root.weights,
            communication=last,
            activations=self._kept(self._layers) + output,
            temporaries=logits,
        )

    def _backward(self, number: int) -> Moment:
        """Where it takes the most: while weights are decoded, or at the unit's first products."""
        unit = self.units[number]
        work = self._work(number) + unit.largest_gradient
        return self._moment(
            f"backward {_name(unit)}",
            unsharded=self._around(number) + unit.weights,
            communication=max(self._ahead(unit.layer), unit.wire) + self._in_flight(number),
            gradients=self._reduced(number) + self.root.gradient,
            activations=self._kept(unit.layer) + self._own(number),
            temporaries=max(unit.decoding, work),
        )

    def _reduce(self, number: int) -> Moment:
        unit = self.units[number]
        reduce_input = unit.reduce_input if self.layout.shards_gradients else 0
        left = self._own(number - 1) if unit.is_nested else 0
        return self._moment(
            f"reduce {_name(unit)}",
            unsharded=self._around(number),
            communication=self._ahead(unit.layer) + reduce_input,
            gradients=self._reduced(number) + self.root.gradient + max(unit.gradient, unit.reduced),
            activations=self._kept(unit.layer) + left,
        )

    def _end_of_backward(self) -> Moment:
        root = self.root
        return self._moment(
            "reduce the root",
            communication=root.reduce_input if self.layout.shards_gradients else 0,
            gradients=self._reduced(-1) - root.reduced + max(root.gradient, root.reduced),
        )

    # --- parts ------------------------------------------------------------------------------------------------------

    def _moment(self, name: str, *, unsharded: int = 0, communication: int = 0, **others: int) -> Moment:
        if not self.sharded:  # the weights are where they are; only what is decoded on the way comes and goes
            unsharded = communication = 0
        return moment(name, unsharded=unsharded, communication=communication, **others)

    @property
    def _layers(self) -> int:
        return self.units[-1].layer + 1 if self.units else 0

    def _around(self, number: int) -> int:
        """Weights of the units that a unit is inside of."""
        return self.root.weights + (self.units[number - 1].weights if self.units[number].is_nested else 0)

    def _ahead(self, layer: int) -> int:
        """W of the block before, which FSDP2 gathers ahead in backward."""
        return sum(unit.wire for unit in self.units if unit.layer == layer - 1 and not unit.is_nested)

    def _kept(self, layer: int) -> int:
        """Activations of the blocks before this one."""
        if self.shape is None or self.batch is None:
            return 0
        return sum(kept_bytes(self.shape, self.batch, index) for index in range(layer))

    def _has_nested(self, number: int) -> bool:
        return number + 1 < len(self.units) and self.units[number + 1].is_nested

    def _own(self, number: int) -> int:
        """Activations of a unit's block when its backward begins: all, or what backward of its experts left."""
        if self.shape is None or self.batch is None:
            return 0
        layer = self.units[number].layer
        own = layer_bytes(self.shape, self.batch, layer)
        return own - routed_bytes(self.shape, self.batch, layer) if self._has_nested(number) else own

    def _work(self, number: int) -> int:
        """Gradients of activations at a unit's first products.

        Three of the hidden width for one that is freed; of queries, keys and values where the experts are done.
        """
        if self.shape is None or self.batch is None:
            return 0
        elements = 2 * self.shape.feed_forward(self.units[number].layer)
        if self._has_nested(number):
            elements = self.shape.query + self.shape.key + self.shape.value
        return self.batch.tokens * self.batch.compute_bytes * (elements + self.shape.width)

    def _in_flight(self, number: int) -> int:
        """The reduce-scatter's input that FSDP2 keeps until the next one."""
        after = number + 1
        return self.units[after].reduce_input if after < len(self.units) and self.layout.shards_gradients else 0

    def _reduced(self, number: int) -> int:
        """Gradients that are done before this unit's (-1: all of them), unless they are used up at once."""
        done = self.units[number + 1 :] if number >= 0 else [*self.units, self.root]
        if self.in_backward:
            return max((unit.reduced for unit in done), default=0)
        return sum(unit.reduced for unit in done)


def _name(unit: Unit) -> str:
    return f"{unit.layer}, experts" if unit.is_nested else str(unit.layer)
