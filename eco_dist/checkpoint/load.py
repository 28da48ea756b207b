"""Loading: everything is checked on all ranks before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from eco_dist.checkpoint.collective import agreed, own_rank, together
from eco_dist.checkpoint.holders import Holder, holder_of, named_parameters
from eco_dist.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    CheckpointCorruptError,
    CheckpointError,
    Manifest,
    Run,
    StoredTensor,
    verify,
)
from eco_dist.checkpoint.pieces import SCALARS, Description, ParameterRecord, Piece, describe
from eco_dist.checkpoint.write import checkpoints
from eco_dist.optim import ECOOptimizer


def latest(root: Path | str) -> Path | None:
    """The newest finished checkpoint in a folder: the one LATEST names, else the one with the most steps; or None."""
    root = Path(root)
    try:
        named = root / (root / LATEST).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        named = None
    found = checkpoints(root)
    return named if named in found else (found[-1] if found else None)


def load(path: Path | str, model: nn.Module, optimizer: ECOOptimizer | Holder) -> Manifest:
    """Load a checkpoint into a model and its optimizer, whatever wrote it and on however many ranks; collective.

    The run goes on bit for bit where the saved one stopped: weights, momenta, step counts, random bits, options of the
    parameter groups. What the training program had added is in the manifest's `extra`.

    Args:
        path: folder of a checkpoint, or of a run, of which the newest one is taken.
        model: converted with the recipe of the saved one, whole or sharded by FSDP2 or FSDP1; or a DeepSpeed engine.
        optimizer: its optimizer (`engine.optimizer`, what `fsdp1.convert` returned).

    Raises:
        CheckpointError: there is none, or it does not fit the model; the same sentence on all ranks, nothing changed.
        CheckpointCorruptError: its bytes are not those that were written; likewise.
    """
    chosen = together(lambda: find(Path(path)) if own_rank() == 0 else None)
    directory = chosen[0]
    assert directory is not None
    manifest = agreed(lambda: Manifest.read(directory))
    agreed(lambda: _verify_share(directory, manifest))
    holder = holder_of(optimizer, model)
    description = describe(model, optimizer)
    agreed(lambda: _check(description, manifest))
    options = agreed(lambda: _options(model, holder, manifest))
    files = agreed(lambda: _open(directory, description.pieces, manifest))
    _read(description.pieces, manifest, files)
    _restore_scalars(description, manifest)
    for group, values in zip(holder.checkpoint_groups(), options, strict=True):
        group.update(values)
    records = manifest.parameters
    parameters = named_parameters(model, holder)
    streams = [(p, number) for n, p in parameters.items() if (number := records[n].stream) is not None]
    holder.checkpoint_loaded(manifest.seed, streams)
    return manifest


def find(path: Path) -> Path:
    """The checkpoint a path means: itself, or the newest one in it.

    Raises:
        CheckpointError: there is none.
    """
    directory = path if (path / MANIFEST).exists() else latest(path)
    if directory is None:
        raise CheckpointError(f"expected a checkpoint in {path}, found none; give the folder of a finished save")
    return directory


def _verify_share(directory: Path, manifest: Manifest) -> None:
    """Hash this rank's share of the files."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    for name in sorted(manifest.files)[own_rank() :: world]:
        verify(directory, name, manifest.files[name])


def _check(description: Description, manifest: Manifest) -> None:
    """Whether every tensor of the model is in the checkpoint, in the same form, and no other."""
    _same_names("parameter", description.records, manifest.parameters)
    for name, record in description.records.items():
        _check_record(name, record, manifest.parameters[name])
    _check_shared(description, manifest)
    for piece in description.pieces:
        stored = manifest.tensors.get(piece.name)
        if stored is None and torch.Size(piece.shape).numel() == 0:
            continue
        if stored is None:
            raise CheckpointError(
                f"expected '{piece.name}' in the checkpoint, got none; momenta carry part of the weights, so a "
                "checkpoint without them cannot be continued. Save with the optimizer"
            )
        if stored.shape != piece.shape or stored.dtype != piece.dtype_name:
            raise CheckpointError(
                f"expected '{piece.name}' as {piece.dtype_name} of shape {list(piece.shape)}, got {stored.dtype} of "
                f"shape {list(stored.shape)}; convert the model with the recipe of the checkpoint"
            )


def _same_names(what: str, expected: Mapping[str, object], got: Mapping[str, object]) -> None:
    for name in expected:
        if name not in got:
            raise CheckpointError(
                f"expected the {what} '{name}' in the checkpoint, got none; load it into its own model"
            )
    for name in got:
        if name not in expected:
            raise CheckpointError(f"expected a {what} '{name}' in the model, got none; load it into its own model")


def _check_record(name: str, record: ParameterRecord, saved: ParameterRecord) -> None:
    if record.recipe != saved.recipe:
        wanted, got = (item.recipe or {"format": "fp32"} for item in (record, saved))
        field = next(key for key in {**wanted, **got} if wanted.get(key) != got.get(key))
        raise CheckpointError(
            f"expected '{name}' with {field} {wanted.get(field)!r} as in the model, got {got.get(field)!r} in the "
            "checkpoint; convert the model with the recipe of the checkpoint"
        )
    if set(record.scalars) != set(saved.scalars) or record.scalars.get("layout") != saved.scalars.get("layout"):
        raise CheckpointError(
            f"expected optimizer state {sorted(record.scalars)} of '{name}', got {sorted(saved.scalars)}; "
            "load it into the optimizer it was saved from"
        )


def _check_shared(description: Description, manifest: Manifest) -> None:
    """DeepSpeed steps many parameters as one: they must have taken as many steps."""
    seen: dict[int, tuple[str, float]] = {}
    for name, run in description.runs.items():
        for key in SCALARS & run.state.keys():
            value = manifest.parameters[name].scalars[key]
            other, before = seen.setdefault(id(run.state[key]), (name, value))
            if value != before:
                raise CheckpointError(
                    f"expected the same {key} of '{other}' and '{name}', which this engine steps together, got "
                    f"{before:g} and {value:g} in the checkpoint; load it into the engine that saved it"
                )


def _options(model: nn.Module, holder: Holder, manifest: Manifest) -> list[dict[str, Any]]:
    """Options of each of the optimizer's groups: those its parameters had when they were saved."""
    saved = {name: index for index, group in enumerate(manifest.groups) for name in group["params"]}
    names = {id(parameter): name for name, parameter in named_parameters(model, holder).items()}
    result = []
    for number, group in enumerate(holder.checkpoint_groups()):
        indices = {saved.get(names[id(parameter)]) for parameter in group["params"]}
        options = [manifest.groups[index] for index in sorted(i for i in indices if i is not None)]
        plain = [{key: value for key, value in item.items() if key != "params"} for item in options]
        if None in indices or any(item != plain[0] for item in plain):
            raise CheckpointError(
                f"expected the parameters of group {number} with the same options in the checkpoint, got different "
                "ones; make the optimizer with the groups it was saved with"
            )
        result.append({key: tuple(v) if isinstance(v, list) else v for key, v in (plain[0] if plain else {}).items()})
    return result


def _open(directory: Path, pieces: Sequence[Piece], manifest: Manifest) -> dict[str, Any]:
    """The files with what this rank needs, all of which is there in the form that the manifest promises."""
    files: dict[str, Any] = {}
    for stored, run, _, _ in _overlaps(pieces, manifest):
        try:
            if run.file not in files:
                files[run.file] = safe_open(directory / run.file, framework="pt")
            got = files[run.file].get_tensor(run.key)  # a view of the mapped file: nothing is read
        except SafetensorError as error:
            raise CheckpointCorruptError(f"expected '{run.key}' in {directory / run.file}, got {error}") from error
        if (got.numel(), got.dtype) != (run.count, getattr(torch, stored.dtype)):
            raise CheckpointCorruptError(
                f"expected {run.count} elements of {stored.dtype} as '{run.key}' in {directory / run.file}, got "
                f"{got.numel()} of {got.dtype}; use another checkpoint"
            )
    return files


def _read(pieces: Sequence[Piece], manifest: Manifest, files: Mapping[str, Any]) -> None:
    for _, run, piece, (first, end) in _overlaps(pieces, manifest):
        source: Tensor = files[run.file].get_tensor(run.key).view(-1)
        target = piece.as_stored().view(-1)
        target[first - piece.start : end - piece.start].copy_(source[first - run.start : end - run.start])


def _overlaps(
    pieces: Sequence[Piece], manifest: Manifest
) -> Iterator[tuple[StoredTensor, Run, Piece, tuple[int, int]]]:
    """Stored runs that a piece needs elements of, and which ones: first, and behind the last."""
    for piece in pieces:
        stored = manifest.tensors[piece.name] if piece.tensor.numel() else None
        for run in () if stored is None else stored.runs:
            first, end = max(piece.start, run.start), min(piece.end, run.start + run.count)
            if first < end:
                assert stored is not None
                yield stored, run, piece, (first, end)


def _restore_scalars(description: Description, manifest: Manifest) -> None:
    """State that is one number: steps, learning rates seen."""
    for name, run in description.runs.items():
        for key, value in manifest.parameters[name].scalars.items():
            run.state[key].fill_(value)
