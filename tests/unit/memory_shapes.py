"""Small models of every family, for plans."""

from eco_dist.memory.architectures import Architecture

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 2,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
MORE = {
    "qwen3": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": EXPERTS,
    "deepseek_v3": LATENT,
}


def small(family: str, **options: str) -> Architecture:
    config = {"model_type": family, **SMALL, **MORE.get(family, {})}
    return Architecture(family, config, **options)  # type: ignore[arg-type]
