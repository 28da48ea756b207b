"""The quantized weight as a tensor: copies, files, casts, initialization, and operations that must raise."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from eco_dist.numerics import encode
from eco_dist.recipe import RECIPES, Recipe
from eco_dist.weights import QuantizedWeight, quantize_weights_

QUANTIZED_RECIPES = [name for name, recipe in RECIPES.items() if recipe.quantizes]
recipes = pytest.mark.parametrize("recipe", QUANTIZED_RECIPES)


def random_values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameter(*shape: int, recipe: str = "fp8", seed: int = 0) -> nn.Parameter:
    values = random_values(*(shape or (6, 130)), seed=seed)
    return nn.Parameter(QuantizedWeight.from_values(values, Recipe.from_name(recipe), tensor_id=17))


def model_of(recipe: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(130, 9), nn.LayerNorm(9), nn.Linear(9, 5, bias=False))
    quantize_weights_(model, recipe)
    return model


def snapshot(weight: QuantizedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    return weight.codes.clone(), weight.scales.clone()


def assert_same_weight(one: torch.Tensor, two: torch.Tensor) -> None:
    assert isinstance(one, QuantizedWeight)
    assert isinstance(two, QuantizedWeight)
    assert torch.equal(one.codes, two.codes)
    assert torch.equal(one.scales, two.scales)
    assert (one.recipe, one.tensor_id, one.full_rows) == (two.recipe, two.tensor_id, two.full_rows)
    assert one.shape == two.shape


@recipes
def test_it_looks_like_an_fp32_parameter(recipe: str) -> None:
    weight = parameter(recipe=recipe)
    assert isinstance(weight, nn.Parameter)
    assert (weight.dtype, weight.shape, weight.requires_grad, weight.is_leaf) == (torch.float32, (6, 130), True, True)
    assert weight.is_contiguous()
    assert f"QuantizedWeight(shape=(6, 130), recipe={recipe}" in repr(weight)


@recipes
def test_deepcopy_has_its_own_storage(recipe: str) -> None:
    model = model_of(recipe)
    twin = copy.deepcopy(model)
    for one, two in zip(model.parameters(), twin.parameters(), strict=True):
        assert isinstance(two, nn.Parameter)
        if isinstance(one, QuantizedWeight):
            assert_same_weight(one, two)
            assert one.data_ptr() != two.data_ptr()
    twin[0].weight.codes.fill_(1)
    assert not torch.equal(model[0].weight.codes, twin[0].weight.codes)


def test_deepcopy_keeps_ties() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    quantize_weights_(model, "fp8")
    twin = copy.deepcopy(model)
    assert twin[0].weight is twin[1].weight


@recipes
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_files_round_trip_with_weights_only(recipe: str, assign: bool) -> None:
    """torch.save, torch.load(weights_only=True), load_state_dict: the same codes and scales."""
    model, other = model_of(recipe), model_of(recipe, seed=1)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True), assign=assign)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert isinstance(two, nn.Parameter)
        if isinstance(one, QuantizedWeight):
            assert_same_weight(one, two)
        else:
            assert torch.equal(one, two)


def test_a_file_holds_no_high_precision_copy() -> None:
    weight = parameter(64, 1024)
    buffer = io.BytesIO()
    torch.save({"weight": weight}, buffer)
    assert buffer.getbuffer().nbytes < 1.2 * 64 * 1024


def test_pickle_keeps_a_parameter_a_parameter() -> None:
    weight = parameter()
    weight.requires_grad_(False)
    loaded = pickle.loads(pickle.dumps(weight))
    assert isinstance(loaded, nn.Parameter)
    assert not loaded.requires_grad
    assert_same_weight(weight, loaded)
    assert not isinstance(pickle.loads(pickle.dumps(weight.detach())), nn.Parameter)


@recipes
def test_loading_high_precision_values_rounds_them(recipe: str) -> None:
    """A pretrained fp32 checkpoint loads into a converted model as if it had been converted."""
    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(130, 9), nn.LayerNorm(9), nn.Linear(9, 5, bias=False))
    model = model_of(recipe)
    model.load_state_dict(plain.state_dict())
    quantize_weights_(plain, recipe)
    assert torch.equal(model[0].weight.codes, plain[0].weight.codes)
    assert torch.equal(model[0].weight.scales, plain[0].weight.scales)


def test_loading_bad_values_is_refused_and_changes_nothing() -> None:
    weight = parameter()
    before = snapshot(weight)
    bad = torch.zeros(6, 130)
    bad[0, 0] = torch.inf
    with torch.no_grad(), pytest.raises(ValueError, match="expected finite values to quantize, got 1 NaN or infinite"):
        weight.copy_(bad)
    assert all(torch.equal(one, two) for one, two in zip(before, snapshot(weight), strict=True))


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
def test_casts_of_a_converted_model_are_refused(cast: str) -> None:
    model = model_of("fp8")
    before = snapshot(model[0].weight)
    with pytest.raises(NotImplementedError, match=r"cast before quantize_weights_, or use weight.dequantize\(dtype\)"):
        getattr(model, cast)()
    assert all(torch.equal(one, two) for one, two in zip(before, snapshot(model[0].weight), strict=True))


def test_moves_that_change_no_dtype_are_fine() -> None:
    model = model_of("fp8")
    before = snapshot(model[0].weight)
    model.float().to("cpu").to(torch.float32).to("cpu", torch.float32)
    assert all(torch.equal(one, two) for one, two in zip(before, snapshot(model[0].weight), strict=True))
    assert model.to("meta")[0].weight.codes.is_meta


UNKNOWN = {
    "add": lambda w: w + 1,
    "multiply": lambda w: w * w,
    "sum": lambda w: w.sum(),
    "mean": lambda w: w.mean(),
    "norm": lambda w: w.norm(),
    "abs": lambda w: w.abs(),
    "cat": lambda w: torch.cat([w, w]),
    "stack": lambda w: torch.stack([w, w]),
    "isfinite": lambda w: torch.isfinite(w),
    "equal elements": lambda w: w == w,
    "unsqueeze": lambda w: w.unsqueeze(0),
    "softmax": lambda w: torch.softmax(w, -1),
    "columns": lambda w: w.chunk(2, 1),
    "reshape": lambda w: w.reshape(130, 6),
    "vector": lambda w: nn.utils.parameters_to_vector([w]),
}


@pytest.mark.parametrize("operation", UNKNOWN)
def test_unknown_operations_raise_instead_of_dequantizing(operation: str) -> None:
    with pytest.raises(NotImplementedError, match="quantized weight"):
        UNKNOWN[operation](parameter())


IN_PLACE = {
    "mul_": lambda w: w.mul_(0.5),
    "add_": lambda w: w.add_(1.0),
    "clamp_": lambda w: w.clamp_(-1, 1),
    "lerp_": lambda w: w.lerp_(torch.zeros(6, 130), 0.1),
    "addcdiv_": lambda w: w.addcdiv_(torch.ones(6, 130), torch.ones(6, 130)),
    "foreach": lambda w: torch._foreach_add_([w], 1.0),
    "foreach_mul": lambda w: torch._foreach_mul_([w], 0.5),
    "index_fill": lambda w: w.index_fill_(0, torch.tensor([0]), 0.0),
}


@pytest.mark.parametrize("operation", IN_PLACE)
def test_arithmetic_in_place_raises_and_changes_nothing(operation: str) -> None:
    """On the parameter and on its `.data`, which optimizers of old wrote to."""
    weight = parameter()
    before = snapshot(weight)
    for target in (weight, weight.data):
        with torch.no_grad(), pytest.raises(NotImplementedError, match="would lose the rounding error: step quantized"):
            IN_PLACE[operation](target)
    assert all(torch.equal(one, two) for one, two in zip(before, snapshot(weight), strict=True))


@pytest.mark.parametrize("value", [torch.zeros(6, 130), parameter(seed=3)], ids=["plain", "quantized"])
def test_assigning_data_takes_effect_or_raises(value: torch.Tensor) -> None:
    """`weight.data = x` is what EMA and averaging code writes; it must not be dropped without a word."""
    weight = parameter()
    try:
        weight.data = value.detach()
    except (NotImplementedError, RuntimeError, TypeError):
        return
    expected = value.decode() if isinstance(value, QuantizedWeight) else value
    assert torch.equal(weight.decode(), expected)


@recipes
@pytest.mark.parametrize(
    "init",
    [
        lambda w: nn.init.normal_(w, std=0.02),
        lambda w: nn.init.uniform_(w, -0.1, 0.1),
        lambda w: nn.init.kaiming_uniform_(w, a=5**0.5),
        lambda w: nn.init.kaiming_normal_(w),
        lambda w: nn.init.xavier_uniform_(w),
        lambda w: nn.init.xavier_normal_(w),
        lambda w: nn.init.zeros_(w),
        lambda w: nn.init.constant_(w, 0.3),
    ],
    ids=["normal", "uniform", "kaiming_uniform", "kaiming_normal", "xavier_uniform", "xavier_normal", "zeros", "const"],
)
def test_init_functions_store_the_rounded_draw(recipe: str, init) -> None:
    """The same random numbers as for an ordinary weight, rounded to nearest."""
    weight, plain = parameter(recipe=recipe), nn.Parameter(torch.empty(6, 130))
    torch.manual_seed(4)
    init(weight)
    torch.manual_seed(4)
    init(plain)
    codes, scales = encode(plain.detach(), weight.recipe.format, weight.recipe.granularity)
    assert torch.equal(weight.codes, codes)
    assert torch.equal(weight.scales, scales)


def test_trunc_normal_stays_within_its_bounds() -> None:
    """It draws again where a value is out of bounds; two sigma with its own standard deviation of 0.88 sigma."""
    weight = parameter(200, 256)
    torch.manual_seed(0)
    nn.init.trunc_normal_(weight, std=0.02, a=-0.04, b=0.04)
    values = weight.decode()
    assert float(values.abs().max()) <= 0.04 * (1 + 1e-6)
    assert float(values.std()) == pytest.approx(0.88 * 0.02, rel=0.02)
    assert abs(float(values.mean())) < 5 * 0.02 / values.numel() ** 0.5


def test_from_values_refuses_what_cannot_be_stored() -> None:
    with pytest.raises(ValueError, match="expected a weight with at least 2 dimensions, got shape"):
        QuantizedWeight.from_values(torch.ones(5), Recipe())
    with pytest.raises(ValueError, match="expected a recipe with a format, got 'fp32-master'"):
        QuantizedWeight.from_values(torch.ones(5, 5), Recipe.from_name("fp32-master"))
    with pytest.raises(TypeError, match=r"got torch.float64; convert it with .float\(\)"):
        QuantizedWeight.from_values(torch.ones(5, 5, dtype=torch.float64), Recipe())


@recipes
def test_rows_can_be_cut_and_know_the_whole(recipe: str) -> None:
    weight = parameter(7, 130, recipe=recipe).detach()
    parts = torch.split(weight, 3)
    assert [part.shape[0] for part in parts] == [3, 3, 1]
    assert all(part.is_shard and part.full_rows == 7 for part in parts)
    assert torch.equal(torch.cat([part.decode() for part in parts]), weight.decode())


@recipes
def test_equality_is_of_codes_and_scales(recipe: str) -> None:
    weight = parameter(recipe=recipe)
    assert torch.equal(weight, copy.deepcopy(weight))
    assert not torch.equal(weight, parameter(recipe=recipe, seed=1))


@recipes
def test_dequantize_passes_the_gradient_in_fp32(recipe: str) -> None:
    weight = parameter(recipe=recipe)
    values = weight.dequantize(torch.bfloat16)
    assert type(values) is torch.Tensor
    assert torch.equal(values, weight.decode().bfloat16())
    (values * 3).sum().backward()
    assert weight.grad.dtype == torch.float32
    assert bool((weight.grad == 3).all())
