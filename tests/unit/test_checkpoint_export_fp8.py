"""Codes for Hugging Face tools: what transformers and torch read is what we decode, or the export says no."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eco_dist import ECOAdamW, quantize_weights_
from eco_dist.checkpoint import CheckpointError, export, save, take_over
from eco_dist.recipe import RECIPES
from tests.unit.test_checkpoint_export import decoded, saved


def llama(granularity: str, root: Path) -> tuple[nn.Module, Any]:
    """A small Llama of transformers after a few steps, saved; and its configuration."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    quantize_weights_(model, RECIPES["fp8"].replace(granularity=granularity))
    optimizer = ECOAdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        tokens = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(step))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    save(root / "run", model, optimizer, step=2)
    (root / "config.json").write_text(config.to_json_string())
    return model, config


@pytest.mark.parametrize("granularity", ["block", "row", "tensor"])
def test_transformers_decodes_to_our_weights(granularity: str, tmp_path: Path) -> None:
    """With its own dequantization, which it uses where there is no GPU."""
    pytest.importorskip("accelerate", reason="transformers wants it for FP8")
    from transformers import LlamaForCausalLM

    model, _ = llama(granularity, tmp_path)
    export(tmp_path / "run", tmp_path / "out", format="hf-fp8", config=tmp_path / "config.json")
    got = dict(LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).named_parameters())
    expected = decoded(model)
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        quantized = "_proj" in name
        assert torch.equal(got[name], weight if quantized else weight.bfloat16().float()), name


@pytest.mark.parametrize("granularity", ["block", "row", "tensor"])
def test_the_operation_of_transformers_decodes_to_our_weights(granularity: str, tmp_path: Path) -> None:
    """The same arithmetic without loading a model."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    model = saved(tmp_path / "run", RECIPES["fp8"].replace(granularity=granularity), rows=128, last=False)
    weights, _, config = export(tmp_path / "run", tmp_path / "out", format="hf-fp8")
    got = load_file(weights)
    assert got["0.weight"].dtype == torch.float8_e4m3fn
    operation = fp8.Fp8Dequantize(None)
    weight = operation._dequantize_one(got["0.weight"], got["0.weight_scale_inv"], torch.float32)
    assert torch.equal(weight, decoded(model)["0.weight"])
    content = json.loads(config.read_text())["quantization_config"]
    assert content["weight_block_size"] == [128 if granularity == "tensor" else 1, 128]


def read_by_torch(folder: Path, shapes: dict[str, Tensor]) -> dict[str, Tensor]:
    from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader

    state = {name: torch.empty(tensor.shape) for name, tensor in shapes.items()}
    dcp.load(state, storage_reader=QuantizedHuggingFaceStorageReader(str(folder)), no_dist=True)
    return state


def test_torch_reads_our_weights_where_all_share_a_scale(tmp_path: Path) -> None:
    """Its blocks are 128 x 128 and nothing else."""
    model = saved(tmp_path / "run", RECIPES["fp8"].replace(granularity="tensor"), rows=256, last=False)
    export(tmp_path / "run", tmp_path / "out", format="hf-fp8")
    expected = {"0.weight": decoded(model)["0.weight"]}
    assert torch.equal(read_by_torch(tmp_path / "out", expected)["0.weight"], expected["0.weight"])


@pytest.mark.parametrize(
    ("granularity", "options", "sentence"),
    [
        (
            "block",
            {"columns": 200},
            r"expected columns that 128 divides for hf-fp8, got '0.weight' of shape \[96, 200\]",
        ),
        ("tensor", {}, r"expected rows and columns that 128 divides .* \[96, 256\]"),
    ],
)
def test_what_its_blocks_cannot_hold_is_refused(
    granularity: str, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    saved(tmp_path / "run", RECIPES["fp8"].replace(granularity=granularity), last=False, **options)
    with pytest.raises(ValueError, match=sentence):
        export(tmp_path / "run", tmp_path / "out", format="hf-fp8")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["hf-fp8", "compressed-tensors"])
@pytest.mark.parametrize("granularity", ["block", "row", "tensor"])
def test_an_export_is_a_starting_point_bit_for_bit(granularity: str, format: str, tmp_path: Path) -> None:
    """Codes and scales come back as they were; values rounded again would move."""
    recipe = RECIPES["fp8"].replace(granularity=granularity)
    model = saved(tmp_path / "run", recipe, rows=128, last=False)
    export(tmp_path / "run", tmp_path / "out", format=format)
    again = nn.Sequential(nn.Linear(256, 128), nn.BatchNorm1d(128))
    quantize_weights_(again, recipe)
    optimizer = ECOAdamW(again.parameters())
    assert take_over(tmp_path / "out", again, optimizer) == 0
    assert torch.equal(again[0].weight.codes, model[0].weight.codes)
    assert torch.equal(again[0].weight.scales, model[0].weight.scales)
    assert torch.equal(again[1].weight, model[1].weight.bfloat16().float())
    assert not any(bool(state["step"]) for state in optimizer.state.values())


def test_a_plain_model_of_transformers_is_a_starting_point(tmp_path: Path) -> None:
    """bf16 safetensors as `save_pretrained` writes them, rounded to nearest."""
    transformers = pytest.importorskip("transformers")
    _, config = llama("block", tmp_path)
    torch.manual_seed(5)
    plain = transformers.LlamaForCausalLM(config).bfloat16()
    plain.save_pretrained(tmp_path / "plain")
    model = transformers.LlamaForCausalLM(config)
    quantize_weights_(model, "fp8")
    take_over(tmp_path / "plain", model)
    again = transformers.LlamaForCausalLM(config)
    again.load_state_dict(plain.float().state_dict())
    quantize_weights_(again, "fp8")
    expected = decoded(again)
    for name, weight in decoded(model).items():
        assert torch.equal(weight, expected[name]), name


def test_square_blocks_become_rows_of_blocks(tmp_path: Path) -> None:
    """128 x 128, as DeepSeek writes them; the recipe's blocks hold them exactly."""
    codes = (torch.randn(256, 256, generator=torch.Generator().manual_seed(0)) * 100).to(torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 0.25], [2.0, 0.125]])
    save_file({"weight": codes, "weight_scale_inv": scales}, tmp_path / "model.safetensors")
    layer = nn.Linear(256, 256, bias=False)
    quantize_weights_(layer, "fp8")
    take_over(tmp_path, layer)
    expected = codes.float() * scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(layer.weight.decode(), expected)
    assert torch.equal(layer.weight.codes.view(torch.float8_e4m3fn).view(torch.uint8), codes.view(torch.uint8))


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ({"weight": torch.zeros(4, 128, dtype=torch.float8_e4m3fn)}, "expected scales 'weight_scale'"),
        ({"weight": torch.zeros(4, 64)}, r"expected 'weight' of shape \[4, 128\], got \[4, 64\]"),
        ({"bias": torch.zeros(4)}, "expected 'weight' among the weights to start from"),
        ({"weight": torch.zeros(4, 128, dtype=torch.int32)}, "got torch.int32"),
        ({"weight": torch.full((4, 128), float("nan"))}, "finite"),
    ],
)
def test_other_weights_are_refused(tensors: dict[str, Tensor], sentence: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    layer = nn.Linear(128, 4, bias=False)
    quantize_weights_(layer, "fp8")
    before = layer.weight.codes.clone()
    with pytest.raises(CheckpointError, match=sentence):
        take_over(tmp_path, layer)
    assert torch.equal(layer.weight.codes, before)
