"""Reading the tensors of a checkpoint whole, one at a time, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eco_dist.checkpoint.load import find
from eco_dist.checkpoint.manifest import Manifest, verify
from eco_dist.checkpoint.pieces import SCALE_SUFFIX, ParameterRecord
from eco_dist.numerics import MomentFormat, decode, decode_moment
from eco_dist.optim.rules import Hyper, Rule, Schedule, virtual_weight
from eco_dist.optim.shard import StateKey
from eco_dist.recipe import Recipe


class CheckpointReader:
    """The parameters of a checkpoint as ordinary tensors.

    Attributes:
        manifest: what it consists of.
    """

    def __init__(self, path: Path | str) -> None:
        """Open a checkpoint, or the newest of a run, and verify it.

        Raises:
            CheckpointError: there is none, or its bytes are not those that were written.
        """
        directory = find(Path(path))
        self.manifest = Manifest.read(directory)
        for name, file in self.manifest.files.items():
            verify(directory, name, file)
        self._directory = directory
        self._files: dict[str, Any] = {}

    def recipe(self, name: str) -> Recipe | None:
        """Recipe of a parameter; None if it is in high precision."""
        fields = self.manifest.parameters[name].recipe
        return None if fields is None else Recipe(**fields)  # type: ignore[arg-type]

    def tensor(self, name: str) -> Tensor:
        """A stored tensor, whole, in the dtype of the file."""
        stored = self.manifest.tensors[name]
        whole = torch.empty(torch.Size(stored.shape).numel(), dtype=getattr(torch, stored.dtype))
        for run in stored.runs:
            if run.file not in self._files:
                self._files[run.file] = safe_open(self._directory / run.file, framework="pt")
            whole[run.start : run.start + run.count] = self._files[run.file].get_tensor(run.key).view(-1)
        return whole.view(stored.shape)

    def scales(self, name: str) -> Tensor:
        """Scales of a quantized parameter; empty for a format that has none."""
        key = name + SCALE_SUFFIX
        return self.tensor(key) if key in self.manifest.tensors else torch.empty(0)

    def weight(self, name: str) -> Tensor:
        """The stored weight, codes times scales, in fp32; of a high-precision parameter the parameter itself."""
        recipe, stored = self.recipe(name), self.tensor(name)
        if recipe is None:
            return stored
        assert recipe.format is not None
        codes = stored.view(recipe.format.grid.storage_dtype)
        columns = self.manifest.parameters[name].shape[-1]
        return decode(codes, self.scales(name), recipe.format, recipe.granularity, columns)

    def virtual_weight(self, name: str) -> Tensor:
        """The stored weight without the errors that are pending in the momentum (`rules.virtual_weight`).

        A parameter that has none pending, in high precision or with another compensation, is as it is.
        """
        recipe, record = self.recipe(name), self.manifest.parameters[name]
        if recipe is None or not recipe.injects or not record.scalars.get(StateKey.STEP):
            return self.weight(name)
        moments = self.moments(name)
        first, second = moments[StateKey.EXP_AVG], moments.get(StateKey.EXP_AVG_SQ)
        rule = Rule.SGD if second is None else Rule.ADAMW
        return virtual_weight(self.weight(name), first, second, self._hyper(name, recipe, record), rule=rule)

    def moments(self, name: str) -> dict[str, Tensor]:
        """`exp_avg` and, with AdamW, `exp_avg_sq` of a parameter in fp32; empty if it is not stepped."""
        recipe = self.recipe(name)
        moments = MomentFormat.FP32 if recipe is None else recipe.moments
        scale_keys = {StateKey.EXP_AVG: StateKey.EXP_AVG_SCALE, StateKey.EXP_AVG_SQ: StateKey.EXP_AVG_SQ_SCALE}
        result = {}
        for key, scale_key in scale_keys.items():
            if f"{name}.{key}" in self.manifest.tensors:
                scales = self.tensor(f"{name}.{scale_key}") if moments.has_scales else None
                stored = self.tensor(f"{name}.{key}")
                result[key] = decode_moment(stored, scales, moments, second=key == StateKey.EXP_AVG_SQ)
        return result

    def buffers(self) -> list[str]:
        """Names of tensors that belong to no parameter."""
        parameters = self.manifest.parameters
        return [
            name
            for name in self.manifest.tensors
            if name not in parameters
            and name.removesuffix(SCALE_SUFFIX) not in parameters
            and not any(name.startswith(f"{parameter}.") for parameter in parameters)
        ]

    def _hyper(self, name: str, recipe: Recipe, record: ParameterRecord) -> Hyper:
        """Hyper-parameters of the last step. `auto` remembers its learning rate; else it is that of the group."""
        group = next(group for group in self.manifest.groups if name in group["params"])
        beta1, beta2 = group.get("betas", (group.get("momentum", 0.0), 0.0))
        lr = record.scalars.get(StateKey.LR_LAST, float(group["lr"]))
        return Hyper(
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            eps=group.get("eps", 0.0),
            step=int(record.scalars[StateKey.STEP]),
            injection=recipe.injection_in_force,
            schedule=Schedule(peak=record.scalars.get(StateKey.LR_PEAK, lr), last=lr),
        )
