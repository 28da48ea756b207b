"""A run checked without its cluster: a fake process group stands for the ranks, the meta device for the weights.

What is checked is what the run itself would use: the configuration, the batch on so many ranks, the names and shapes
of `model.init_from`, the plan of its memory, `fully_shard` of the whole model, and DeepSpeed's engine with the run's
JSON. That engine is given a small stand-in for the model, since DeepSpeed knows no meta device. With expert
parallelism the plan is all that is checked of the sharding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn

from eco_dist.memory import MemoryReport
from eco_dist.memory.report import format_bytes
from eco_dist.models import build_transformer
from eco_dist.numerics import BLOCK_SIZE
from eco_dist.training.batch import BatchSplit, split_batch
from eco_dist.training.build import build_recipe, model_shape
from eco_dist.training.config import DataConfig, TrainConfig
from eco_dist.training.engine import TorchEngine
from eco_dist.training.fsdp1_engine import refuse_unsupported
from eco_dist.training.memory_report import plan_run
from eco_dist.training.plain_weights import load_plain_weights
from eco_dist.training.ranks import Ranks, check_world
from eco_dist.training.tokens import load_tokenizer
from eco_dist.training.zero_engine import import_deepspeed
from eco_dist.training.zero_json import deepspeed_json

__all__ = ["DryRun", "dry_run"]


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a run would be.

    Attributes:
        config: of the run.
        ranks: how many.
        split: of the batch.
        parameters: number of weights.
        planned: memory of every rank.
        deepspeed: its JSON; None for other engines.
    """

    config: TrainConfig
    ranks: int
    split: BatchSplit
    parameters: int
    planned: MemoryReport
    deepspeed: dict[str, Any] | None

    def print(self, console: Console) -> None:
        """Print the table, and the DeepSpeed JSON as it would be in a file."""
        console.print(self.table())
        if self.deepspeed is not None:
            console.print(json.dumps(self.deepspeed, indent=2), soft_wrap=True, highlight=False, markup=False)

    def table(self) -> Table:
        """For a terminal."""
        config, split = self.config, self.split
        worst = max(self.planned.static_bytes(rank) for rank in range(self.ranks))
        table = Table(title="dry run: nothing was trained", show_header=False)
        rows = {
            "model": f"{config.model.preset}, {self.parameters:,} parameters, recipe {self.planned.recipe}",
            "engine": f"{config.engine.layout} on {self.ranks:,} rank{'s' * (self.ranks > 1)}",
            "batch": f"{config.data.batch:,} sequences of {config.data.seq_len:,} tokens = {self.ranks:,} (ranks) x "
            f"{split.accumulate} (accumulated) x {split.micro} (at a time)",
            "steps": f"{config.run.steps:,}, {config.run.steps * config.data.batch * config.data.seq_len:,} tokens",
            "static memory": f"{format_bytes(worst)} on the fullest rank",
        }
        for name, value in rows.items():
            table.add_row(name, value)
        return table


def dry_run(config: TrainConfig, ranks: int) -> DryRun:
    """Check that a run could start on so many ranks, in this process and without its text.

    Raises:
        FileNotFoundError: a file it names is missing.
        ValueError: it could not: as `eco_dist.training.train`, or DeepSpeed refuses its JSON.
        RuntimeError: this process has a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError("expected a process without a process group, got one; dry-run in a process of its own")
    check_world(config.engine, ranks)
    recipe = build_recipe(config.recipe)
    split = split_batch(config, ranks)
    shape = model_shape(config, _vocabulary(config.data, config.run.directory))
    with torch.device("meta"):
        model = build_transformer(shape, seed=config.run.seed)
    if config.model.init_from is not None:
        load_plain_weights(model, config.model.init_from)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    settings = deepspeed_json(config, recipe, split, model) if config.engine.name == "deepspeed" else None
    planned = plan_run(model, recipe, config, shape, ranks, settings)
    with _fake_ranks(ranks):
        if settings is not None:
            _initialize_deepspeed(settings, config.data.batch)
        elif config.engine.name == "fsdp1":  # which does not wrap a model without values
            refuse_unsupported(recipe, config)
        elif config.engine.expert_parallel == 1:  # ranks that share experts agree by messages, which would be fake
            TorchEngine(model, recipe, config, split, Ranks(rank=0, world_size=ranks, device=torch.device("meta")))
    return DryRun(config=config, ranks=ranks, split=split, parameters=parameters, planned=planned, deepspeed=settings)


def _vocabulary(data: DataConfig, directory: Path) -> int:
    """Token ids of the run; of a tokenizer that is still to be trained, what was asked for."""
    return data.vocabulary if data.tokenizer == "bpe" else load_tokenizer(data.tokenizer, directory).vocabulary


@contextmanager
def _fake_ranks(world_size: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _initialize_deepspeed(settings: dict[str, Any], batch: int) -> None:
    """An engine around a block of weights, with the JSON of the whole model."""
    deepspeed = import_deepspeed("cpu")
    stand_in = nn.Linear(BLOCK_SIZE, BLOCK_SIZE)
    engine = deepspeed.initialize(model=stand_in, model_parameters=stand_in.parameters(), config=settings)[0]
    assert engine.train_batch_size() == batch
