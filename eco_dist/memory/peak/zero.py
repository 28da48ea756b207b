"""The transient bytes of a step under DeepSpeed: a model, checked against runs on CPU.

[Note: a step under ZeRO]
N elements, of which Q are codes and H in high precision, on P ranks; compute and gradients in 16 bits.

* Weights are there already, but for codes. `replica` decodes a block for its forward and weight after weight in its
  backward; `transient` decodes all from the first forward to the step. Stage 3 gathers ahead, and keeps up to a
  billion elements (`stage3_max_live_parameters`), which is all of a small model; in forward, what it gathers of weights
  in 16 bits is there twice. Decoding takes two fp32 copies of at most `decoded_at_once` elements.
* Stage 1 keeps whole gradients, 2 N, and at the end of backward the partition's, 2 N / P, and a bucket besides. Stages
  2 and 3 reduce a gradient as soon as a bucket is full, and one that does not fit by itself: partitions of what is
  done, a bucket, and two copies of a block's largest gradient. The bucket is static at stage 3, where codes let the
  partitions of gradients go between steps and DeepSpeed's own optimizer does not.
* The step turns the partition's gradients of high-precision parameters into the dtype of the masters, and torch's AdamW
  (`torch_adam`) makes two more copies of it; DeepSpeed's fused one does not. Stage 0 steps parameters one by one, with
  three copies of each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from eco_dist.memory.activations import Batch, kept_bytes, layer_bytes, logits_bytes, output_bytes
from eco_dist.memory.layouts.base import Layout
from eco_dist.memory.layouts.fsdp import local_count, local_shape, parts
from eco_dist.memory.layouts.zero import ZeroOptions
from eco_dist.memory.mesh import Mesh
from eco_dist.memory.peak.unit import moment
from eco_dist.memory.report import Moment
from eco_dist.memory.tensors import ModelShape, ModelTensor
from eco_dist.numerics import decoded_at_once

_LIVE = 1_000_000_000
"""DeepSpeed's `stage3_max_live_parameters` and `stage3_max_reuse_distance`."""
_PREFETCHED = 50_000_000
"""DeepSpeed's `stage3_prefetch_bucket_size`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """Elements of a block, or of what is outside of blocks.

    Attributes:
        elements: all of them.
        codes: those that are stored as codes.
        wire: bytes of the codes.
        trained: those with a gradient.
        partition: those with a gradient in one rank's partition.
        plain: those of the partition in high precision.
        largest: of the largest tensor with a gradient.
        largest_code: of the largest tensor of codes.
    """

    elements: int = 0
    codes: int = 0
    wire: int = 0
    trained: int = 0
    partition: int = 0
    plain: int = 0
    largest: int = 0
    largest_code: int = 0

    @classmethod
    def of(cls, tensors: Sequence[ModelTensor], mesh: Mesh, *, is_cut: bool) -> Unit:
        """Sums over tensors, on one expert-parallel rank."""
        unit = cls()
        for tensor in tensors:
            one = math.prod(local_shape(tensor, mesh))
            count = local_count(tensor, mesh) * one
            trained = count if tensor.trainable else 0
            codes = trained if tensor.storage.is_quantized else 0
            partition = math.ceil(trained / (parts(tensor, mesh) if is_cut else 1))
            unit = cls(
                elements=unit.elements + count,
                codes=unit.codes + codes,
                wire=unit.wire + (tensor.storage.on_wire(codes, 2) if codes else 0),
                trained=unit.trained + trained,
                partition=unit.partition + partition,
                plain=unit.plain + (0 if codes else partition),
                largest=max(unit.largest, one if trained else 0),
                largest_code=max(unit.largest_code, one if codes else 0),
            )
        return unit


class ZeroStep:
    """One step, moment by moment."""

    def __init__(self, model: ModelShape, layout: Layout, mesh: Mesh, batch: Batch | None) -> None:
        """Prepare; without a batch, or with unknown layers, activations are left out."""
        units: dict[str, list[ModelTensor]] = {"": []}
        for tensor in model.tensors:
            units.setdefault(tensor.unit, []).append(tensor)
        self._shape, self._batch, self._mesh = model.transformer, batch, mesh
        self._stage = int(layout.name[-1])
        self._options = layout.zero or ZeroOptions()
        self._stepped = max((tensor.storage.stepped_bytes for tensor in model.tensors), default=4)
        is_cut = self._stage > 0
        self._all = Unit.of(model.tensors, mesh, is_cut=is_cut)
        self._root = Unit.of(units.pop(""), mesh, is_cut=is_cut)
        self._blocks = [Unit.of(members, mesh, is_cut=is_cut) for members in units.values()]

    def moments(self) -> Iterator[Moment]:
        """Moments in order."""
        count = len(self._blocks)
        for layer, block in enumerate(self._blocks):
            yield moment(
                f"forward {layer}",
                unsharded=self._unsharded(block),
                communication=self._gathered(block) + self._assembled(block),
                activations=self._kept(layer) + self._layer(layer),
                temporaries=_decoding(block),
            )
        yield self._loss()
        for layer in reversed(range(count)):
            yield self._backward(layer)
        yield self._reduce()
        yield self._step()

    def _loss(self) -> Moment:
        output = logits = 0
        if self._shape is not None and self._batch is not None:
            output, logits = output_bytes(self._shape, self._batch), logits_bytes(self._shape, self._batch)
        return moment(
            "loss",
            unsharded=self._unsharded(Unit()),
            activations=self._kept(len(self._blocks)) + output,
            temporaries=logits,
        )

    def _backward(self, layer: int) -> Moment:
        block, done = self._blocks[layer], self._blocks[layer + 1 :]
        is_decoded = self._is_transient or (self._stage == 3 and self._all.elements <= _LIVE)
        unsharded = self._unsharded(block)
        if self._is_replica and block.codes:
            unsharded = 2 * block.largest_code  # weight after weight
        if self._stage <= 1:
            gradients = 2 * sum(unit.trained for unit in (*done, block, self._root))
        elif self._stage == 2:
            gradients = 2 * sum(unit.partition for unit in (*done, block))
        else:
            gradients = self._partitions()
        return moment(
            f"backward {layer}",
            unsharded=unsharded,
            communication=self._bucket() + (0 if is_decoded else self._gathered(block)),
            gradients=gradients,
            activations=self._kept(layer) + self._layer(layer),
            temporaries=max(0 if is_decoded else _decoding(block), self._work(layer))
            + (4 * block.largest if self._stage > 1 else 0),
        )

    def _reduce(self) -> Moment:
        """The end of backward: the embedding's gradient, and at stage 1 everybody's."""
        gradients = self._partitions() + (2 * self._all.trained if self._stage <= 1 else 8 * self._root.largest)
        bucket = 2 * self._options.reduce_bucket if self._stage in (1, 2) else 0
        return moment("reduce", unsharded=self._unsharded(Unit()), communication=bucket, gradients=gradients)

    def _step(self) -> Moment:
        if not self._all.codes:  # torch's AdamW
            own = self._stepped * self._all.partition
            if self._stage > 0:
                return moment("optimizer step", gradients=own, temporaries=2 * own)
            copies = 3 * self._stepped * self._all.largest
            return moment("optimizer step", gradients=2 * self._all.partition + own, temporaries=copies)
        unsharded = 2 * self._all.codes if self._is_transient else 0
        gradients = 2 * self._all.partition + 4 * self._all.plain
        return moment("optimizer step", unsharded=unsharded, gradients=gradients)

    # --- parts ------------------------------------------------------------------------------------------------------

    @property
    def _is_replica(self) -> bool:
        return self._stage < 3 and self._options.working_copy == "replica"

    @property
    def _is_transient(self) -> bool:
        return self._stage < 3 and self._options.working_copy == "transient"

    def _unsharded(self, block: Unit) -> int:
        """Weights in 16 bits that are not there between steps."""
        if self._stage == 3:
            return 2 * min(self._all.elements, max(_LIVE, self._root.elements + block.elements))
        if self._is_transient:
            return 2 * self._all.codes
        return 2 * block.codes if self._is_replica else 0

    def _gathered(self, block: Unit) -> int:
        """Codes of other ranks that are not there between steps."""
        if self._stage == 3:
            return min(self._all.wire, max(_PREFETCHED, block.wire))
        return self._all.wire if self._is_transient else 0

    def _assembled(self, block: Unit) -> int:
        """At stage 3, weights in 16 bits as they are gathered, before each is in one piece."""
        if self._stage < 3:
            return 0
        return 2 * min(self._all.elements - self._all.codes, max(_PREFETCHED, block.elements - block.codes))

    def _bucket(self) -> int:
        return 2 * self._options.reduce_bucket if self._stage == 2 else 0

    def _partitions(self) -> int:
        """Gradients of this rank's partition, where they are not static."""
        return 0 if self._stage == 3 and not self._all.codes else 2 * self._all.partition

    def _kept(self, layer: int) -> int:
        """Activations of the blocks before this one."""
        if self._shape is None or self._batch is None:
            return 0
        return sum(kept_bytes(self._shape, self._batch, index, ep=self._mesh.ep) for index in range(layer))

    def _layer(self, layer: int) -> int:
        if self._shape is None or self._batch is None:
            return 0
        return layer_bytes(self._shape, self._batch, layer, ep=self._mesh.ep)

    def _work(self, layer: int) -> int:
        """Gradients of activations at a block's first products, as under FSDP2."""
        if self._shape is None or self._batch is None:
            return 0
        return self._batch.tokens * 2 * (2 * self._shape.feed_forward(layer) + self._shape.width)


def _decoding(block: Unit) -> int:
    return 8 * min(block.largest_code, decoded_at_once("cuda"))
