"""The DeepSpeed JSON of a run: what its configuration says, and what a JSON of the user adds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from eco_dist.engines.fsdp2 import default_blocks
from eco_dist.memory.layouts import ZeroOptions
from eco_dist.recipe import RECIPES, Recipe
from eco_dist.training.batch import BatchSplit
from eco_dist.training.config import TrainConfig

__all__ = ["deepspeed_json", "stored_as", "zero_options"]

LARGEST_BUCKET = 500_000_000
"""DeepSpeed's own size of the buckets that gradients are reduced in, in elements."""


def deepspeed_json(config: TrainConfig, recipe: Recipe, split: BatchSplit, model: nn.Module) -> dict[str, Any]:
    """The settings `deepspeed.initialize` is given.

    A recipe without a format is DeepSpeed's own mixed precision: torch's AdamW on its fp32 masters.

    Args:
        config: of the run; its ``engine.json`` is merged in.
        recipe: of the run.
        split: shares of the batch.
        model: plain, whole; the meta device will do. A reduce bucket takes its largest block.

    Raises:
        FileNotFoundError: there is no such ``engine.json``.
        ValueError: it says something else than the configuration, or the recipe has no optimizer under DeepSpeed.
    """
    own: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": split.micro,
        "gradient_accumulation_steps": split.accumulate,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": config.engine.stage},
        "gradient_clipping": config.optimizer.clip or 0.0,  # left out, ZeRO clips at 1
        "optimizer": _optimizer(config, recipe),
    }
    if recipe.quantizes:
        own["eco"] = _eco(config, recipe)
    bucket = max(sum(p.numel() for p in block.parameters()) for block in default_blocks(model) or [model])
    defaults = {"zero_optimization": {"reduce_bucket_size": min(bucket, LARGEST_BUCKET)}}
    file = config.engine.json
    given = {} if file is None else _read(file)
    _check_same(given, own, str(file))
    return _merged(_merged(defaults, given), own)


def zero_options(settings: dict[str, Any]) -> ZeroOptions:
    """What of a DeepSpeed JSON the memory plan needs; DeepSpeed's defaults where it says nothing."""
    zero, usual = settings["zero_optimization"], ZeroOptions()
    return ZeroOptions(
        working_copy=settings.get("eco", {}).get("working_copy", usual.working_copy),
        reduce_bucket=int(zero["reduce_bucket_size"]),
        persistence=int(zero.get("stage3_param_persistence_threshold", usual.persistence)),
        sub_group=int(zero.get("sub_group_size", usual.sub_group)),
    )


def stored_as(settings: dict[str, Any], recipe: Recipe) -> Recipe | str:
    """The recipe, or the baseline that DeepSpeed's own masters are with such a JSON."""
    bf16 = settings["bf16"]
    if recipe.quantizes or not bf16.get("bf16_master_weights_and_grads"):
        return recipe
    return "deepspeed-bf16-states" if bf16.get("bf16_optimizer_states") else "deepspeed-bf16-master"


def _optimizer(config: TrainConfig, recipe: Recipe) -> dict[str, Any]:
    options = config.optimizer
    common: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    adam = {"betas": [options.beta1, options.beta2], "eps": options.eps}
    if not recipe.quantizes:
        if options.name != "adamw":
            raise ValueError(
                f"expected optimizer=adamw for recipe {recipe.name} under DeepSpeed, got {options.name}; "
                "choose a recipe with codes, or engine=fsdp2"
            )
        return {"type": "AdamW", "params": {**common, **adam, "torch_adam": True}}
    if options.name == "sgd":
        return {"type": "ECOSGD", "params": {**common, "momentum": options.momentum, "seed": config.run.seed}}
    return {"type": "ECOAdamW", "params": {**common, **adam, "seed": config.run.seed}}


def _eco(config: TrainConfig, recipe: Recipe) -> dict[str, Any]:
    named = RECIPES[config.recipe.name].to_dict()
    return {
        "recipe": config.recipe.name,
        "overrides": {key: value for key, value in recipe.to_dict().items() if value != named[key]},
        "also_skip": list(config.model.keep),
        "working_copy": config.engine.working_copy or "replica",
    }


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"expected a DeepSpeed JSON at engine.json={file}, found none; check the path")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"expected JSON in {file}, got: {error}; correct it") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected an object of settings in {file}, got a {type(content).__name__}; write {{...}}")
    if "scheduler" in content:
        raise ValueError(f"expected the learning rate from the run's schedule, got 'scheduler' in {file}; leave it out")
    return content


def _check_same(given: dict[str, Any], own: dict[str, Any], where: str) -> None:
    """Refuse what the file says otherwise than the configuration."""
    for key, value in given.items():
        if isinstance(value, dict) and isinstance(own.get(key), dict):
            _check_same(value, own[key], f"'{key}' of {where}")
        elif key in own and value not in (own[key], "auto"):
            raise ValueError(
                f"expected {key} {own[key]!r}, as the run's configuration says, got {value!r} in {where}; "
                "leave it out there"
            )


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Settings of both; `over` wins, section by section."""
    result = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result
