"""The transient bytes of a step under PyTorch's first FSDP.

[Note: a step under FSDP1]
Letters as in the note of `fsdp2.py`. What differs:

* A block's all-gather lands in its flat parameter: there is no W. Codes are decoded on the way into it.
* Backward gathers the block before ahead as P, the last block while the loss is differentiated.
* The gradients of a block's parameters come one by one and are then copied into that of the flat parameter, 2 G in
  all, beside P. Then P is freed. G itself is reduced where it is fp32 and a copy R beside it where it is not, padded
  once more where the ranks do not divide it; no reduce-scatter is in flight during the next block's backward.
"""

from __future__ import annotations

from eco_dist.memory.categories import Category
from eco_dist.memory.peak.fsdp2 import Step
from eco_dist.memory.peak.unit import Unit
from eco_dist.memory.report import Moment


class FSDP1Step(Step):
    """One step, moment by moment."""

    def _forward(self, number: int) -> Moment:
        unit = self.units[number]
        return self._moment(
            f"forward {unit.layer}",
            unsharded=self.root.weights + unit.weights,
            activations=self._kept(unit.layer) + self._own(number),
            temporaries=unit.decoding,
        )

    def _loss(self) -> Moment:
        loss = super()._loss()
        last = self.units[-1].weights if self.units else 0
        counts = {**loss.bytes, Category.COMMUNICATION: 0, Category.UNSHARDED: self.root.weights + last}
        return Moment(name=loss.name, bytes=counts)

    def _backward(self, number: int) -> Moment:
        """Where it takes the most: at the block's first products, or as its gradients become one."""
        unit = self.units[number]

        def during(*, gradients: int, activations: int, temporaries: int) -> Moment:
            return self._moment(
                f"backward {unit.layer}",
                unsharded=self.root.weights + unit.weights + self._ahead(unit.layer),
                gradients=self._reduced(number) + self.root.early + gradients,
                activations=self._kept(unit.layer) + activations,
                temporaries=temporaries,
            )

        first = during(
            gradients=0,
            activations=self._own(number),
            temporaries=max(self._work(number) + unit.largest_gradient, unit.decoding),
        )
        last = during(gradients=2 * unit.gradient, activations=0, temporaries=0)
        return max(first, last, key=lambda moment: moment.total)

    def _reduce(self, number: int) -> Moment:
        unit = self.units[number]
        return self._moment(
            f"reduce {unit.layer}",
            unsharded=self.root.weights + self._ahead(unit.layer),
            communication=self._carried(unit),
            gradients=self._reduced(number) + self.root.early + unit.gradient + unit.reduced,
            activations=self._kept(unit.layer),
        )

    def _end_of_backward(self) -> Moment:
        root = self.root
        return self._moment(
            "reduce the root",
            communication=self._carried(root),
            gradients=self._reduced(-1) + root.gradient,
        )

    def _carried(self, unit: Unit) -> int:
        """R where it is not G itself, a copy padded to the ranks where they do not divide it, and gloo's copy."""
        is_cast = unit.gradient < unit.reduce_input
        is_padded = (unit.reduce_input // 4) % self.mesh.shards != 0
        return unit.reduce_input * (is_cast + is_padded + self.copies)

    def _ahead(self, layer: int) -> int:
        """P of the block before, which FSDP1 gathers ahead in backward."""
        return sum(unit.weights for unit in self.units if unit.layer == layer - 1)
