"""`quantize_weights_`: which weights become codes, what is kept, and refusals that change nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from eco_dist.numerics import Format, Granularity, decode, encode
from eco_dist.recipe import RECIPES, Recipe
from eco_dist.weights import QuantizedWeight, quantize_weights_

QUANTIZED_RECIPES = [name for name, recipe in RECIPES.items() if recipe.quantizes]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.router = nn.Linear(width, 4, bias=False)
        self.gate = nn.Linear(width, 4, bias=False)
        self.gate_proj = nn.Linear(width, width, bias=False)


class Model(nn.Module):
    """The names that real language models use."""

    def __init__(self, width: int = 12, tied: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, width)  # skipped for its class, whatever its name
        self.embed_projection = nn.Linear(width, width, bias=False)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.final_norm = nn.Parameter(torch.ones(2, width))
        self.experts = nn.Parameter(torch.randn(3, width, 5))
        self.lm_head = nn.Linear(width, 20, bias=False)
        self.register_buffer("table", torch.zeros(3, 3))
        if tied:
            self.lm_head.weight = self.tokens.weight


def build(**options: object) -> Model:
    torch.manual_seed(0)
    return Model(**options)


def quantized_names(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if isinstance(parameter, QuantizedWeight)}


BLOCK_MATRICES = {f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down", "gate_proj")}


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_matrices_of_blocks_become_codes_and_the_rest_stays(recipe: str) -> None:
    """Embeddings by class, heads, norms, routers by name, vectors by shape; `gate_proj` is not a router."""
    model = build()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    report = quantize_weights_(model, recipe)
    assert quantized_names(model) == BLOCK_MATRICES | {"experts"}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, nn.Parameter)
        assert parameter.dtype == torch.float32
        if isinstance(parameter, QuantizedWeight):
            chosen = Recipe.from_name(recipe)
            codes, scales = encode(before[name], chosen.format, chosen.granularity)
            assert torch.equal(parameter.codes, codes)
            assert torch.equal(parameter.scales, scales)
        else:
            assert torch.equal(parameter, before[name])
    reasons = {name: entry.reason for entry in report.conversions for name in entry.names}
    assert reasons["tokens.weight"] == "embedding"
    assert reasons["embed_projection.weight"] == "matches *embed*"
    assert reasons["lm_head.weight"] == "matches *head*"
    assert reasons["layers.1.router.weight"] == "matches *router*"
    assert reasons["layers.1.gate.weight"] == "matches *.gate.weight"
    assert reasons["final_norm"] == "matches *norm*"
    assert reasons["layers.0.up.bias"] == "vector"
    assert reasons["layers.0.up.weight"] == "matrix"


def test_also_skip_adds_and_skip_replaces() -> None:
    model = build()
    quantize_weights_(model, "fp8", also_skip=["layers.1.*", "experts"])
    assert quantized_names(model) == {name for name in BLOCK_MATRICES if name.startswith("layers.0")}
    model = build()
    quantize_weights_(model, "fp8", skip=["*.up.*"])
    assert "lm_head.weight" in quantized_names(model)
    assert "layers.0.router.weight" in quantized_names(model)
    assert "layers.0.up.weight" not in quantized_names(model)
    assert "tokens.weight" not in quantized_names(model), "an embedding is skipped for its class"


def test_output_embeddings_are_found_by_method() -> None:
    model = build()
    model.get_output_embeddings = lambda: model.layers[1].down
    report = quantize_weights_(model, "fp8")
    assert "layers.1.down.weight" not in quantized_names(model)
    assert {entry.reason for entry in report.conversions if "layers.1.down.weight" in entry.names} == {"output head"}


def test_tied_weights_stay_one_object() -> None:
    """One entry with both names, kept or converted together."""
    model = build(tied=True)
    report = quantize_weights_(model, "fp8", plain="bf16")
    assert model.lm_head.weight is model.tokens.weight
    assert isinstance(model.lm_head.weight, QuantizedWeight)
    assert ("tokens.weight", "lm_head.weight") in [entry.names for entry in report.conversions]
    model = build()
    model.layers[0].gate_proj.weight = model.layers[1].gate_proj.weight
    quantize_weights_(model, "fp8")
    assert model.layers[0].gate_proj.weight is model.layers[1].gate_proj.weight
    assert isinstance(model.layers[0].gate_proj.weight, QuantizedWeight)


def test_a_tie_is_skipped_if_any_of_its_names_is() -> None:
    model = build()
    model.layers[0].gate_proj.weight = model.embed_projection.weight
    quantize_weights_(model, "fp8")
    assert not isinstance(model.layers[0].gate_proj.weight, QuantizedWeight)
    assert model.layers[0].gate_proj.weight is model.embed_projection.weight


@pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)
def test_meta_models_stay_on_meta_with_the_same_layout(recipe: str) -> None:
    real, meta = build(), build().to("meta")
    quantize_weights_(real, recipe)
    quantize_weights_(meta, recipe)
    for (name, one), two in zip(real.named_parameters(), meta.parameters(), strict=True):
        assert two.is_meta, name
        assert isinstance(one, QuantizedWeight) == isinstance(two, QuantizedWeight)
        if isinstance(one, QuantizedWeight):
            assert two.codes.is_meta
            assert (one.codes.shape, one.codes.dtype) == (two.codes.shape, two.codes.dtype)
            assert one.scales.shape == two.scales.shape
            assert one.tensor_id == two.tensor_id


def test_meta_models_materialize_and_initialize() -> None:
    """to_empty, then each layer's own reset_parameters: the usual path for models that fit no single device."""
    model = build().to("meta")
    quantize_weights_(model, "fp8")
    model.to_empty(device="cpu")
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    weight = model.layers[0].up.weight
    assert isinstance(weight, QuantizedWeight)
    assert 0 < float(weight.decode().abs().max()) <= 12**-0.5 * (1 + 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_keeps_no_half_precision_parameter(dtype: torch.dtype) -> None:
    """Codes come from the half-precision values; norms and embeddings become fp32 with equal values."""
    model = build().to(dtype)
    before = {name: parameter.detach().float() for name, parameter in model.named_parameters()}
    quantize_weights_(model, "fp8")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        if isinstance(parameter, QuantizedWeight):
            codes, scales = encode(before[name], Format.E4M3, Granularity.BLOCK)
            assert torch.equal(
                parameter.decode(), decode(codes, scales, Format.E4M3, Granularity.BLOCK, codes.shape[-1])
            )
        else:
            assert torch.equal(parameter, before[name])


def test_plain_bf16_stores_skipped_matrices_as_bf16_codes() -> None:
    model = build()
    report = quantize_weights_(model, "fp8", plain="bf16")
    assert model.lm_head.weight.recipe == Recipe.from_name("bf16")
    assert model.tokens.weight.codes.dtype == torch.bfloat16
    assert model.layers[0].up.weight.recipe == Recipe.from_name("fp8")
    assert not isinstance(model.layers[0].norm1.weight, QuantizedWeight)
    assert report.coverage > 0.9


def test_frozen_parameters_stay_frozen_and_buffers_stay() -> None:
    model = build()
    model.layers[0].up.weight.requires_grad_(False)
    model.layers[0].norm1.bias.requires_grad_(False)
    model.bfloat16()
    table = model.table
    quantize_weights_(model, "fp8")
    assert not model.layers[0].up.weight.requires_grad
    assert not model.layers[0].norm1.bias.requires_grad
    assert model.layers[1].up.weight.requires_grad
    assert model.table is table


def test_converting_again_changes_nothing() -> None:
    model = build()
    quantize_weights_(model, "fp8")
    weights = {name: id(parameter) for name, parameter in model.named_parameters()}
    report = quantize_weights_(model, "int4")
    assert weights == {name: id(parameter) for name, parameter in model.named_parameters()}
    assert {e.reason for e in report.conversions if e.names[0] in BLOCK_MATRICES} == {"is quantized already"}


def test_fp32_master_converts_nothing() -> None:
    model = build()
    report = quantize_weights_(model, "fp32-master")
    assert quantized_names(model) == set()
    assert {entry.reason for entry in report.conversions} == {"the recipe keeps fp32 weights"}
    assert report.coverage == 0


def spoil(model: Model, how: str) -> None:
    weight = model.layers[1].down.weight
    if how == "float64":
        model.layers[1].down.weight = nn.Parameter(weight.double())
    elif how == "int8":
        model.layers[1].down.weight = nn.Parameter(torch.zeros(weight.shape, dtype=torch.int8), requires_grad=False)
    else:
        weight.data[3, 4] = float(how)


@pytest.mark.parametrize(
    ("how", "error", "sentence"),
    [
        ("float64", TypeError, "to be float32, bfloat16 or float16, got torch.float64; convert it first, or keep it"),
        ("int8", TypeError, "to be float32, bfloat16 or float16, got torch.int8"),
        ("nan", ValueError, "to be finite, got NaN or infinity; repair the weights"),
        ("inf", ValueError, "to be finite, got NaN or infinity; repair the weights"),
    ],
)
def test_a_bad_weight_is_refused_by_name_and_nothing_is_changed(how: str, error: type, sentence: str) -> None:
    """The bad weight is the last one converted: all before it must still be what they were."""
    model = build().bfloat16() if how == "nan" else build()
    spoil(model, how)
    before = {name: (id(p), p.dtype, p.detach().clone()) for name, p in model.named_parameters()}
    with pytest.raises(error, match=r"layers\.1\.down\.weight") as caught:
        quantize_weights_(model, "fp8")
    assert sentence in str(caught.value)
    for name, parameter in model.named_parameters():
        identity, dtype, values = before[name]
        assert id(parameter) == identity
        assert parameter.dtype == dtype
        assert torch.equal(parameter.nan_to_num(), values.nan_to_num())


def test_a_bad_weight_that_is_skipped_is_no_error() -> None:
    model = build()
    spoil(model, "float64")
    quantize_weights_(model, "fp8", also_skip=["layers.1.down.weight"])
    assert model.layers[1].down.weight.dtype == torch.float64


@pytest.mark.parametrize("plain", ["fp16", "", None])
def test_other_plain_formats_are_refused(plain: object) -> None:
    with pytest.raises(ValueError, match="expected plain to be 'fp32' or 'bf16', got"):
        quantize_weights_(build(), "fp8", plain=plain)


def test_the_report_is_a_table_with_shares_and_reasons() -> None:
    """Layers that differ only in their number share a line; coverage is by elements."""
    model = build()
    report = quantize_weights_(model, "fp8")
    text = str(report)
    lines = {line.split()[1]: line for line in text.splitlines() if line.startswith("│")}
    assert "layers.*.up.weight" in lines
    for part in ("24 x 12", "e4m3, scale per block", "matrix", " 2 ", "576"):
        assert part in lines["layers.*.up.weight"]
    for part in ("20 x 12", "fp32", "embedding"):
        assert part in lines["tokens.weight"]
    total = sum(parameter.numel() for parameter in model.parameters())
    quantized = sum(p.numel() for p in model.parameters() if isinstance(p, QuantizedWeight))
    assert report.coverage == quantized / total
    assert f"recipe fp8: {quantized / total:.1%} of the parameters are quantized" in text
    assert sum(entry.parameters for entry in report.conversions) == total


def test_streams_are_named_by_the_parameter_not_by_its_place() -> None:
    """Another model with the same names draws the same bits; two weights of a model draw different ones."""
    one, two = build(), build(width=20)
    quantize_weights_(one, "fp8")
    quantize_weights_(two, "fp8", also_skip=["layers.0.up.*"])
    ids = [parameter.tensor_id for parameter in one.parameters() if isinstance(parameter, QuantizedWeight)]
    assert len(set(ids)) == len(ids)
    assert all(0 <= number < 2**28 for number in ids)
    assert one.layers[1].down.weight.tensor_id == two.layers[1].down.weight.tensor_id
