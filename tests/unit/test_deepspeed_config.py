"""The `eco` section of the DeepSpeed JSON, and what this engine relies on inside DeepSpeed."""

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed")

from eco_dist.engines.deepspeed import contract
from eco_dist.engines.deepspeed.config import DEEPSPEED_SKIP, read_config
from eco_dist.engines.flat.units import Units, padded_group_length, runs_of_flat, unit_columns
from eco_dist.recipe import Recipe


def test_defaults_and_auto() -> None:
    for section in ({}, {"eco": {"recipe": "auto", "skip": "auto", "seed": "auto", "working_copy": "auto"}}):
        config = read_config(section)
        assert config.resolved() == Recipe.from_name("fp8")
        assert config.skip == list(DEEPSPEED_SKIP)
        assert (config.also_skip, config.seed, config.working_copy) == ([], None, "replica")


def test_overrides_change_the_recipe() -> None:
    config = read_config({"eco": {"recipe": "fp8-8bit", "overrides": {"rounding": "nearest"}}})
    assert config.resolved() == Recipe.from_name("fp8-8bit").replace(rounding="nearest")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"recpe": "fp8"}, "did you mean 'recipe'"),
        ({"recipe": "fp9"}, "did you mean 'fp8'"),
        ({"overrides": {"round": "nearest"}}, "did you mean 'rounding'"),
        ({"overrides": {"rounding": "up"}}, "'nearest', 'stochastic'"),
        ({"working_copy": "none"}, "working_copy"),
        ({"seed": "one"}, "seed"),
        ({"fallback": 2}, "fallback"),
        ("fp8", "expected 'eco' in the DeepSpeed configuration to be a dictionary"),
    ],
)
def test_what_cannot_be_is_one_sentence(section: Any, message: str) -> None:
    with pytest.raises(ValueError, match="got") as error:
        read_config({"eco": section})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_the_contract_holds() -> None:
    assert contract.broken_promises() == []


def test_a_broken_contract_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.step"
    monkeypatch.setattr(contract, "SIGNATURES", {step: ("self", "loss"), f"{step}s": ("self",)})
    monkeypatch.setattr(contract, "MENTIONS", {step: ("self._make_coffee()",)})
    with pytest.raises(ImportError) as error:
        contract.require_contract()
    text = str(error.value)
    assert f"{step} has the parameters self, closure, expected self, loss" in text
    assert f"{step}s does not exist" in text
    assert "no longer contains `self._make_coffee()`" in text
    assert "deepspeed==0.19.8" in text
    assert "'fallback': true in the 'eco' section" in text
    assert "or on FSDP2" in text


@pytest.mark.parametrize(
    ("shape", "changes", "columns"),
    [
        ((10, 384), {}, 128),
        ((10, 384), {"granularity": "row"}, 384),
        ((10, 384), {"granularity": "tensor"}, 128),
        ((3, 7, 256), {}, 128),
        ((10, 300), {}, 300),
        ((10, 384), {"format": "bf16", "granularity": None}, 128),
    ],
)
def test_a_unit_is_a_block_where_rows_are_blocks_and_a_row_otherwise(
    shape: tuple[int, ...], changes: dict[str, Any], columns: int
) -> None:
    assert unit_columns(shape, Recipe().replace(**changes)) == columns


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("units", [1, 5, 30])
def test_runs_cover_a_weight_once_and_in_order(units: int, ranks: int) -> None:
    for offset in (0, 3, 11):
        per_rank = padded_group_length([(offset + units) * 37], 37, ranks) // ranks // 37
        runs = runs_of_flat(offset, units, per_rank, ranks)
        position = 0
        for rank, run in enumerate(runs):
            assert run.rank == rank
            assert 0 <= run.row <= run.row + run.units <= per_rank
            if run.units:
                assert run.first == position
                assert rank * per_rank + run.row == offset + position
            position += run.units
        assert position == units


@pytest.mark.parametrize("recipe", ["fp8", "paper", "int4", "bf16"])
@pytest.mark.parametrize("shape", [(6, 256), (5, 37), (2, 3, 128)])
def test_units_of_a_weight_are_its_codes(shape: tuple[int, ...], recipe: str) -> None:
    from eco_dist.weights import QuantizedWeight

    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    units = Units.of(shape, Recipe.from_name(recipe))
    codes, scales = units.encode(values)
    weight = QuantizedWeight.from_values(values, Recipe.from_name(recipe))
    assert torch.equal(codes.flatten(), weight.codes.flatten())
    assert torch.equal(scales.flatten(), weight.scales.flatten())
    assert codes.shape == units.codes_shape(units.count(values.numel()))
    decoded = torch.empty(codes.shape[0], units.columns)
    units.decode_into(decoded, codes, scales)
    assert torch.equal(decoded.view(shape), weight.decode())
