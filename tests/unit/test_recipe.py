"""Recipes: the named ones, their bytes, and refusals that say what to do."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest

from eco_dist.numerics import Format, Granularity, MomentFormat, Rounding
from eco_dist.recipe import RECIPES, Compensation, Injection, Recipe, ResidualFormat, resolve_recipe

BLOCK = 4 / 128
"""Bytes per parameter of one fp32 scale per block of 128."""

BYTES = {
    # codes + moments + what compensation keeps + scales
    "fp8": 1 + 8 + BLOCK,
    "fp8-bf16": 1 + 4 + BLOCK,
    "fp8-8bit": 1 + 2 + 3 * BLOCK,
    "fp8-residual": 1 + 8 + 1 + BLOCK,
    "fp8-residual-8bit": 1 + 2 + 1 + 3 * BLOCK,
    "paper": 1 + 8,
    "int4": 0.5 + 8,
    "bf16": 2 + 8,
    "fp32-master": 4 + 8,
    "fp8-master": 1 + 8 + 4 + BLOCK,
    "fp8-naive": 1 + 8 + BLOCK,
}


def test_these_recipes_have_names() -> None:
    assert set(RECIPES) == set(BYTES)


@pytest.mark.parametrize("name", BYTES)
def test_bytes_per_parameter(name: str) -> None:
    """Exact, in a wide matrix; scales of rows and of whole tensors do not count."""
    assert Recipe.from_name(name).bytes_per_parameter == BYTES[name]


@pytest.mark.parametrize(
    ("changes", "bytes_"),
    [
        ({"moments": "fp8"}, 3 + 3 * BLOCK),
        ({"format": "int8"}, 9 + BLOCK),
        ({"format": "e5m2", "granularity": "row"}, 9),
        ({"format": "int4"}, 8.5 + BLOCK),
        ({"compensation": "residual", "residual": "fp32"}, 13 + BLOCK),
        ({"compensation": "master", "moments": "bf16"}, 9 + BLOCK),
    ],
)
def test_bytes_of_changed_recipes(changes: dict, bytes_: float) -> None:
    assert Recipe().replace(**changes).bytes_per_parameter == bytes_


def test_what_the_names_mean() -> None:
    """The default is E4M3, blocks, stochastic, injection auto; `paper` differs in rows and injection alone."""
    fp8 = Recipe.from_name("fp8")
    assert fp8 == Recipe()
    assert (fp8.format, fp8.granularity, fp8.rounding) == (Format.E4M3, Granularity.BLOCK, Rounding.STOCHASTIC)
    assert (fp8.compensation, fp8.injection, fp8.moments) == (
        Compensation.MOMENTUM,
        Injection.AUTO,
        MomentFormat.FP32,
    )
    assert Recipe.from_name("paper") == fp8.replace(granularity="row", injection="paper")
    assert Recipe.from_name("fp8-bf16") == fp8.replace(moments="bf16")
    assert Recipe.from_name("fp8-8bit") == fp8.replace(moments="fp8")
    assert Recipe.from_name("fp8-residual") == fp8.replace(compensation="residual", rounding="nearest")
    assert Recipe.from_name("fp8-residual").residual is ResidualFormat.INT8
    assert Recipe.from_name("int4") == fp8.replace(format="int4", granularity="tensor")
    assert Recipe.from_name("bf16") == fp8.replace(format="bf16", granularity=None)
    assert Recipe.from_name("fp8-naive") == fp8.replace(compensation="none")
    assert Recipe.from_name("fp8-master") == fp8.replace(compensation="master", rounding="nearest")
    assert [name for name in RECIPES if not Recipe.from_name(name).quantizes] == ["fp32-master"]


@pytest.mark.parametrize("name", RECIPES)
def test_names_round_trip(name: str) -> None:
    """Through the object, plain strings, a copy and pickle; a recipe is a hashable value."""
    recipe = Recipe.from_name(name)
    assert recipe.name == name
    assert Recipe(**recipe.to_dict()) == recipe
    assert copy.deepcopy(recipe) == recipe
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert hash(recipe) == hash(Recipe(**recipe.to_dict()))
    assert resolve_recipe(name) is resolve_recipe(recipe)


def test_a_recipe_without_a_name_is_named_by_its_fields() -> None:
    assert Recipe(format=Format.INT8).name.startswith("format=int8, granularity=block, rounding=stochastic")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("fp-8", "did you mean 'fp8'?"),
        ("fp8_bf16", "did you mean 'fp8-bf16'?"),
        ("fp32master", "did you mean 'fp32-master'?"),
        ("quantum", "choose one of fp8, fp8-bf16, "),
    ],
)
def test_an_unknown_name_suggests_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match="expected the name of a recipe") as caught:
        Recipe.from_name(name)
    assert f"got '{name}'; {hint}" in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"format": "bf16"}, "format 'bf16' expects granularity None (it stores no scales), got 'block'"),
        (
            {"format": "bf16", "granularity": "row"},
            "format 'bf16' expects granularity None (it stores no scales), got 'row'",
        ),
        ({"granularity": None}, "format 'e4m3' expects granularity one of row, block, tensor, got None"),
        (
            {"format": "int4", "granularity": None},
            "format 'int4' expects granularity one of row, block, tensor, got None",
        ),
        ({"format": None, "granularity": None}, "fp32 weights have no error to compensate"),
        (
            {"format": None, "granularity": None, "compensation": "residual"},
            "expected compensation 'master' for a recipe without a format, got 'residual'",
        ),
        ({"format": None, "compensation": "master"}, "format None stores no scales: expected granularity None"),
        ({"format": "e4m4"}, "expected recipe.format to be one of 'e4m3', 'e5m2', 'int8', 'int4', 'bf16', got 'e4m4'"),
        ({"granularity": "column"}, "expected recipe.granularity to be one of 'row', 'block', 'tensor', got 'column'"),
        ({"rounding": "up"}, "expected recipe.rounding to be one of 'nearest', 'stochastic', got 'up'"),
        ({"rounding": None}, "expected recipe.rounding to be one of 'nearest', 'stochastic', got None"),
        ({"moments": "fp4"}, "expected recipe.moments to be one of 'fp32', 'bf16', 'fp8', 'dynamic8', got 'fp4'"),
        ({"injection": "future"}, "expected recipe.injection to be one of 'paper', 'auto', 'displacement'"),
        ({"compensation": "eco"}, "expected recipe.compensation to be one of 'momentum', 'residual', 'none', 'master'"),
        ({"residual": "int4"}, "expected recipe.residual to be one of 'fp32', 'int8', got 'int4'"),
    ],
)
def test_impossible_recipes_are_refused_in_one_sentence(fields: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match="expect") as caught:
        Recipe(**fields)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_replace_takes_strings_and_enums_and_leaves_the_original() -> None:
    recipe = Recipe()
    assert recipe.replace(moments="bf16") == recipe.replace(moments=MomentFormat.BF16)
    assert recipe == Recipe()
    assert recipe.replace() == recipe
    assert recipe.replace(format="bf16", granularity=None).format is Format.BF16


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"moment": "bf16"}, "expected a field of a recipe, got 'moment'; did you mean 'moments'?"),
        ({"zzz": 1}, "got 'zzz'; choose one of format, granularity"),
        ({"format": "bf16"}, "expects granularity None"),
        ({"format": "fp9"}, "expected recipe.format to be one of"),
    ],
)
def test_replace_refuses_what_a_recipe_refuses(change: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match="expect") as caught:
        Recipe().replace(**change)
    assert sentence in str(caught.value)


def test_recipes_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().format = Format.INT8
    with pytest.raises(TypeError):
        Recipe(Format.INT8)
