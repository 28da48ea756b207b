"""From a configuration to the parts of a run: recipe, text, model on its engine, optimizer, schedule."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, fields
from pathlib import Path

import yaml
from torch import nn

from eco_dist.memory import MemoryReport
from eco_dist.models import LlamaConfig, build_transformer, model_config
from eco_dist.recipe import Recipe
from eco_dist.training.batch import split_batch
from eco_dist.training.config import RecipeConfig, TrainConfig
from eco_dist.training.data import find_documents, split_documents
from eco_dist.training.engine import RunEngine, TorchEngine, build_optimizer
from eco_dist.training.fsdp1_engine import FSDP1Engine
from eco_dist.training.memory_report import plan_run
from eco_dist.training.metrics import METRICS_FILE
from eco_dist.training.overrides import to_plain
from eco_dist.training.plain_weights import load_plain_weights
from eco_dist.training.preflight import check_memory
from eco_dist.training.ranks import Ranks
from eco_dist.training.resume import CHECKPOINTS
from eco_dist.training.summary import SUMMARY_FILE
from eco_dist.training.tokens import TokenFile, load_tokenizer, open_tokens, write_tokens
from eco_dist.training.zero_engine import ZeroEngine
from eco_dist.training.zero_json import deepspeed_json

__all__ = [
    "BuiltModel",
    "Text",
    "build_model",
    "build_optimizer",
    "build_recipe",
    "model_shape",
    "open_run_directory",
    "open_text",
]

REMOVE = "none"


@dataclass(frozen=True, kw_only=True)
class Text:
    """The tokens of a run and the size of their vocabulary."""

    train: TokenFile
    heldout: TokenFile
    vocabulary: int


@dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model ready to train, and what it will hold.

    Attributes:
        engine: that shards it.
        planned: predicted memory, made before anything was converted.
        baseline: the same for the model with fp32 master weights, which the recipe replaces.
        parameters, block_parameters: numbers of weights, all and without embedding and head.
    """

    engine: RunEngine
    planned: MemoryReport
    baseline: MemoryReport
    parameters: int
    block_parameters: int

    @property
    def model(self) -> nn.Module:
        """As it is called."""
        return self.engine.model


def build_recipe(config: RecipeConfig) -> Recipe:
    """The named recipe with the changes the configuration makes.

    Raises:
        ValueError: no such name or value, or parts that do not fit together.
    """
    named = Recipe.from_name(config.name)
    changes = {part.name: getattr(config, part.name) for part in fields(config) if part.name != "name"}
    given = {
        name: None if value == REMOVE and name in ("format", "granularity") else value
        for name, value in changes.items()
        if value is not None
    }
    return named.replace(**given)


def open_run_directory(config: TrainConfig) -> Path:
    """Make the run directory and write the resolved ``config.yaml`` into it; rank 0 only.

    Raises:
        ValueError: it holds an earlier run and ``run.overwrite`` is false.
    """
    directory = config.run.directory
    if (directory / METRICS_FILE).exists() and not (config.run.overwrite or config.run.resume):
        raise ValueError(
            f"expected a fresh run.directory, got {directory} with an earlier run; "
            "choose another one, or set run.resume=true to go on with it or run.overwrite=true to replace it"
        )
    directory.mkdir(parents=True, exist_ok=True)
    if not config.run.resume:
        shutil.rmtree(directory / CHECKPOINTS, ignore_errors=True)  # another run would resume from them
    (directory / SUMMARY_FILE).unlink(missing_ok=True)  # it stands for a finished run, which this one is not yet
    (directory / "config.yaml").write_text(yaml.safe_dump(to_plain(config), sort_keys=False), encoding="utf-8")
    return directory


def open_text(config: TrainConfig, ranks: Ranks) -> Text:
    """Find, split and tokenize the text on rank 0, and map the token files on every rank; collective.

    Raises:
        FileNotFoundError, ValueError: there is no such text or tokenizer, or too little text.
    """
    data, directory = config.data, config.run.directory

    def write() -> None:
        split = split_documents(find_documents(data.path, data.suffixes), data.heldout)
        write_tokens(split, directory, tokenizer=data.tokenizer, vocabulary=data.vocabulary)

    ranks.on_first(write)
    return Text(
        train=open_tokens(directory, "train", data.seq_len),
        heldout=open_tokens(directory, "heldout", data.seq_len),
        vocabulary=load_tokenizer(data.tokenizer, directory).vocabulary,
    )


def build_model(config: TrainConfig, recipe: Recipe, vocabulary: int, ranks: Ranks) -> BuiltModel:
    """Draw or load the weights, predict the memory, then convert and place the model; the same on all ranks.

    Raises:
        ValueError: the weights of ``model.init_from`` do not fit, the recipe cannot hold a weight, or a node has too
            little memory.
    """
    shape = model_shape(config, vocabulary)
    model = build_transformer(shape, seed=config.run.seed)
    if config.model.init_from is not None:
        load_plain_weights(model, config.model.init_from)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    split = split_batch(config, ranks.world_size)
    settings = deepspeed_json(config, recipe, split, model) if config.engine.name == "deepspeed" else None
    planned = plan_run(model, recipe, config, shape, ranks.world_size, settings)
    baseline = plan_run(model, "fp32-master", config, shape, ranks.world_size, settings)
    check_memory(ranks, planned)
    engine: RunEngine
    if settings is not None:
        engine = ZeroEngine(model, recipe, config, settings, ranks)
    elif config.engine.name == "fsdp1":
        engine = FSDP1Engine(model, recipe, config, split, ranks)
    else:
        engine = TorchEngine(model, recipe, config, split, ranks)
    return BuiltModel(
        engine=engine,
        planned=planned,
        baseline=baseline,
        parameters=parameters,
        block_parameters=shape.block_parameters,
    )


def model_shape(config: TrainConfig, vocabulary: int) -> LlamaConfig:
    """The sizes of the run's model.

    Raises:
        ValueError: there is no such preset.
    """
    return model_config(
        config.model.preset,
        vocabulary=vocabulary,
        activations=config.model.activations,
        backend=config.model.experts,
        wire=config.model.expert_wire,
        capacity_factor=config.model.expert_capacity,
    )
