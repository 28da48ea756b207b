"""Named model sizes: the paper's scaling study (QuEST's shapes) and small ones for a CPU.

A name such as ``30M`` counts non-embedding parameters: 30M has exactly 30,482,560.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from eco_dist.models.llama import Llama, LlamaConfig
from eco_dist.models.smoe import SMoE, SMoEConfig
from eco_dist.moe import MoEConfig
from eco_dist.moe.config import Activation, Backend, Wire

__all__ = [
    "PRESETS",
    "SPARSE_PRESETS",
    "Preset",
    "SparsePreset",
    "build_transformer",
    "llama_config",
    "model_config",
]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Layers, width and heads of a named size; the vocabulary comes from the tokenizer."""

    layers: int
    width: int
    heads: int


PRESETS: dict[str, Preset] = {
    "nano": Preset(layers=2, width=64, heads=2),  # 0.13 M, for tests
    "tiny": Preset(layers=2, width=128, heads=4),  # 0.52 M, trains in a minute on two CPU cores
    "small": Preset(layers=2, width=256, heads=8),  # 1.7 M
    "30M": Preset(layers=6, width=640, heads=5),
    "50M": Preset(layers=7, width=768, heads=6),
    "100M": Preset(layers=8, width=1024, heads=8),
    "200M": Preset(layers=10, width=1280, heads=10),
    "430M": Preset(layers=13, width=1664, heads=13),
    "800M": Preset(layers=16, width=2048, heads=16),
}


@dataclass(frozen=True, kw_only=True)
class SparsePreset(Preset):
    """A named size with experts; see `MoEConfig` and `SMoEConfig` for the fields."""

    experts: int
    top_k: int
    hidden: int
    glu: bool = True
    activation: Activation = "silu"
    normalize: bool = True
    shared_hidden: int = 0
    dense_layers: int = 0
    dense_hidden: int = 0


SPARSE_PRESETS: dict[str, SparsePreset] = {
    "smoe-nano": SparsePreset(layers=2, width=64, heads=2, experts=4, top_k=2, hidden=64),  # 0.13 M, for tests
    "smoe-tiny": SparsePreset(layers=2, width=128, heads=4, experts=8, top_k=2, hidden=128),  # 0.9 M, in a minute
    # The paper's. Its experts have two matrices: only so does it have 2.1 B weights.
    "smoe-2.1B": SparsePreset(
        layers=24, width=576, heads=9, experts=32, top_k=4, hidden=2304, glu=False, activation="gelu"
    ),
    "deepseek-moe-16B": SparsePreset(
        layers=28,
        width=2048,
        heads=16,
        experts=64,
        top_k=6,
        hidden=1408,
        normalize=False,
        shared_hidden=2 * 1408,
        dense_layers=1,
        dense_hidden=10_944,
    ),
}


def llama_config(preset: str, *, vocabulary: int, activations: Literal["none", "fp8"] = "none") -> LlamaConfig:
    """The `LlamaConfig` of a named size with the given vocabulary.

    Raises:
        ValueError: ``preset`` is no known name; the message names the nearest one.
    """
    if preset not in PRESETS:
        raise _unknown(preset, list(PRESETS))
    shape = PRESETS[preset]
    return LlamaConfig(
        vocabulary=vocabulary, layers=shape.layers, width=shape.width, heads=shape.heads, activations=activations
    )


def model_config(
    preset: str,
    *,
    vocabulary: int,
    activations: Literal["none", "fp8"] = "none",
    backend: Backend = "auto",
    wire: Wire = "full",
    capacity_factor: float | None = None,
) -> LlamaConfig:
    """The shape of a named size, dense (`LlamaConfig`) or sparse (`SMoEConfig`).

    Args:
        preset: its name.
        vocabulary: number of token ids.
        activations: see `LlamaConfig`.
        backend: see `MoEConfig`; of a sparse size.
        wire: see `MoEConfig`; of a sparse size.
        capacity_factor: see `MoEConfig`; of a sparse size.

    Raises:
        ValueError: ``preset`` is no known name; the message names the nearest one.
    """
    if preset in PRESETS:
        return llama_config(preset, vocabulary=vocabulary, activations=activations)
    if preset not in SPARSE_PRESETS:
        raise _unknown(preset, [*PRESETS, *SPARSE_PRESETS])
    sparse = SPARSE_PRESETS[preset]
    moe = MoEConfig(
        width=sparse.width,
        hidden=sparse.hidden,
        experts=sparse.experts,
        top_k=sparse.top_k,
        glu=sparse.glu,
        activation=sparse.activation,
        normalize=sparse.normalize,
        shared_hidden=sparse.shared_hidden,
        backend=backend,
        wire=wire,
        capacity_factor=capacity_factor,
    )
    return SMoEConfig(
        vocabulary=vocabulary,
        layers=sparse.layers,
        width=sparse.width,
        heads=sparse.heads,
        activations=activations,
        moe=moe,
        dense_layers=sparse.dense_layers,
        dense_hidden=sparse.dense_hidden,
    )


def build_transformer(config: LlamaConfig, *, seed: int = 0) -> Llama:
    """The model of a shape, dense or sparse."""
    return SMoE(config, seed=seed) if isinstance(config, SMoEConfig) else Llama(config, seed=seed)


def _unknown(preset: str, known: list[str]) -> ValueError:
    near = difflib.get_close_matches(preset, known, n=1, cutoff=0.0)[0]
    return ValueError(f"expected a model preset out of {', '.join(known)}, got {preset!r}; did you mean {near!r}?")
