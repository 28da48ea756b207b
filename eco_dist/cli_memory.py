"""``eco-dist memory plan | measure | diff``: the parsing; what they do is in `eco_dist.memory.command`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

from eco_dist.memory.command import DiffRequest, MeasureRequest, PlanRequest, Preset
from eco_dist.terminal import console, is_first_rank

__all__ = ["Memory"]

BYTES = 256
"""Vocabulary of a preset in a plan: that of `train` without another tokenizer."""


class MemoryPlan(PlanRequest):
    __doc__ = PlanRequest.__doc__

    def run(self) -> int:
        """Plan and print."""
        from eco_dist.models import PRESETS, SPARSE_PRESETS

        return self.execute(console(), _preset, (*PRESETS, *SPARSE_PRESETS))


class MemoryMeasure(MeasureRequest):
    __doc__ = MeasureRequest.__doc__

    def run(self) -> int:
        """Train a few steps, measure, and print."""
        from eco_dist.training import load_config, train

        train(load_config(self.config, (*self.overrides, *self.settings)), memory_report=self.out)
        return self.verdict(console()) if is_first_rank() else 0


class MemoryDiff(DiffRequest):
    __doc__ = DiffRequest.__doc__

    def run(self) -> int:
        """Print the table."""
        return self.execute(console())


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What every rank holds: planned for any cluster, measured on this one, two reports compared."""

    command: Annotated[
        Annotated[MemoryPlan, tyro.conf.subcommand("plan", prefix_name=False)]
        | Annotated[MemoryMeasure, tyro.conf.subcommand("measure", prefix_name=False)]
        | Annotated[MemoryDiff, tyro.conf.subcommand("diff", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]

    def run(self) -> int:
        """Run the chosen one; 3 if a rank needs more than the budget."""
        return self.command.run()


def _preset(name: str) -> Preset | None:
    """A preset of `train` on the meta device with a vocabulary of bytes, and the sizes of its layers."""
    import torch

    from eco_dist.models import PRESETS, SPARSE_PRESETS, build_transformer, model_config
    from eco_dist.training.memory_report import transformer_shape

    if name not in (*PRESETS, *SPARSE_PRESETS):
        return None
    config = model_config(name, vocabulary=BYTES)
    with torch.device("meta"):
        return build_transformer(config), transformer_shape(config)
