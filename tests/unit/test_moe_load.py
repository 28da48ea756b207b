"""Layers of Hugging Face checkpoints compute here what they compute there."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eco_dist import quantize_weights_
from eco_dist.moe import MoEConfig, MoELayer
from eco_dist.moe.load import FAMILIES, load_layer

SIZES = {"width": 32, "hidden": 24, "experts": 4, "top_k": 2, "backend": "native"}


def hugging_face(family: str) -> tuple[torch.nn.Module, torch.nn.Module, MoEConfig]:
    """A tiny model, its first sparse block, and the shape of ours."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": 17, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    common |= {"num_key_value_heads": 2, "num_experts_per_tok": 2}
    if family == "mixtral":
        config = transformers.MixtralConfig(**common, intermediate_size=24, num_local_experts=4)
        model = transformers.MixtralForCausalLM(config)
        ours = MoEConfig(**SIZES)
    elif family == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(
            **common, intermediate_size=40, moe_intermediate_size=24, num_experts=4, norm_topk_prob=True, head_dim=16
        )
        model = transformers.Qwen3MoeForCausalLM(config)
        ours = MoEConfig(**SIZES)
    else:
        config = transformers.DeepseekV3Config(
            **common,
            intermediate_size=40,
            moe_intermediate_size=24,
            n_routed_experts=4,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=0,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=8,
            v_head_dim=16,
        )
        model = transformers.DeepseekV3ForCausalLM(config)
        ours = MoEConfig(**SIZES, shared_hidden=48, score="sigmoid", scale=2.5)
    return model, model.model.layers[1].mlp, ours


@pytest.mark.parametrize("family", FAMILIES)
def test_a_loaded_layer_computes_the_same(family: str, tmp_path: Path) -> None:
    model, block, config = hugging_face(family)
    model.save_pretrained(tmp_path)
    layer = MoELayer(config)
    load_layer(layer, tmp_path, "model.layers.1.", family)
    x = torch.randn(2, 5, 32)
    expected = block(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-5, atol=1e-6)


def stored(folder: Path, **changes: torch.Tensor | None) -> Path:
    """A Mixtral layer in two files, some of its tensors changed or left out."""
    names = FAMILIES["mixtral"]
    tensors: dict[str, torch.Tensor | None] = {f"layer.{names.router}": torch.randn(4, 32)}
    for expert in range(4):
        for name, shape in ((names.gate, (24, 32)), (names.up, (24, 32)), (names.down, (32, 24))):
            tensors[f"layer.{name.format(expert)}"] = torch.randn(shape)
    tensors |= changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    half = len(kept) // 2
    save_file(dict(list(kept.items())[:half]), folder / "model-1.safetensors")
    save_file(dict(list(kept.items())[half:]), folder / "model-2.safetensors")
    return folder


def test_reads_from_several_files(tmp_path: Path) -> None:
    layer = MoELayer(MoEConfig(**SIZES))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(torch.nan)
    load_layer(layer, stored(tmp_path), "layer.", "mixtral")
    assert all(torch.isfinite(parameter).all() for parameter in layer.parameters())


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    gate = "layer.block_sparse_moe.experts.{}.w1.weight"
    plain = MoELayer(MoEConfig(**SIZES))
    cases = {
        "family to be one of": (plain, {}, "mistral"),
        "check prefix and family": (plain, {gate.format(2): None}, "mixtral"),
        "shape \\[24, 32\\], got \\[24, 30\\]": (plain, {gate.format(1): torch.zeros(24, 30)}, "mixtral"),
        "got more": (plain, {gate.format(4): torch.zeros(24, 32)}, "mixtral"),
        "without a shared expert": (MoELayer(MoEConfig(**SIZES, shared_hidden=8)), {}, "mixtral"),
        "with a shared expert": (plain, {}, "deepseek"),
        "a gated layer": (MoELayer(MoEConfig(**SIZES, glu=False)), {}, "mixtral"),
    }
    for number, (part, (layer, changes, family)) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(ValueError, match=part):
            load_layer(layer, stored(folder, **changes), "layer.", family)
    quantize_weights_(plain, "fp8")
    with pytest.raises(ValueError, match="load before converting"):
        load_layer(plain, stored(tmp_path), "layer.", "mixtral")
    with pytest.raises(ValueError, match="found none; check the folder"):
        load_layer(MoELayer(MoEConfig(**SIZES)), tmp_path / "nothing", "layer.", "mixtral")
