"""Models to train: a Llama-style transformer, dense and with experts, in the paper's sizes."""

from eco_dist.models.activations import round_activations
from eco_dist.models.llama import Llama, LlamaConfig, next_token_loss
from eco_dist.models.presets import (
    PRESETS,
    SPARSE_PRESETS,
    Preset,
    SparsePreset,
    build_transformer,
    llama_config,
    model_config,
)
from eco_dist.models.smoe import RoutingSummary, SMoE, SMoEConfig, logits_of

__all__ = [
    "PRESETS",
    "SPARSE_PRESETS",
    "Llama",
    "LlamaConfig",
    "Preset",
    "RoutingSummary",
    "SMoE",
    "SMoEConfig",
    "SparsePreset",
    "build_transformer",
    "llama_config",
    "logits_of",
    "model_config",
    "next_token_loss",
    "round_activations",
]
