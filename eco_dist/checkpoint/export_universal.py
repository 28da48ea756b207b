"""A checkpoint as a universal one of DeepSpeed, which its engines read with `load_universal`, at any stage.

    latest_universal             the name of the folder
    global_stepN/
      zero/NAME/                 fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt; our codes and scales in eco.safetensors
      zero/optimizer_state.pt    options of the parameter groups
      *_model_states.pt          counters and schedule, under the name that stage 1 and 2 look for and that of stage 3

The stored weights become the masters; errors that are pending in the first moment stay there and are paid back. ECO
engines take the codes as they are, so weights and, but for the learning rates seen, optimizer state are the same bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eco_dist.checkpoint.reader import CheckpointReader
from eco_dist.checkpoint.sources import CODES_FILE, storage_of
from eco_dist.optim import StateKey
from eco_dist.recipe import Injection

DEEPSPEED_VERSION = "0.19.8"
"""Whose format it is; DeepSpeed refuses files that do not say."""
_MODEL_STATES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_OPTIONS = ("lr", "initial_lr", "betas", "eps", "weight_decay")


def check_adamw(reader: CheckpointReader, format: str) -> None:
    """Refuse moments that AdamW with master weights cannot go on with.

    Raises:
        ValueError: names the first parameter that has such.
    """
    for name, record in reader.manifest.parameters.items():
        recipe = reader.recipe(name)
        moments = {key for key in (StateKey.EXP_AVG, StateKey.EXP_AVG_SQ) if f"{name}.{key}" in reader.manifest.tensors}
        if moments == {StateKey.EXP_AVG}:
            raise ValueError(f"expected moments of AdamW for {format!r}, got those of SGD for '{name}'; use 'fp32'")
        if recipe is not None and recipe.injection_in_force is Injection.DISPLACEMENT and record.scalars:
            raise ValueError(
                f"expected moments of gradients for {format!r}, got displacements of the weight '{name}' (injection "
                "'displacement'), which AdamW does not know; use 'fp32'"
            )


def write_universal(reader: CheckpointReader, target: Path) -> None:
    """Write a checkpoint in this form into an empty folder.

    Raises:
        ValueError: if parameters have taken different numbers of steps, which DeepSpeed cannot hold.
    """
    step = _common_step(reader)
    folder = target / f"global_step{reader.manifest.step}"
    for name in reader.manifest.parameters:
        _write_parameter(reader, name, folder / "zero" / name)
    groups = [
        {**{key: group[key] for key in _OPTIONS if key in group}, "params": []} for group in reader.manifest.groups
    ]
    common: dict[str, Any] = {"param_groups": groups, "ds_version": DEEPSPEED_VERSION}
    common["optimizer_state_dict"] = {"state": {0: {StateKey.STEP: step}}, "param_groups": groups}
    torch.save(common, folder / "zero" / "optimizer_state.pt")
    for file in _MODEL_STATES:
        torch.save(_model_states(reader.manifest.step), folder / file)
    (target / "latest_universal").write_text(folder.name, encoding="utf-8")


def _write_parameter(reader: CheckpointReader, name: str, folder: Path) -> None:
    folder.mkdir(parents=True)
    master = f"{name}.{StateKey.MASTER}"
    weight = reader.tensor(master) if master in reader.manifest.tensors else reader.weight(name)
    for key, values in {"fp32": weight.float(), **reader.moments(name)}.items():
        torch.save({"param": values}, folder / f"{key}.pt")
    scalars = reader.manifest.parameters[name].scalars
    if StateKey.STEP in scalars:
        torch.save(torch.tensor(scalars[StateKey.STEP]), folder / f"{StateKey.STEP}.pt")
    recipe = reader.recipe(name)
    if recipe is not None and recipe.format is not None:
        codes = reader.tensor(name).view(recipe.format.grid.storage_dtype)
        save_file({"codes": codes, "scales": reader.scales(name)}, folder / CODES_FILE, metadata=storage_of(recipe))


def _common_step(reader: CheckpointReader) -> Tensor:
    """Steps that the optimizer has taken; DeepSpeed has one number for all parameters."""
    steps = {
        name: record.scalars[StateKey.STEP]
        for name, record in reader.manifest.parameters.items()
        if StateKey.STEP in record.scalars
    }
    first = next(iter(steps.items()), ("", 0.0))
    for name, step in steps.items():
        if step != first[1]:
            raise ValueError(
                f"expected all parameters after as many steps, got {first[1]:g} of '{first[0]}' and {step:g} of "
                f"'{name}'; use 'dcp' or 'fp32'"
            )
    return torch.tensor(first[1])


def _model_states(step: int) -> dict[str, Any]:
    """What an engine reads beside parameters. Its own schedulers know the first key of theirs, torch's the others."""
    schedule = {"last_batch_iteration": step - 1, "last_epoch": step, "_step_count": step + 1, "lr_lambdas": []}
    sizes = {"dp_world_size": 1, "mp_world_size": 1}
    counters = {"global_steps": step, "skipped_steps": 0}
    return {"module": {}, "lr_scheduler": schedule, "ds_version": DEEPSPEED_VERSION, **sizes, **counters}
