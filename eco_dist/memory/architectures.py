"""Shapes of public model families, from their Hugging Face configuration alone: neither weights nor transformers.

Names and shapes are those of transformers 5; a test holds them to its own modules on the meta device. Experts come in
three forms: `flat` as megablocks and this package keep them (one matrix of experts x hidden rows for each projection),
`stacked` as transformers does (3-D, gate and up together), `separate` (a matrix for each expert, as DeepSpeed's MoE).
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from eco_dist.memory.activations import TransformerShape
from eco_dist.memory.baselines import Baseline, storage_of
from eco_dist.memory.storage import Storage
from eco_dist.memory.tensors import ModelBuffer, ModelShape, ModelTensor
from eco_dist.recipe import Recipe
from eco_dist.weights import DEFAULT_SKIP

Experts = Literal["flat", "stacked", "separate"]
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3")
_BIASED = ("qwen2",)
_NORMED = ("qwen3", "qwen3_moe")
_Named = tuple[str, tuple[int, ...]]


class Architecture:
    """A model family with sizes.

    Attributes:
        name: what the model is called.
        config: keys of its Hugging Face configuration.
        experts: form of the experts.
        shape: sizes that activations follow from.
    """

    def __init__(self, name: str, config: Mapping[str, Any], *, experts: Experts = "flat") -> None:
        """Read a configuration.

        Raises:
            ValueError: for an unknown family, a missing key, or an unknown form of experts.
        """
        self.name, self.config, self.experts = name, config, experts
        if experts not in ("flat", "stacked", "separate"):
            raise ValueError(f"expected experts to be flat, stacked or separate, got '{experts}'")
        self.family = str(config.get("model_type"))
        if self.family not in FAMILIES:
            raise ValueError(f"expected model_type to be one of {', '.join(FAMILIES)}, got '{self.family}'")
        self.layers = self._size("num_hidden_layers")
        self.width = self._size("hidden_size")
        self.vocabulary = self._size("vocab_size")
        self.heads = self._size("num_attention_heads")
        self.kv_heads = int(config.get("num_key_value_heads") or self.heads)
        self.head = int(config.get("head_dim") or self.width // self.heads)
        self.hidden = self._size("intermediate_size")
        self.number_of_experts = self._size("num_local_experts", "num_experts", "n_routed_experts", default=0)
        self.expert_hidden = self._size("moe_intermediate_size", "intermediate_size") if self.number_of_experts else 0
        self.dense_layers = int(config.get("first_k_dense_replace", 0)) if self.number_of_experts else self.layers
        self.shape = self._transformer()

    def stored(self, recipe: Recipe | Baseline) -> ModelShape:
        """The model with its tensors stored in a recipe or baseline."""
        tensors = [
            ModelTensor(
                name=name,
                shape=shape,
                storage=_storage(name, shape, recipe),
                unit=_unit(name),
                is_expert=".experts." in name,
                count=self.number_of_experts if ".experts.*." in name else 1,
            )
            for name, shape in self._tensors()
        ]
        return ModelShape(
            name=self.name,
            recipe=recipe.name,
            tensors=tuple(tensors),
            buffers=tuple(self._buffers()),
            transformer=self.shape,
            folds_layers=True,
        )

    # --- tensors ----------------------------------------------------------------------------------------------------

    def _tensors(self) -> Iterator[_Named]:
        yield "model.embed_tokens.weight", (self.vocabulary, self.width)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}"
            attention = self._latent_attention() if self.family == "deepseek_v3" else self._attention()
            for name, shape in attention:
                yield f"{prefix}.self_attn.{name}", shape
            feed_forward = self._routed() if layer >= self.dense_layers else self._dense(self.hidden)
            for name, shape in feed_forward:
                yield f"{prefix}.mlp.{name}", shape
            yield f"{prefix}.input_layernorm.weight", (self.width,)
            yield f"{prefix}.post_attention_layernorm.weight", (self.width,)
        yield "model.norm.weight", (self.width,)
        if not self.config.get("tie_word_embeddings", False):
            yield "lm_head.weight", (self.vocabulary, self.width)

    def _attention(self) -> Iterator[_Named]:
        queries, keys = self.heads * self.head, self.kv_heads * self.head
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            yield f"{name}.weight", (rows, self.width)
            if self.family in _BIASED:
                yield f"{name}.bias", (rows,)
        yield "o_proj.weight", (self.width, queries)
        if self.family in _NORMED:
            yield "q_norm.weight", (self.head,)
            yield "k_norm.weight", (self.head,)

    def _latent_attention(self) -> Iterator[_Named]:
        query_rank, rank = self._size("q_lora_rank"), self._size("kv_lora_rank")
        rotary, plain, value = (self._size(f"{n}_head_dim") for n in ("qk_rope", "qk_nope", "v"))
        yield "q_a_proj.weight", (query_rank, self.width)
        yield "q_a_layernorm.weight", (query_rank,)
        yield "q_b_proj.weight", (self.heads * (plain + rotary), query_rank)
        yield "kv_a_proj_with_mqa.weight", (rank + rotary, self.width)
        yield "kv_a_layernorm.weight", (rank,)
        yield "kv_b_proj.weight", (self.heads * (plain + value), rank)
        yield "o_proj.weight", (self.width, self.heads * value)

    def _dense(self, hidden: int) -> Iterator[_Named]:
        yield "gate_proj.weight", (hidden, self.width)
        yield "up_proj.weight", (hidden, self.width)
        yield "down_proj.weight", (self.width, hidden)

    def _routed(self) -> Iterator[_Named]:
        count, hidden, width = self.number_of_experts, self.expert_hidden, self.width
        if self.experts == "stacked":
            yield "experts.gate_up_proj", (count, 2 * hidden, width)
            yield "experts.down_proj", (count, width, hidden)
        elif self.experts == "flat":
            for name in ("w1", "v1", "w2"):
                yield f"experts.{name}", (count * hidden, width)
        else:
            for name, shape in self._dense(hidden):
                yield f"experts.*.{name}", shape
        yield "gate.weight", (count, width)
        for name, shape in self._dense(self._shared_hidden()) if self._shared_hidden() else ():
            yield f"shared_experts.{name}", shape

    def _buffers(self) -> Iterator[ModelBuffer]:
        rotary = self._size("head_dim", "qk_rope_head_dim") if self.family == "deepseek_v3" else self.head
        for name in ("inv_freq", "original_inv_freq"):
            yield ModelBuffer(name=f"model.rotary_emb.{name}", bytes=4 * (rotary // 2))
        if self.family == "deepseek_v3":
            for layer in range(self.dense_layers, self.layers):
                name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
                yield ModelBuffer(name=name, bytes=4 * self.number_of_experts)

    def _transformer(self) -> TransformerShape:
        latent = self.family == "deepseek_v3"
        key_head = self._size("qk_nope_head_dim") + self._size("qk_rope_head_dim") if latent else self.head
        value_head = self._size("v_head_dim") if latent else self.head
        groups = self.heads if latent else self.kv_heads
        return TransformerShape(
            layers=self.layers,
            width=self.width,
            vocabulary=self.vocabulary,
            heads=self.heads,
            query=self.heads * key_head,
            key=groups * key_head,
            value=groups * value_head,
            out=self.heads * value_head,
            hidden=self.hidden,
            latent=3 * (self._size("q_lora_rank") + self._size("kv_lora_rank")) if latent else 0,
            expert_hidden=self.expert_hidden,
            active=self._size("num_experts_per_tok") if self.number_of_experts else 0,
            shared_hidden=self._shared_hidden(),
            dense_layers=self.dense_layers,
        )

    def _shared_hidden(self) -> int:
        return int(self.config.get("n_shared_experts") or 0) * self.expert_hidden

    def _size(self, *keys: str, default: int | None = None) -> int:
        for key in keys:
            if self.config.get(key) is not None:
                return int(self.config[key])
        if default is not None:
            return default
        raise ValueError(f"expected '{keys[0]}' in the configuration of '{self.name}', got none; complete the file")


def _storage(name: str, shape: tuple[int, ...], recipe: Recipe | Baseline) -> Storage:
    is_matrix = len(shape) >= 2 and not any(fnmatch.fnmatchcase(name, pattern) for pattern in DEFAULT_SKIP)
    assert math.prod(shape) > 0, (name, shape)
    if isinstance(recipe, Baseline):
        return recipe.matrices if is_matrix else recipe.others
    return storage_of(recipe if is_matrix else None)


def _unit(name: str) -> str:
    return ".".join(name.split(".")[:3]) if name.startswith("model.layers.") else ""
