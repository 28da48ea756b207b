"""Universal checkpoints, `"checkpoint": {"load_universal": true}` in the JSON, into stage 1, 2 and 3.

DeepSpeed would copy a parameter's fp32 values and moments into flat tensors; here `eco_dist.checkpoint.take_over`
encodes them. Options of the parameter groups, counters and schedule are taken over as DeepSpeed does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from eco_dist.engines.deepspeed.checkpoint_runs import HoldsRuns

TakeOver = Callable[..., int]
"""`eco_dist.checkpoint.take_over`, which an engine does not import."""
_COMMON = Path("zero", "optimizer_state.pt")


class LoadsUniversal(HoldsRuns):
    """The part of a ZeRO optimizer that reads a universal checkpoint."""

    take_over: ClassVar[TakeOver]

    def model(self) -> nn.Module:
        """The module whose parameters this optimizer steps."""
        raise NotImplementedError

    def load_common_state(self, common: Mapping[str, Any]) -> None:
        """Take over loss scale and clipping norm."""
        raise NotImplementedError

    def _load_universal_checkpoint(
        self, checkpoint_folder: str, load_optimizer_states: bool, load_from_fp32_weights: bool
    ) -> None:
        """Weights, and unless told otherwise moments, steps and options. Collective.

        Raises:
            ValueError: if it has other parameters or parameter groups; nothing has changed then.
        """
        common = _read_common(Path(checkpoint_folder))
        groups = self.checkpoint_groups()
        options = _options(groups, common["param_groups"]) if load_optimizer_states else [{} for _ in groups]
        self.take_over(checkpoint_folder, self.model(), self, moments=load_optimizer_states)
        self.load_common_state(common)
        for group, saved in zip(groups, options, strict=True):
            group.update(saved)
        self.optimizer.follow_client()


def model_states(folder: Path) -> list[str]:
    """A rank's file beside the parameters, from whatever stage."""
    files = sorted(folder.glob("mp_rank_*_model_states.pt")) or sorted(folder.glob("zero_pp_rank_0_*_model_states.pt"))
    return [str(file) for file in files]


def _read_common(folder: Path) -> dict[str, Any]:
    path = folder / _COMMON
    if not path.is_file():
        raise ValueError(
            f"expected a universal checkpoint with {path}, got none; make one with DeepSpeed's ds_to_universal or with "
            "`eco-dist export --format universal`"
        )
    common: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return common


def _options(groups: list[dict[str, Any]], saved: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Options of each group that both optimizers have, such as the learning rate."""
    if len(saved) != len(groups):
        raise ValueError(
            f"expected a universal checkpoint with {len(groups)} parameter groups as in the optimizer, got "
            f"{len(saved)}; make the optimizer with the groups it was saved with, or start with "
            "eco_dist.checkpoint.take_over, which leaves their options alone"
        )
    return [
        {key: source[key] for key in group if key in source and key != "params"}
        for group, source in zip(groups, saved, strict=True)
    ]
