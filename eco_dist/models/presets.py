"""Named model sizes: the paper's scaling study (QuEST's shapes) and small ones for a CPU.

A name such as ``30M`` counts non-embedding parameters: 30M has exactly 30,482,560.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal

from eco_dist.models.llama import LlamaConfig

__all__ = ["PRESETS", "Preset", "llama_config"]


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


def llama_config(preset: str, *, vocabulary: int, activations: Literal["none", "fp8"] = "none") -> LlamaConfig:
    """The `LlamaConfig` of a named size with the given vocabulary.

    Raises:
        ValueError: ``preset`` is no known name; the message names the nearest one.
    """
    if preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, n=1, cutoff=0.0)[0]
        raise ValueError(f"expected a model preset out of {', '.join(PRESETS)}, got {preset!r}; did you mean {near!r}?")
    shape = PRESETS[preset]
    return LlamaConfig(
        vocabulary=vocabulary, layers=shape.layers, width=shape.width, heads=shape.heads, activations=activations
    )
