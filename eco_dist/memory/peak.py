"""The transient bytes of a step: a model, checked against FSDP2 runs on CPU.

[Note: a step under FSDP2]
For unit u (a block, or the root): P its weights in the compute dtype, W what its all-gather carries, G its gradient in
the compute dtype, R its reduce-scatter's input and S this rank's part of the result, both fp32.

* The root (embedding, head) stays unsharded from its forward to the end of backward.
* A block's all-gather holds W twice (the collective's output and its parts), then P, and three fp32 copies of its
  largest weight while codes are decoded. FSDP2 keeps the last W until the next gather, and gathers ahead in backward.
* A block's backward starts with everything it kept, three tensors of its hidden width, and the gradient of one
  weight; it ends with G. Then P is freed and G is copied into R, of which S remains.
* The optimizer's step finds S of all units; a fused kernel adds nothing.

A single process keeps whole gradients. DeepSpeed is in `peak_zero.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from eco_dist.memory.activations import Batch, kept_bytes, layer_bytes, logits_bytes, output_bytes
from eco_dist.memory.categories import Category
from eco_dist.memory.layouts.base import Layout
from eco_dist.memory.layouts.fsdp import local_count, local_shape, parts
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.peak_zero import ZeroStep
from eco_dist.memory.report import Moment
from eco_dist.memory.tensors import ModelShape, ModelTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """Bytes of one communication unit on the fullest rank; letters as in the note above."""

    weights: int
    wire: int
    gradient: int
    reduce_input: int
    reduced: int
    largest_gradient: int
    decoding: int

    @classmethod
    def of(cls, tensors: Sequence[ModelTensor], layout: Layout, mesh: Mesh, compute: int) -> Unit:
        """Sum over the unit's tensors."""
        totals = dict.fromkeys(("weights", "wire", "gradient", "reduce_input", "reduced"), 0)
        largest = decoding = 0
        for tensor in tensors:
            count = local_count(tensor, mesh)
            elements = count * math.prod(local_shape(tensor, mesh))
            trained = elements if tensor.trainable else 0
            shards = parts(tensor, mesh) if layout.shards_gradients else 1
            totals["weights"] += compute * elements
            totals["wire"] += tensor.storage.on_wire(elements, compute)
            totals["gradient"] += compute * trained
            totals["reduce_input"] += 4 * trained
            totals["reduced"] += math.ceil(4 * trained / shards)
            largest = max(largest, trained // count)
            if tensor.storage.is_quantized:
                decoding = max(decoding, 12 * (elements // count))
        return cls(**totals, largest_gradient=compute * largest, decoding=decoding)


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
    units: dict[str, list[ModelTensor]] = {"": []}
    for tensor in model.tensors:
        units.setdefault(tensor.unit, []).append(tensor)
    compute = batch.compute_bytes if batch is not None else 2
    root = Unit.of(units.pop(""), layout, mesh, compute)
    blocks = [Unit.of(members, layout, mesh, compute) for members in units.values()]
    return tuple(_Step(model, layout, mesh, batch, root, blocks, in_backward).moments())


class _Step:
    """One step, moment by moment."""

    def __init__(
        self,
        model: ModelShape,
        layout: Layout,
        mesh: Mesh,
        batch: Batch | None,
        root: Unit,
        blocks: Sequence[Unit],
        in_backward: bool,
    ) -> None:
        self.shape, self.batch = model.transformer, batch
        self.layout, self.mesh, self.root, self.blocks = layout, mesh, root, blocks
        self.in_backward = in_backward
        self.sharded = layout.shards_weights

    def moments(self) -> Iterator[Moment]:
        """Moments in order."""
        count = len(self.blocks)
        for layer in range(count):
            yield self._forward(layer)
        yield self._loss()
        for layer in reversed(range(count)):
            yield self._backward(layer)
            yield self._reduce(layer)
        yield self._end_of_backward()
        yield Moment(name="optimizer step", bytes={Category.GRADIENTS: self._reduced(-1)})

    # --- moments ----------------------------------------------------------------------------------------------------

    def _forward(self, layer: int) -> Moment:
        block = self.blocks[layer]
        return self._moment(
            f"forward {layer}",
            unsharded=self.root.weights + block.weights,
            communication=2 * block.wire,
            activations=self._kept(layer) + self._layer(layer),
            temporaries=block.decoding,
        )

    def _loss(self) -> Moment:
        output = logits = 0
        if self.shape is not None and self.batch is not None:
            output, logits = output_bytes(self.shape, self.batch), logits_bytes(self.shape, self.batch)
        last = self.blocks[-1].wire if self.blocks else 0
        return self._moment(
            "loss",
            unsharded=self.root.weights,
            communication=last,
            activations=self._kept(len(self.blocks)) + output,
            temporaries=logits,
        )

    def _backward(self, layer: int) -> Moment:
        """Where it takes the most: while weights are decoded, or at the block's first products."""
        block = self.blocks[layer]
        ahead = self.blocks[layer - 1].wire if layer else 0
        work = self._work(layer) + block.largest_gradient
        return self._moment(
            f"backward {layer}",
            unsharded=self.root.weights + block.weights,
            communication=max(ahead, block.wire) + self._in_flight(layer),
            gradients=self._reduced(layer) + self.root.gradient,
            activations=self._kept(layer) + self._layer(layer),
            temporaries=max(block.decoding, work),
        )

    def _reduce(self, layer: int) -> Moment:
        block = self.blocks[layer]
        ahead = self.blocks[layer - 1].wire if layer else 0
        return self._moment(
            f"reduce {layer}",
            unsharded=self.root.weights,
            communication=ahead + block.reduce_input if self.layout.shards_gradients else ahead,
            gradients=self._reduced(layer) + self.root.gradient + max(block.gradient, block.reduced),
            activations=self._kept(layer),
        )

    def _end_of_backward(self) -> Moment:
        root = self.root
        return self._moment(
            "reduce the root",
            communication=root.reduce_input if self.layout.shards_gradients else 0,
            gradients=self._reduced(-1) - root.reduced + max(root.gradient, root.reduced),
        )

    # --- parts ------------------------------------------------------------------------------------------------------

    def _moment(
        self,
        name: str,
        *,
        unsharded: int = 0,
        communication: int = 0,
        gradients: int = 0,
        activations: int = 0,
        temporaries: int = 0,
    ) -> Moment:
        if not self.sharded:  # the weights are where they are; only what is decoded on the way comes and goes
            unsharded = communication = 0
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

    def _kept(self, layer: int) -> int:
        """Activations of the blocks before this one."""
        if self.shape is None or self.batch is None:
            return 0
        return sum(kept_bytes(self.shape, self.batch, index, ep=self.mesh.ep) for index in range(layer))

    def _layer(self, layer: int) -> int:
        if self.shape is None or self.batch is None:
            return 0
        return layer_bytes(self.shape, self.batch, layer, ep=self.mesh.ep)

    def _work(self, layer: int) -> int:
        """Gradients of activations at a block's first products: three of the hidden width for one that is freed."""
        if self.shape is None or self.batch is None:
            return 0
        elements = 2 * self.shape.feed_forward(layer) + self.shape.width
        return self.batch.tokens * self.batch.compute_bytes * elements

    def _in_flight(self, layer: int) -> int:
        """The reduce-scatter's input that FSDP2 keeps until the next one."""
        after = layer + 1
        return self.blocks[after].reduce_input if after < len(self.blocks) and self.layout.shards_gradients else 0

    def _reduced(self, layer: int) -> int:
        """Gradients that are done before this block's (-1: all of them), unless they are used up at once."""
        done = self.blocks[layer + 1 :] if layer >= 0 else [*self.blocks, self.root]
        if self.in_backward:
            return max((unit.reduced for unit in done), default=0)
        return sum(unit.reduced for unit in done)
