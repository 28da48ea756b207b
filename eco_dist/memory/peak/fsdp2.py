"""The transient bytes of a step under FSDP2, or in one process.

[Note: a step under FSDP2]
For unit u (a block, or the root): P its weights in the compute dtype, W what its all-gather carries, G its gradient in
the compute dtype, R its reduce-scatter's input and S this rank's part of the result, both fp32.

* The root (embedding, head) stays unsharded from its forward to the end of backward. The head's gradient is there
  from the start of backward, the embedding's at its end only, unless they are tied.
* A block's all-gather holds W, its parts (of codes; those of plain weights are P), then P, and three fp32 copies of
  what is decoded at a time. In forward FSDP2 keeps the last W until the next gather; in backward it frees
  it, and gathers ahead.
* A block's backward starts with everything it kept, three tensors of its hidden width, and the gradient of one
  weight; it ends with G, beside P. Then P is freed and G is copied into R, of which S remains. gloo, which has no
  reduce-scatter, all-reduces a copy of R; nccl does not need one.
* With expert parallelism the experts are a unit of their own inside the block's: gathered after it, and reduced before
  the backward of its attention begins. Where one rank has them alone there is no W, and S is as large as R.
* The optimizer's step finds S of all units; a fused kernel adds nothing.

A single process keeps whole gradients.
"""

from __future__ import annotations

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
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.peak.unit import Backend, Unit, moment
from eco_dist.memory.report import Moment
from eco_dist.memory.tensors import ModelShape


class Step:
    """One step, moment by moment."""

    def __init__(
        self,
        model: ModelShape,
        layout: Layout,
        mesh: Mesh,
        batch: Batch | None,
        root: Unit,
        units: Sequence[Unit],
        *,
        in_backward: bool,
        backend: Backend,
    ) -> None:
        """Prepare; see `timeline` for the arguments."""
        self.shape, self.batch = model.transformer, batch
        self.layout, self.mesh, self.root, self.units = layout, mesh, root, units
        self.in_backward = in_backward
        self.sharded = layout.shards_weights
        self.copies = backend == "gloo"

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
        """Where it takes the most: while weights are gathered and decoded, at its first products, or at its end."""
        unit = self.units[number]
        kept, own = self._kept(unit.layer), self._own(number)
        is_recomputed = self.batch is not None and self.batch.checkpoints
        in_flight, gradients = self._in_flight(number), self._reduced(number) + self.root.early

        def during(*, wire: int, activations: int, more_gradients: int = 0, temporaries: int = 0) -> Moment:
            return self._moment(
                f"backward {_name(unit)}",
                unsharded=self._around(number) + unit.weights,
                communication=wire + in_flight,
                gradients=gradients + more_gradients,
                activations=kept + activations,
                temporaries=temporaries,
            )

        ahead = self._ahead(unit.layer)
        gather = during(wire=unit.wire, activations=0 if is_recomputed else own, temporaries=unit.decoding)
        first = during(wire=ahead, activations=own, temporaries=self._work(number) + unit.largest_gradient)
        last = during(wire=ahead, activations=0, more_gradients=unit.gradient)
        return max(gather, first, last, key=lambda moment: moment.total)

    def _reduce(self, number: int) -> Moment:
        unit = self.units[number]
        left = self._own(number - 1) if unit.is_nested else 0
        return self._moment(
            f"reduce {_name(unit)}",
            unsharded=self._around(number),
            communication=self._ahead(unit.layer) + self._sent(unit),
            gradients=self._reduced(number) + self.root.early + self._reducing(unit),
            activations=self._kept(unit.layer) + left,
        )

    def _end_of_backward(self) -> Moment:
        root = self.root
        return self._moment(
            "reduce the root",
            communication=self._sent(root),
            gradients=self._reduced(-1) - root.reduced + self._reducing(root),
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

    def _sent(self, unit: Unit) -> int:
        """R, if gradients are sharded."""
        return unit.reduce_input if self.layout.shards_gradients else 0

    def _reducing(self, unit: Unit) -> int:
        """The most beside R: G while it is copied into R, or S and the copy of R that gloo reduces."""
        return max(unit.gradient, unit.reduced + (self._sent(unit) if self.copies else 0))

    def _in_flight(self, number: int) -> int:
        """The reduce-scatter's input that FSDP2 keeps until the next one."""
        after = number + 1
        return self._sent(self.units[after]) if after < len(self.units) else 0

    def _reduced(self, number: int) -> int:
        """Gradients that are done before this unit's (-1: all of them), unless they are used up at once."""
        done = self.units[number + 1 :] if number >= 0 else [*self.units, self.root]
        if self.in_backward:
            return max((unit.reduced for unit in done), default=0)
        return sum(unit.reduced for unit in done)


def _name(unit: Unit) -> str:
    return f"{unit.layer}, experts" if unit.is_nested else str(unit.layer)
