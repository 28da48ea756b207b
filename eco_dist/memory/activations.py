"""Activations: what autograd keeps between forward and backward. A model, for dense and expert transformers.

[Note: what is kept]
Elements a token and layer, read off what PyTorch saves for a pre-norm SwiGLU block with RMSNorm and fused attention,
each in the compute dtype:

* width D: the input of either norm, its normalized value and the norm's output: 6 D
* attention: queries, keys and values as the attention kernel gets them, its output, and the output as the next
  product reads it; with latent attention (MLA) also both latents before and after their norm
* feed-forward of hidden width F: both projections, silu of the first, their product: 4 F
* experts: 4 F for each of the k experts a token goes to, and its permuted input and output: 2 k D. Expert parallelism
  of this package adds nothing, since neither exchange nor permutation keeps rows; in DeepSpeed's layer (`ep` below),
  as much again for both ends of the all-to-all

and 4 bytes a head for the softmax. Checkpointing keeps the input of each block, D, and one block while it is
recomputed. The last norm keeps 3 D. The logits take 4 bytes three times while the loss is differentiated. Tensor and
sequence parallelism, dropout, and attention without a fused kernel (which keeps scores, quadratic in the sequence) are
not modelled.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerShape:
    """Sizes of a transformer's layers.

    Attributes:
        layers: number of blocks.
        width: features D of the residual stream.
        vocabulary: rows of the embedding.
        heads: query heads.
        query, key, value: elements a token of queries, keys and values as the attention kernel gets them.
        out: elements a token of its output.
        latent: elements a token of MLA's latents, before and after their norms; 0 without MLA.
        hidden: hidden width of a dense feed-forward.
        expert_hidden: of one expert; 0 in a dense model.
        active: experts a token goes to.
        shared_hidden: of the experts every token goes to.
        dense_layers: leading layers without experts.
    """

    layers: int
    width: int
    vocabulary: int
    heads: int
    query: int
    key: int
    value: int
    out: int
    hidden: int
    latent: int = 0
    expert_hidden: int = 0
    active: int = 0
    shared_hidden: int = 0
    dense_layers: int = 0

    def feed_forward(self, layer: int) -> int:
        """Hidden elements a token passes through in a layer."""
        if not self.expert_hidden or layer < self.dense_layers:
            return self.hidden
        return self.active * self.expert_hidden + self.shared_hidden

    def is_routed(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return bool(self.expert_hidden) and layer >= self.dense_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """What one rank computes at a time.

    Attributes:
        sequences: sequences of a micro-batch on one rank.
        length: tokens of a sequence.
        compute_bytes: bytes of an activation: 2 for bf16, 4 for fp32.
        checkpoints: whether every block is recomputed in backward.

    Raises:
        ValueError: for a size below 1 or another number of bytes.
    """

    sequences: int = 1
    length: int = 4096
    compute_bytes: int = 2
    checkpoints: bool = False

    def __post_init__(self) -> None:
        """Refuse batches that do not exist."""
        for name in ("sequences", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected batch {name} of 1 or more, got {getattr(self, name)}")
        if self.compute_bytes not in (2, 4):
            raise ValueError(f"expected 2 (bf16) or 4 (fp32) bytes an activation, got {self.compute_bytes}")

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.sequences * self.length


def layer_bytes(shape: TransformerShape, batch: Batch, layer: int, *, ep: int = 1) -> int:
    """Bytes that one block keeps from its forward to its backward, without checkpointing."""
    elements = 6 * shape.width + shape.query + shape.key + shape.value + 2 * shape.out + shape.latent
    elements += 4 * (shape.shared_hidden if shape.is_routed(layer) else shape.hidden)
    own = batch.tokens * (batch.compute_bytes * elements + 4 * shape.heads)
    return own + routed_bytes(shape, batch, layer, ep=ep)


def routed_bytes(shape: TransformerShape, batch: Batch, layer: int, *, ep: int = 1) -> int:
    """The part of `layer_bytes` that belongs to a block's routed experts; 0 in a dense block."""
    if not shape.is_routed(layer):
        return 0
    elements = shape.active * (4 * shape.expert_hidden + 2 * shape.width * (2 if ep > 1 else 1))
    return batch.tokens * batch.compute_bytes * elements


def kept_bytes(shape: TransformerShape, batch: Batch, layer: int, *, ep: int = 1) -> int:
    """Bytes a block keeps until its backward begins: everything, or its input where blocks are checkpointed."""
    if batch.checkpoints:
        return batch.tokens * batch.compute_bytes * shape.width
    return layer_bytes(shape, batch, layer, ep=ep)


def output_bytes(shape: TransformerShape, batch: Batch) -> int:
    """Bytes the last norm keeps: its input, the normalized value, and the head's input."""
    return 3 * batch.tokens * batch.compute_bytes * shape.width


def logits_bytes(shape: TransformerShape, batch: Batch) -> int:
    """Bytes of log-probabilities, their gradient and the logits' at the start of backward."""
    return 3 * 4 * batch.tokens * shape.vocabulary
