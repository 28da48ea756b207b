"""Sizes of public models, as their published configurations give them."""

from __future__ import annotations

import difflib
import json
import types
from pathlib import Path
from typing import Any

from eco_dist.memory.architectures import FAMILIES, Architecture, Experts


def _sizes(
    family: str, layers: int, width: int, hidden: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        **more,
    }


def _qwen_moe(layers: int, width: int, heads: int, *, expert_hidden: int, hidden: int) -> dict[str, Any]:
    routed = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert_hidden, "head_dim": 128}
    return _sizes("qwen3_moe", layers, width, hidden, heads, 4, 151_936, **routed)


_MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
_DEEPSEEK = {
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}

PUBLIC_MODELS: types.MappingProxyType[str, dict[str, Any]] = types.MappingProxyType(
    {
        "smollm2-135m": _sizes("llama", 30, 576, 1536, 9, 3, 49_152, tie_word_embeddings=True),
        "llama-3.2-1b": _sizes("llama", 16, 2048, 8192, 32, 8, 128_256, head_dim=64, tie_word_embeddings=True),
        "llama-3-8b": _sizes("llama", 32, 4096, 14_336, 32, 8, 128_256),
        "llama-3-70b": _sizes("llama", 80, 8192, 28_672, 64, 8, 128_256),
        "llama-3-405b": _sizes("llama", 126, 16_384, 53_248, 128, 8, 128_256),
        "mistral-7b": _sizes("mistral", 32, 4096, 14_336, 32, 8, 32_000),
        "qwen3-0.6b": _sizes("qwen3", 28, 1024, 3072, 16, 8, 151_936, head_dim=128, tie_word_embeddings=True),
        "qwen3-8b": _sizes("qwen3", 36, 4096, 12_288, 32, 8, 151_936, head_dim=128),
        "qwen3-32b": _sizes("qwen3", 64, 5120, 25_600, 64, 8, 151_936, head_dim=128),
        "qwen3-30b-a3b": _qwen_moe(48, 2048, 32, expert_hidden=768, hidden=6144),
        "qwen3-235b-a22b": _qwen_moe(94, 4096, 64, expert_hidden=1536, hidden=12_288),
        "mixtral-8x7b": _sizes("mixtral", 32, 4096, 14_336, 32, 8, 32_000, **_MIXTRAL),
        "mixtral-8x22b": _sizes("mixtral", 56, 6144, 16_384, 48, 8, 32_768, **_MIXTRAL),
        "deepseek-v3": _sizes("deepseek_v3", 61, 7168, 18_432, 128, 128, 129_280, **_DEEPSEEK),
    }
)
"""Name -> configuration. DeepSeek-V3 without its multi-token-prediction module: 671,026,404,352 parameters."""


def find_architecture(name: str, *, experts: Experts = "flat") -> Architecture | None:
    """The architecture of a public model or a Hugging Face ``config.json`` on disk; None if the name is neither.

    Raises:
        ValueError: the file is no configuration, or of a family whose shapes are not known here.
    """
    if name in PUBLIC_MODELS:
        return Architecture(name, PUBLIC_MODELS[name], experts=experts)
    path = Path(name)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        return None
    config = read_config(file)
    if config["model_type"] not in FAMILIES:
        raise ValueError(
            f"expected model_type to be one of {', '.join(FAMILIES)} in {file}, got '{config['model_type']}'; "
            "build the module on the meta device and pass it to eco_dist.plan"
        )
    return Architecture(str(config.get("_name_or_path") or path.stem), config, experts=experts)


def read_config(file: Path) -> dict[str, Any]:
    """A Hugging Face configuration.

    Raises:
        ValueError: the file is not JSON or says no model_type.
    """
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"expected JSON in {file}, got: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"expected a Hugging Face configuration with 'model_type' in {file}, got none")
    return config


def unknown_model(name: str, others: tuple[str, ...] = ()) -> ValueError:
    """The error for a name that is nothing."""
    known = [*PUBLIC_MODELS, *others]
    nearest = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"choose one of {', '.join(known)}"
    return ValueError(f"expected a public model, a preset or the path of a config.json, got '{name}'; {hint}")
