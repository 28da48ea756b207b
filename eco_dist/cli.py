"""The command line: ``eco-dist train | compare | memory | recipes | experiment | bench | doctor``.

A user's mistake (an unknown key, an impossible recipe, a missing file, a wrong world size) gives one sentence on stderr
and exit code 2, on rank 0 alone but with that code on all ranks. A rank that is lost gives one sentence on every
node and exit code 4. A failure of the program itself gives its traceback.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

from eco_dist.cli_memory import Memory
from eco_dist.cli_studies import Bench, Experiment
from eco_dist.terminal import console, is_first_rank

__all__ = ["main"]

USER_ERROR = 2
PATIENCE_S = 3.0
"""How long the other ranks let the one that speaks do so: the launcher ends it as soon as one of them has ended."""
LOST_RANKS = 4
OWN_PACKAGE = "eco_dist"


@dataclass(frozen=True, kw_only=True)
class Train:
    """Train a model; start it with torchrun to shard it over ranks.

    Args:
        config: YAML file of the run; without it every key has its default.
        overrides: changes to it, as section.key=value, such as recipe=fp8-8bit run.steps=100.
        memory_report: directory for the full memory report of the run: every rank, and a step's timeline.
        dry_run: check the run and print what it would be, and its DeepSpeed JSON, without the cluster or the text.
        ranks: how many ranks to check it for; default engine.ranks, or 1.
    """

    config: Path | None = None
    overrides: tyro.conf.Positional[tuple[str, ...]] = ()
    memory_report: Path | None = None
    dry_run: tyro.conf.FlagCreatePairsOff[bool] = False
    ranks: int | None = None

    def run(self) -> None:
        """Load the configuration and train."""
        from eco_dist.training import load_config, train

        config = load_config(self.config, self.overrides)
        if self.dry_run:
            from eco_dist.training.dry_run import dry_run

            dry_run(config, self.ranks or config.engine.ranks or 1).print(console())
        else:
            train(config, memory_report=self.memory_report)


@dataclass(frozen=True, kw_only=True)
class Compare:
    """Compare finished runs in one table.

    Args:
        runs: directories of finished runs.
        plot: draw their losses into this PNG.
    """

    runs: tyro.conf.Positional[tuple[Path, ...]]
    plot: Path | None = None

    def run(self) -> None:
        """Print the table."""
        from eco_dist.training import compare_runs

        console().print(compare_runs(self.runs, self.plot))
        if self.plot is not None:
            console().print(f"wrote {self.plot}", highlight=False)


@dataclass(frozen=True, kw_only=True)
class Recipes:
    """List the named recipes and what a quantized parameter costs under each."""

    def run(self) -> None:
        """Print the table."""
        from eco_dist.recipe import RECIPES

        table = Table(title="Named recipes", caption="B/param: codes, scales and optimizer state of a quantized weight")
        table.add_column("recipe", no_wrap=True)
        for name in next(iter(RECIPES.values())).to_dict():
            table.add_column(name)
        table.add_column("B/param", justify="right")
        for name, recipe in RECIPES.items():
            values = (value or "-" for value in recipe.to_dict().values())
            table.add_row(name, *values, f"{recipe.bytes_per_parameter:.2f}")
        console().print(table)


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write the weights of a checkpoint as files that other tools read.

    Args:
        checkpoint: folder of a checkpoint, or of a run, of which the newest one is taken.
        target: empty folder for the files.
        format: `fp32`, `bf16`; `compressed-tensors`, `hf-fp8` (E4M3 with scales); `dcp`, `universal` (fp32 masters and
            moments, for torch.distributed.checkpoint or for DeepSpeed).
        virtual: write the weight without the rounding errors pending in the momentum (`fp32`, `bf16`).
        force: allow `virtual` after rounding to nearest, where it does harm.
        config: a Hugging Face config.json to put beside the weights.
    """

    checkpoint: tyro.conf.Positional[Path]
    target: tyro.conf.Positional[Path]
    format: Literal["fp32", "bf16", "compressed-tensors", "hf-fp8", "dcp", "universal"] = "bf16"
    virtual: bool = False
    force: bool = False
    config: Path | None = None

    def run(self) -> None:
        """Export and say what was written."""
        from eco_dist.checkpoint import export
        from eco_dist.training.resume import CHECKPOINTS

        below = self.checkpoint / CHECKPOINTS
        source = below if below.is_dir() else self.checkpoint
        files = export(
            source, self.target, format=self.format, virtual=self.virtual, force=self.force, config=self.config
        )
        for file in files:
            print(file)


@dataclass(frozen=True, kw_only=True)
class Doctor:
    """Say what this machine has: versions, devices, the kernel that steps weights, optional packages."""

    def run(self) -> None:
        """Print the table."""
        from eco_dist import doctor

        console().print(doctor.table())


Command = (
    Annotated[Train, tyro.conf.subcommand("train", prefix_name=False)]
    | Annotated[Compare, tyro.conf.subcommand("compare", prefix_name=False)]
    | Annotated[Memory, tyro.conf.subcommand("memory", prefix_name=False)]
    | Annotated[Recipes, tyro.conf.subcommand("recipes", prefix_name=False)]
    | Annotated[Experiment, tyro.conf.subcommand("experiment", prefix_name=False)]
    | Annotated[Bench, tyro.conf.subcommand("bench", prefix_name=False)]
    | Annotated[Export, tyro.conf.subcommand("export", prefix_name=False)]
    | Annotated[Doctor, tyro.conf.subcommand("doctor", prefix_name=False)]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; None takes the process's own.

    Returns:
        The exit code: 0, 2 for a user's mistake, 3 for a memory budget that is exceeded. If a rank was lost the process
        ends here, with 4.
    """
    command = tyro.cli(
        Command, prog="eco-dist", description=__doc__.splitlines()[0], args=arguments, console_outputs=is_first_rank()
    )
    from eco_dist.training.heartbeat import LostRanksError

    try:
        return command.run() or 0
    except LostRanksError as error:
        if error.speaks:
            print(f"eco-dist: {error}", file=sys.stderr)
        else:
            time.sleep(PATIENCE_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(LOST_RANKS)  # a thread may still wait for a lost rank's store: an orderly end would abort over it
    except (ValueError, TypeError, OSError) as error:
        if not _is_users(error):
            raise
        if is_first_rank():
            print(f"eco-dist: {' '.join(str(error).split())}", file=sys.stderr)
        else:
            time.sleep(PATIENCE_S)
        return USER_ERROR


def _is_users(error: Exception) -> bool:
    """Whether the error is a user's mistake: one this package raised on purpose, or a file system's refusal.

    A ValueError out of the depths of a library is a defect of the program, and its traceback must be seen.
    """
    if isinstance(error, OSError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    module = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return str(module).split(".")[0] == OWN_PACKAGE
