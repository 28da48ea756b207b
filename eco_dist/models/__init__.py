"""Models to train: a Llama-style transformer with the paper's sizes."""

from eco_dist.models.activations import round_activations
from eco_dist.models.llama import Llama, LlamaConfig, next_token_loss
from eco_dist.models.presets import PRESETS, Preset, llama_config

__all__ = ["PRESETS", "Llama", "LlamaConfig", "Preset", "llama_config", "next_token_loss", "round_activations"]
