"""Writing a checkpoint so that there is either a whole one or none, whenever the machine stops.

    folder step-N.tmp: every rank writes its file under another name, flushes, syncs, renames
    all ranks: size and hash of each file to rank 0
    rank 0: manifest, sync, folder renamed to step-N, LATEST replaced, sync
    rank 0: older checkpoints removed, never the one LATEST names

A crash anywhere leaves the checkpoint before, and a folder that the next save removes.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eco_dist.checkpoint import faults
from eco_dist.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    CheckpointError,
    Manifest,
    Run,
    StoredFile,
    StoredTensor,
    file_digest,
)
from eco_dist.checkpoint.pieces import Piece

_FOLDER = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_UNFINISHED = ".tmp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Written:
    """What one rank has written: its file, and the runs in it by the name of their tensor."""

    name: str
    file: StoredFile
    runs: Mapping[str, StoredTensor]


def unfinished_folder(root: Path, step: int) -> Path:
    """The folder a save of this step works in; whatever earlier saves left unfinished is removed. Rank 0 alone."""
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"*{_UNFINISHED}"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    folder = root / f"step-{step:08d}{_UNFINISHED}"
    folder.mkdir()
    return folder


def write_rank(folder: Path, pieces: Sequence[Piece], rank: int) -> Written:
    """Write the pieces this rank saves into its file."""
    faults.point("save:begin")
    name = f"rank-{rank:05d}.safetensors"
    tensors: dict[str, Tensor] = {}
    runs: dict[str, list[Run]] = {}
    shapes: dict[str, Piece] = {}
    for piece in pieces:
        if not piece.saved or piece.tensor.numel() == 0:
            continue
        key = piece.name if piece.name not in tensors else f"{piece.name}@{piece.start}"
        tensors[key] = piece.as_stored()
        runs.setdefault(piece.name, []).append(Run(file=name, key=key, start=piece.start, count=piece.tensor.numel()))
        shapes[piece.name] = piece
    part = folder / f"{name}.part"
    try:
        save_file(tensors, part)
    except SafetensorError as error:
        raise CheckpointError(f"expected to write {part}, got {error}; make room for it") from error
    faults.point("save:mid-shard")
    sync(part)
    part.rename(folder / name)
    faults.point("save:after-data")
    stored = {
        key: StoredTensor(shape=shapes[key].shape, dtype=shapes[key].dtype_name, runs=tuple(found))
        for key, found in runs.items()
    }
    return Written(name=name, file=file_digest(folder / name), runs=stored)


def commit(root: Path, folder: Path, manifest: Manifest, keep: int | None) -> Path:
    """Turn an unfinished folder, whose files are all written, into the latest checkpoint. Rank 0 alone."""
    manifest.write(folder / MANIFEST)
    sync(folder / MANIFEST)
    faults.point("save:after-manifest")
    sync(folder)
    final = _free_name(root, manifest.step)
    faults.point("save:before-rename")
    folder.rename(final)
    sync(root)
    faults.point("save:before-latest")
    temporary = root / f"{LATEST}{_UNFINISHED}"
    temporary.write_text(final.name + "\n", encoding="utf-8")
    sync(temporary)
    temporary.replace(root / LATEST)
    sync(root)
    faults.point("save:after-latest")
    _prune(root, final, keep)
    return final


def merge(written: Sequence[Written]) -> tuple[dict[str, StoredTensor], dict[str, StoredFile]]:
    """Tensors and files of all ranks.

    Raises:
        CheckpointError: the runs of a tensor do not cover it: a rank did not describe what it holds.
    """
    tensors: dict[str, StoredTensor] = {}
    for part in written:
        for name, tensor in part.runs.items():
            before = tensors[name].runs if name in tensors else ()
            tensors[name] = dataclasses.replace(tensor, runs=(*before, *tensor.runs))
    for name, tensor in tensors.items():
        runs = sorted(tensor.runs, key=lambda run: run.start)
        end = 0
        for run in runs:
            if run.start != end:
                break
            end += run.count
        if end != torch.Size(tensor.shape).numel() or end != sum(run.count for run in runs):
            raise CheckpointError(f"expected runs that cover '{name}' of shape {tensor.shape}, got {runs}")
    return tensors, {part.name: part.file for part in written}


def checkpoints(root: Path) -> list[Path]:
    """Finished checkpoints in a folder, oldest step first."""
    found = []
    for folder in root.iterdir() if root.is_dir() else ():
        match = _FOLDER.fullmatch(folder.name)
        if match and (folder / MANIFEST).exists():
            found.append(((int(match[1]), int(match[2] or 0)), folder))
    return [folder for _, folder in sorted(found)]


def sync(path: Path) -> None:
    """Have the system write a file, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free_name(root: Path, step: int) -> Path:
    """A name that no checkpoint has: a step saved twice gets another folder, the first one is never in danger."""
    name, number = root / f"step-{step:08d}", 0
    while name.exists():
        number += 1
        name = root / f"step-{step:08d}-{number}"
    return name


def _prune(root: Path, newest: Path, keep: int | None) -> None:
    if keep is None:
        return
    others = [folder for folder in checkpoints(root) if folder != newest]
    for folder in others[: max(0, len(others) - (keep - 1))]:
        (folder / MANIFEST).unlink()  # first of all it stops being a checkpoint
        shutil.rmtree(folder)
