"""Training, forward to step: a recipe beside fp32 master weights on the same engine, in the same process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from eco_dist.bench.rounds import Case, Timing, compare
from eco_dist.models import next_token_loss
from eco_dist.training.build import build_model, build_optimizer, build_recipe
from eco_dist.training.config import EngineConfig, ModelConfig, OptimizerConfig, RecipeConfig, TrainConfig
from eco_dist.training.ranks import Ranks, open_ranks

if TYPE_CHECKING:
    from rich.table import Table

BASELINE = "fp32-master"
RECIPES = (BASELINE, "fp8", "fp8-bf16", "fp8-8bit")
VOCABULARY = 4096


def run(
    *, preset: str = "small", batch: int = 4, seq_len: int = 128, rounds: int = 9, recipes: Sequence[str] = RECIPES
) -> list[Timing]:
    """Time training steps on random tokens; FSDP2 under torchrun, else one process. Collective; the same on all ranks.

    Args:
        preset: size of the model.
        batch: sequences a rank and step.
        seq_len: tokens a sequence.
        rounds: rounds of all recipes in turn.
        recipes: the first is the baseline.
    """
    single, sharded = EngineConfig(), EngineConfig(name="fsdp2")
    with open_ranks(sharded if torch.distributed.is_torchelastic_launched() else single) as ranks:
        engine = sharded if ranks.world_size > 1 else single
        cases = [
            Case(name=name, action=_training_step(name, ranks, engine, preset, batch, seq_len)) for name in recipes
        ]
        return compare(cases, rounds=rounds)


def table(timings: Sequence[Timing]) -> Table:
    """Ratios for a terminal."""
    from rich.table import Table

    table = Table(title=f"training steps; time of {timings[0].name} = 1")
    for column in ("recipe", "time of a step", "quartiles", "tokens a second"):
        table.add_column(column, justify="left" if column == "recipe" else "right")
    for timing in timings:
        quartiles = f"{timing.low:.2f} - {timing.high:.2f}"
        table.add_row(timing.name, f"{timing.ratio:.2f}", quartiles, f"{1 / timing.ratio:.2f}")
    return table


def _training_step(
    name: str, ranks: Ranks, engine: EngineConfig, preset: str, batch: int, seq_len: int
) -> Callable[[], object]:
    config = TrainConfig(model=ModelConfig(preset=preset), recipe=RecipeConfig(name=name), engine=engine)
    model = build_model(config, build_recipe(config.recipe), VOCABULARY, ranks).model
    optimizer = build_optimizer(model, OptimizerConfig(), seed=0)
    generator = torch.Generator().manual_seed(ranks.rank)
    tokens = torch.randint(VOCABULARY, (batch, seq_len + 1), generator=generator).to(ranks.device)

    def step() -> None:
        next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
