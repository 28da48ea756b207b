"""Shapes of public models: their published sizes, and those of transformers' own modules."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from eco_dist import plan
from eco_dist.memory.architectures import FAMILIES
from eco_dist.memory.baselines import resolve
from eco_dist.memory.categories import Category
from eco_dist.memory.plan import mesh_for, plan_shape
from eco_dist.memory.public import find_architecture
from tests.unit.memory_shapes import SMALL, small

PUBLISHED = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "qwen3-8b": 8_190_735_360,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
}


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("experts", ["flat", "stacked", "separate"])
def test_public_models_have_their_published_size(name: str, experts: str) -> None:
    architecture = find_architecture(name, experts=experts)  # type: ignore[arg-type]
    assert architecture is not None
    assert architecture.stored(resolve("fp8")).parameters == PUBLISHED[name]


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    architecture = small(family, experts="stacked")
    sizes = {key: value for key, value in architecture.config.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(family, **sizes)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    shape = architecture.stored(resolve("fp8"))
    own = {t.name: (t.shape, t.storage.is_quantized) for t in shape.tensors}
    theirs = plan(module, "fp8")
    assert {name: tensor[0] for name, tensor in own.items()} == {
        name: tuple(parameter.shape) for name, parameter in module.named_parameters()
    }
    quantized = {t.name for t in theirs.ranks[0].tensors if t.category is Category.CODES}
    assert {name for name, tensor in own.items() if tensor[1]} == quantized
    whole = dataclasses.replace(shape, folds_layers=False)
    report = plan_shape(whole, engine="single", mesh=mesh_for("single", 1))
    assert report.ranks[0].by_category() == theirs.ranks[0].by_category()


def test_a_config_on_disk(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    architecture = find_architecture(str(tmp_path))
    assert architecture is not None
    assert architecture.stored(resolve("fp8")) == dataclasses.replace(
        small("llama").stored(resolve("fp8")), name=architecture.name
    )


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{", "expected JSON"),
        ("{}", "expected a Hugging Face configuration with 'model_type'"),
        ('{"model_type": "bert"}', "expected model_type to be one of llama, .* got 'bert'"),
        ('{"model_type": "llama"}', "expected 'num_hidden_layers' in the configuration"),
    ],
)
def test_a_config_that_is_none(tmp_path: Path, content: str, sentence: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=sentence):
        find_architecture(str(file))
