"""Unmodified Hugging Face models: quantize, shard, train, and hold exactly what was planned."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

from eco_dist import ECOAdamW, QuantizedWeight, measure, plan, shard_model
from eco_dist.optim.shard import local
from tests.distributed.ranks import run_ranks

pytest.importorskip("transformers", reason="extra 'hf' is not installed")

VOCABULARY = 128
MODELS = ["llama", "llama-tied", "gemma3", "deepseek-v3", "mixtral"]


def build_hf(name: str) -> nn.Module:
    import transformers as hf

    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    if name.startswith("llama"):
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, tie_word_embeddings=name == "llama-tied"))
    if name == "gemma3":
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**sizes, head_dim=16, sliding_window=16))
    if name == "mixtral":
        return hf.MixtralForCausalLM(hf.MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    config = hf.DeepseekV3Config(
        **sizes | {"num_key_value_heads": 4}, **experts, **latent, moe_intermediate_size=32, first_k_dense_replace=1
    )
    return hf.DeepseekV3ForCausalLM(config)


def train_hf(name: str) -> tuple[list[float], list[int], list[str]]:
    model = build_hf(name)
    planned = plan(model, "fp8", engine="fsdp2", world_size=2)
    report = shard_model(model, "fp8", compute_dtype=torch.bfloat16)
    optimizer = ECOAdamW(model.parameters(), lr=3e-3)
    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(4):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    measured = measure(model, optimizer)
    assert any(isinstance(local(p), QuantizedWeight) for p in model.parameters())
    kept = [conversion.names[0] for conversion in report.conversions if conversion.recipe is None]
    return losses, [measured.static_bytes(rank) - planned.static_bytes(rank) for rank in range(2)], kept


@pytest.mark.parametrize("name", MODELS)
def test_trains_unmodified_and_holds_what_was_planned(name: str) -> None:
    first, second = run_ranks(2, train_hf, name)
    assert first == second
    losses, differences, kept = first
    assert losses[-1] < losses[0]
    assert differences == [0, 0]
    assert any("embed" in name for name in kept)
    if name in ("deepseek-v3", "mixtral"):
        assert any("mlp.gate.weight" in kept_name for kept_name in kept), "routers stay in high precision"
        assert not any("experts.gate_up_proj" in kept_name for kept_name in kept)
