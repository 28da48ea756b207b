"""A Llama-style decoder-only transformer: SwiGLU, RMSNorm, rotary positions, untied head, no biases.

Note: names and shapes
    B sequences, T tokens each, D = width, H = heads, K = D / H head features, F = hidden features, V = vocabulary.
    Parameters: ``embed.weight (V, D)``, ``blocks.N.attention.{wq,wk,wv,wo}.weight (D, D)``,
    ``blocks.N.feed_forward.{w1,w3}.weight (F, D)``, ``blocks.N.feed_forward.w2.weight (D, F)``,
    ``blocks.N.{attention_norm,feed_forward_norm}.weight (D,)``, ``norm.weight (D,)``, ``head.weight (V, D)``.
    The linear layers inside ``blocks`` are what a recipe quantizes; embedding, head and norms stay plain (paper §2).
    The model holds no buffers: rotary tables are computed in the forward, so static memory is parameters alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eco_dist.models.activations import round_activations

__all__ = ["Llama", "LlamaConfig", "next_token_loss"]

INIT_STD = 0.02
FFN_MULTIPLE = 256
RESIDUAL_OUTPUTS = ("wo.weight", "w2.weight", "mlp.w2", "down_proj.weight")
"""Ends of the names of matrices whose output is added to the residual stream."""


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The shape of a model.

    Args:
        vocabulary: number of token ids V.
        layers: number of transformer blocks.
        width: model features D, divisible by ``heads``.
        heads: attention heads H; each head has an even number of features, for the rotary pairs.
        activations: ``"none"``, or ``"fp8"`` to round the input of each block linear to E4M3 (paper §2).
        rotary_base: base of the rotary frequencies.
        norm_eps: epsilon of RMSNorm.

    Raises:
        ValueError: a size is not positive, or ``width`` does not split into heads of an even size.
    """

    vocabulary: int
    layers: int
    width: int
    heads: int
    activations: Literal["none", "fp8"] = "none"
    rotary_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("vocabulary", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of 1 or more, got {getattr(self, name)}; give a positive integer")
        if self.width % (2 * self.heads):
            raise ValueError(
                f"expected width divisible by 2 * heads, got width {self.width} and {self.heads} heads; "
                "choose a width with an even number of features a head"
            )
        if self.activations not in ("none", "fp8"):
            raise ValueError(f"expected activations 'none' or 'fp8', got {self.activations!r}; choose one of the two")

    @property
    def hidden(self) -> int:
        """Hidden features of the feed-forward, F = 8 D / 3 rounded up to a multiple of 256."""
        return FFN_MULTIPLE * math.ceil(8 * self.width / (3 * FFN_MULTIPLE))

    @property
    def block_parameters(self) -> int:
        """Number of non-embedding parameters N as the paper counts: blocks and norms, without embedding and head."""
        per_block = 4 * self.width**2 + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * per_block + self.width


def _rotate(x: Tensor, base: float) -> Tensor:
    """Rotary positions: pair (x_i, x_{i+K/2}) of token t turns by the angle t * base^(-2i/K).

    Args:
        x: ``(B, H, T, K)`` queries or keys, any float dtype.
        base: of the frequencies.

    Returns:
        The same shape and dtype; the angles and the rotation are fp32, because bf16 angles blur far positions.
    """
    tokens, features = x.shape[-2], x.shape[-1]
    exponent = torch.arange(0, features, 2, device=x.device, dtype=torch.float32) / features
    position = torch.arange(tokens, device=x.device, dtype=torch.float32)
    angle = torch.outer(position, base**-exponent)
    cos, sin = angle.cos(), angle.sin()
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention, softmax(Q K^T / sqrt(K)) V, with rotary queries and keys."""

    def __init__(self, config: LlamaConfig) -> None:
        """Build the layers of this part."""
        super().__init__()
        self.config = config
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, config.width, bias=False)
        self.wv = nn.Linear(config.width, config.width, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x (B, T, D)`` to the attention output ``(B, T, D)``; token t sees tokens 0..t only."""
        batch, tokens, width = x.shape
        heads = self.config.heads
        x = _linear_input(x, self.config)
        q, k, v = (w(x).view(batch, tokens, heads, width // heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = _rotate(q, self.config.rotary_base), _rotate(k, self.config.rotary_base)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        out: Tensor = self.wo(_linear_input(mixed, self.config))
        return out


class FeedForward(nn.Module):
    """SwiGLU: W2 (silu(W1 x) * W3 x)."""

    def __init__(self, config: LlamaConfig) -> None:
        """Build the layers of this part."""
        super().__init__()
        self.config = config
        self.w1 = nn.Linear(config.width, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x (B, T, D)`` to ``(B, T, D)``."""
        x = _linear_input(x, self.config)
        gated = F.silu(self.w1(x)) * self.w3(x)
        out: Tensor = self.w2(_linear_input(gated, self.config))
        return out


class Block(nn.Module):
    """One pre-norm residual block: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        """Build the layers of this part."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x (B, T, D)`` to ``(B, T, D)``."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Llama(nn.Module):
    """The whole model: embedding, blocks, final norm, untied head.

    Built on the meta device it allocates nothing; ``to_empty(device=...)`` and ``init_weights(seed)`` then fill it.

    Args:
        config: the shape.
        seed: seed of the initial weights, see `init_weights`; skipped on the meta device.
    """

    def __init__(self, config: LlamaConfig, *, seed: int = 0) -> None:
        """Build the modules, and draw their weights unless they are on the meta device."""
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(self._block(layer) for layer in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.norm_eps)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if not self.embed.weight.is_meta:
            self.init_weights(seed)

    def _block(self, layer: int) -> nn.Module:
        """The block of a layer; the sparse form has others."""
        return Block(self.config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids ``(B, T)`` int64 to logits ``(B, T, V)`` in the compute dtype."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw all weights: normal with std 0.02; residual outputs (``wo``, ``w2``, …) 0.02 / sqrt(2 layers); norms 1.

        The draws come from one CPU generator in parameter order whatever the device of the model, so every rank and
        device starts from the same weights for the same ``seed``. Call it before a weight is quantized or sharded.
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = INIT_STD / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            std = residual_std if name.endswith(RESIDUAL_OUTPUTS) else INIT_STD
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu").normal_(
                0.0, std, generator=generator
            )
            parameter.copy_(drawn)


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token, computed in fp32.

    Args:
        logits: ``(B, T, V)``, any float dtype.
        targets: ``(B, T)`` int64, the token that follows each input token.
    """
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def _linear_input(x: Tensor, config: LlamaConfig) -> Tensor:
    """The input of a block linear: ``x``, or its FP8 rounding where the config asks for it."""
    return round_activations(x) if config.activations == "fp8" else x
