"""The commands that measure: ``eco-dist experiment`` and ``eco-dist bench``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro
from rich.table import Table

from eco_dist.terminal import console, is_first_rank

__all__ = ["Bench", "Experiment"]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Repeat a study of the docs; what of it is finished in the directory is not done again.

    Args:
        name: `finetune`: every recipe on the same trained weights (docs/convergence.md). `experts`: the same of a
            mixture of experts (docs/moe.md). `injection`: every form of injection through restarts, jumps of the
            learning rate and idle rows (docs/injection.md). `virtual`: exports of stored and of virtual weights
            (docs/checkpoints.md).
        directory: where its runs go; default runs/NAME.
        seeds: seeds to run.
    """

    name: tyro.conf.Positional[Literal["finetune", "experts", "injection", "virtual"]]
    directory: Path | None = None
    seeds: tuple[int, ...] = (0, 1)

    def run(self) -> None:
        """Run the study and print its table."""
        from eco_dist.experiments import finetune, injection, injection_figures, virtual

        directory = self.directory or Path("runs") / self.name
        if self.name == "finetune":
            console().print(finetune.run(directory, seeds=self.seeds).table())
        elif self.name == "experts":
            recipes, settings = finetune.EXPERT_RECIPES, finetune.EXPERT_SETTINGS
            console().print(finetune.run(directory, seeds=self.seeds, recipes=recipes, settings=settings).table())
        elif self.name == "virtual":
            console().print(virtual.run(directory, seeds=self.seeds).table())
        else:
            result = injection.run(directory, seeds=self.seeds)
            console().print(result.table())
            for file in injection_figures.draw(result, directory):
                print(file)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure against what it replaces, in one process; results are ratios.

    Args:
        what: `step`: the optimizer step under each recipe. `scaling`: the same over sizes and threads. `e2e`: training
            steps beside fp32 master weights (FSDP2 under torchrun). `cold`: import and first step in fresh processes.
            `checkpoint`: a training step while a checkpoint is saved.
        elements: parameters of the weight that is stepped (`step`).
        rounds: rounds of all cases in turn.
        threads: threads torch and the kernel may use; None leaves torch's choice.
        peers: optimizers of other packages too, where they are installed (`step`); some compile for minutes first.
        preset: model that is trained (`e2e`, `checkpoint`).
        json: write the results into this file.
        plot: draw them into this file (`scaling`).
    """

    what: tyro.conf.Positional[Literal["step", "scaling", "e2e", "cold", "checkpoint"]] = "step"
    elements: int = 1 << 24
    rounds: int = 9
    threads: int | None = None
    peers: bool = False
    preset: str = "small"
    json: Path | None = None
    plot: Path | None = None

    def run(self) -> None:
        """Measure and print."""
        import json
        from dataclasses import asdict

        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        results, table = self._measured()
        if not is_first_rank():
            return
        console().print(table)
        if self.json is not None:
            content = {"what": self.what, "rounds": self.rounds, "results": [asdict(result) for result in results]}
            self.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _measured(self) -> tuple[Sequence[Any], Table]:
        from eco_dist.bench import checkpoint, cold, end_to_end, scaling, step

        if self.what == "checkpoint":
            cost = checkpoint.run(preset=self.preset, rounds=self.rounds)
            return cost.timings, checkpoint.table(cost, preset=self.preset)
        if self.what == "cold":
            starts = cold.run(rounds=self.rounds)
            return starts, cold.table(starts)
        if self.what == "e2e":
            steps = end_to_end.run(preset=self.preset, rounds=self.rounds)
            return steps, end_to_end.table(steps)
        if self.what == "scaling":
            points = scaling.run(rounds=self.rounds)
            if self.plot is not None:
                scaling.plot(points, self.plot)
            return points, scaling.table(points)
        timings = step.run(elements=self.elements, rounds=self.rounds, peers=self.peers)
        return timings, step.table(timings, elements=self.elements)
