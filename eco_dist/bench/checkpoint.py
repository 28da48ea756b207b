"""What saving costs: a step during which a checkpoint is written, beside a step without."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from eco_dist.bench.rounds import Case, Timing, compare
from eco_dist.checkpoint import AsyncSaver, describe, save
from eco_dist.models import build_transformer, logits_of, model_config, next_token_loss
from eco_dist.optim import ECOAdamW
from eco_dist.weights import quantize_weights_

if TYPE_CHECKING:
    from rich.table import Table

RECIPE = "fp8"
VOCABULARY = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Timings of one model, and the bytes of its checkpoint.

    Attributes:
        timings: a step; a step with a save begun before it; the wait for that save; a save that is not asynchronous.
        static_bytes: codes, scales, moments and high-precision parameters.
        written_bytes: all files of a checkpoint.
    """

    timings: list[Timing]
    static_bytes: int
    written_bytes: int


def run(*, preset: str = "small", batch: int = 8, seq_len: int = 256, rounds: int = 9) -> Cost:
    """Time training steps of a model in one process, with saves and without.

    Args:
        preset: size of the model.
        batch: sequences a step.
        seq_len: tokens a sequence.
        rounds: rounds of all cases in turn.
    """
    model = build_transformer(model_config(preset, vocabulary=VOCABULARY))
    quantize_weights_(model, RECIPE)
    optimizer = ECOAdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, (batch, seq_len + 1), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        next_token_loss(logits_of(model(tokens[:, :-1])), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()

    with tempfile.TemporaryDirectory(prefix="eco-dist-bench-") as folder:
        root = Path(folder)
        saver = AsyncSaver(root / "async", keep=1)

        def save_and_step() -> None:
            saver.save(model, optimizer, step=1)
            step()

        actions: dict[str, Callable[[], object]] = {
            "a step": step,
            "a step with an asynchronous save": save_and_step,
            "the rest of that save, waited for": saver.wait,
            "a save alone, not asynchronous": lambda: save(root / "sync", model, optimizer, step=1, keep=1),
        }
        timings = compare([Case(name=name, action=action) for name, action in actions.items()], rounds=rounds)
        static = sum(piece.tensor.nbytes for piece in describe(model, optimizer).pieces)
        written = sum(file.stat().st_size for file in save(root / "size", model, optimizer, step=1).iterdir())
    return Cost(timings=timings, static_bytes=static, written_bytes=written)


def table(cost: Cost, *, preset: str) -> Table:
    """Ratios for a terminal."""
    from rich.table import Table

    extra = cost.written_bytes - cost.static_bytes
    caption = f"{cost.static_bytes:,} static bytes; files have {extra:,} more: manifest and headers"
    table = Table(title=f"saving {preset}, {RECIPE}; time of a step = 1", caption=caption)
    for column in ("what", "time", "quartiles"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for timing in cost.timings:
        table.add_row(timing.name, f"{timing.ratio:.2f}", f"{timing.low:.2f} - {timing.high:.2f}")
    return table
