"""The shape of a mixture-of-experts layer."""

from __future__ import annotations

import dataclasses
from typing import Literal

Activation = Literal["silu", "gelu"]
Score = Literal["softmax", "sigmoid"]
Backend = Literal["auto", "native", "megablocks"]
Wire = Literal["full", "fp8"]
Products = Literal["full", "fp8"]

_CHOICES = {
    "activation": ("silu", "gelu"),
    "score": ("softmax", "sigmoid"),
    "backend": ("auto", "native", "megablocks"),
    "wire": ("full", "fp8"),
    "products": ("full", "fp8"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A layer of experts.

    Attributes:
        width: features D of a token.
        hidden: hidden features F of one expert.
        experts: number of experts E.
        top_k: experts K that each token visits.
        glu: three matrices, act(x w1^T) * (x v1^T) w2, instead of two, act(x w1^T) w2.
        activation: `silu`, or `gelu` in its tanh form, as in megablocks.
        score: how the router turns logits into scores.
        normalize: whether the weights of a token's experts sum to `scale`.
        scale: factor on the weights.
        shared_hidden: hidden features of an ordinary feed-forward every token passes too; 0 for none.
        backend: who multiplies; `auto` takes megablocks on CUDA where it can be imported, else the native code.
        wire: what expert parallelism sends: tokens in full precision, or as E4M3 with a scale a token (`fp8`). The
            rounding happens whether a token leaves its rank or not, so it does not depend on the number of ranks.
        capacity_factor: most rows of an expert, as a multiple of an even share; None drops no token.
        products: `fp8` multiplies E4M3 operands directly where stored codes allow it (`moe.scaled`), rounding tokens
            too; `full` decodes the weights.

    Raises:
        ValueError: for a size below 1, more experts a token than there are, or an unknown choice.
    """

    width: int
    hidden: int
    experts: int
    top_k: int
    glu: bool = True
    activation: Activation = "silu"
    score: Score = "softmax"
    normalize: bool = True
    scale: float = 1.0
    shared_hidden: int = 0
    backend: Backend = "auto"
    wire: Wire = "full"
    capacity_factor: float | None = None
    products: Products = "full"

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        for name in ("width", "hidden", "experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of 1 or more, got {getattr(self, name)}; give a positive integer")
        if self.top_k > self.experts:
            raise ValueError(
                f"expected top_k of at most the number of experts, got {self.top_k} of {self.experts}; lower top_k"
            )
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(
                f"expected a capacity_factor above 0, got {self.capacity_factor}; leave it out to drop no token"
            )
        if self.shared_hidden < 0:
            raise ValueError(f"expected shared_hidden of 0 or more, got {self.shared_hidden}; 0 means no shared expert")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"expected {name} to be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
