"""Configuration: YAML, overrides, and the one sentence a mistake gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from eco_dist.models import model_config
from eco_dist.recipe import RECIPES
from eco_dist.training.build import build_recipe
from eco_dist.training.config import RecipeConfig, TrainConfig
from eco_dist.training.overrides import load_config, to_plain

CONFIGS = Path(__file__).parents[2] / "configs"


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "run: {steps: 7, seed: 3}\nrecipe: fp8-8bit\n")
    config = load_config(file, ["run.steps=9", "optimizer.lr=1e-3", "optimizer.clip=null", "data.suffixes=[.c, .h]"])
    assert (config.run.steps, config.run.seed, config.run.accumulate) == (9, 3, 1)
    assert config.recipe.name == "fp8-8bit"
    assert config.optimizer.lr == 1e-3
    assert config.optimizer.clip is None
    assert config.data.suffixes == (".c", ".h")


def test_one_word_sections_and_an_empty_file(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, ""), ["model=small", "engine=fsdp2", "recipe=bf16", "optimizer=sgd"])
    assert (config.model.preset, config.engine.name) == ("small", "fsdp2")
    assert (config.recipe.name, config.optimizer.name) == ("bf16", "sgd")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optimizer.lrr=1", ["'optimizer.lrr'", "override", "did you mean 'optimizer.lr'"]),
        ("optimiser.lr=1", ["'optimiser.lr'", "did you mean 'optimizer.lr'"]),
        ("modle=tiny", ["'modle'", "did you mean 'model'"]),
        ("data=x", ["keys below section 'data'", "got 'x'", "override"]),
        ("run.steps", ["section.key=value", "run.steps"]),
        ("run.steps=0", ["run.steps", "got 0", "override", "greater than 0"]),
        ("run.steps=many", ["run.steps", "'many'"]),
        ("optimizer.lr=.nan", ["optimizer.lr", "nan"]),
        ("run.steps=[1", ["YAML value for run.steps"]),
        ("engine.name=zero9", ["engine.name", "'zero9'", "'single', 'fsdp2', 'fsdp1' or 'deepspeed'"]),
        ("run.accumulate=3", ["data.batch", "divisible", "run.accumulate"]),
    ],
)
def test_a_wrong_override_gives_one_sentence(override: str, parts: list[str]) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        load_config(None, [override])
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("run: {stepss: 3}", ["'run.stepss'", "run.yaml", "'run.steps'"]),
        ("running: {steps: 3}", ["'running'", "run.yaml", "'run'"]),
        ("run: {steps: -3}", ["run.steps", "-3", "run.yaml"]),
        ("- a\n- b", ["sections", "run.yaml", "list"]),
        ("run: {steps: 3", ["YAML", "run.yaml"]),
    ],
)
def test_a_wrong_file_gives_one_sentence(tmp_path: Path, text: str, parts: list[str]) -> None:
    with pytest.raises(ValueError, match="expected") as caught:
        load_config(write(tmp_path, text))
    for part in parts:
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.yaml"):
        load_config(tmp_path / "none.yaml")


def test_a_configuration_survives_its_own_yaml(tmp_path: Path) -> None:
    config = load_config(None, ["run.steps=5", "data.path=a/b", "recipe.rounding=nearest"])
    assert load_config(write(tmp_path, yaml.safe_dump(to_plain(config)))) == config


def test_sections_are_frozen() -> None:
    with pytest.raises(AttributeError):
        TrainConfig().run.steps = 5  # type: ignore[misc]


def test_a_recipe_is_a_name_with_changes() -> None:
    assert build_recipe(RecipeConfig(name="fp8")) == RECIPES["fp8"]
    assert build_recipe(RecipeConfig(name="fp8", rounding="nearest")) == RECIPES["fp8"].replace(rounding="nearest")
    assert build_recipe(RecipeConfig(name="fp8", format="bf16", granularity="none")) == RECIPES["bf16"]


@pytest.mark.parametrize("changes", [{"name": "fp9"}, {"format": "int5"}, {"format": "bf16"}])
def test_an_impossible_recipe_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expect"):
        build_recipe(RecipeConfig(**changes))


@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_shipped_configurations_load(file: Path) -> None:
    config = load_config(file)
    build_recipe(config.recipe)
    shape = model_config(config.model.preset, vocabulary=256)
    if file.stem.startswith("paper-"):
        tokens = config.run.steps * config.data.batch * config.data.seq_len
        assert 0 <= tokens - 100 * shape.block_parameters < config.data.batch * config.data.seq_len
