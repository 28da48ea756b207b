"""Saving: at once, or in the background from a snapshot."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from eco_dist.checkpoint.collective import own_rank, together
from eco_dist.checkpoint.holders import Holder, holder_of, named_parameters
from eco_dist.checkpoint.manifest import CheckpointError, Manifest
from eco_dist.checkpoint.pieces import Description, describe
from eco_dist.checkpoint.write import commit, merge, unfinished_folder, write_rank
from eco_dist.optim import ECOOptimizer


def save(
    root: Path | str,
    model: nn.Module,
    optimizer: ECOOptimizer | Holder,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
) -> Path:
    """Write a checkpoint of a model and its optimizer; collective, and done when it returns.

    Args:
        root: folder of all checkpoints of a run, shared by all ranks.
        model: whole, sharded by FSDP2 or FSDP1, or a DeepSpeed engine.
        optimizer: its optimizer (`engine.optimizer`, what `fsdp1.convert` returned); momenta carry part of the weights,
            so there is no checkpoint without them.
        step: optimizer step it is taken after.
        extra: what the training program needs to go on, as JSON: data position, schedule.
        keep: newest checkpoints to keep; None keeps all.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: a rank could not write, on all ranks; the checkpoints before are as they were.
    """
    work = _Work.of(Path(root), model, optimizer, step=step, extra=extra, keep=keep)
    return work.finish(None)


_LOWEST_PRIORITY = 19


class AsyncSaver:
    """Saves in the background: `save` takes a snapshot and returns, training goes on while it is written.

    The snapshot needs the static memory of this rank once more, on the CPU.
    """

    def __init__(self, root: Path | str, *, keep: int | None = None) -> None:
        """Collective: opens a process group of its own, which the background thread uses."""
        self._root, self._keep = Path(root), keep
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() and dist.get_world_size() > 1 else None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._folder: Path | None = None

    def save(
        self, model: nn.Module, optimizer: ECOOptimizer | Holder, *, step: int, extra: Mapping[str, Any] | None = None
    ) -> None:
        """Take a snapshot and begin to write it, once the save before is done; collective.

        Raises:
            CheckpointError: the save before has failed, or this one could not begin.
        """
        self.wait()
        work = _Work.of(self._root, model, optimizer, step=step, extra=extra, keep=self._keep).snapshot()
        self._thread = threading.Thread(target=self._finish, args=(work,), name="checkpoint")
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> Path | None:
        """Wait for the save under way; the folder of the last one, None if there was none.

        Raises:
            CheckpointError: it has failed.
            TimeoutError: it takes longer than `timeout_s`; it goes on.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"expected the save under way to end within {timeout_s:g} s; wait longer")
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        return self._folder

    def _finish(self, work: _Work) -> None:
        # Where every processor trains, hashing and writing take what training leaves. Linux knows the priority of a
        # thread; elsewhere it would be that of the whole process.
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        try:
            self._folder = work.finish(self._group)
        except Exception as error:
            self._failure = error


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Work:
    """A save under way on this rank."""

    root: Path
    folder: Path
    description: Description
    step: int
    seed: int | None
    groups: tuple[dict[str, Any], ...]
    extra: dict[str, Any]
    keep: int | None

    @classmethod
    def of(
        cls,
        root: Path,
        model: nn.Module,
        optimizer: ECOOptimizer | Holder,
        *,
        step: int,
        extra: Mapping[str, Any] | None,
        keep: int | None,
    ) -> _Work:
        if keep is not None and keep < 1:
            raise CheckpointError(f"expected keep >= 1 or None, got {keep}: the newest checkpoint is never removed")
        folders = together(lambda: unfinished_folder(root, step) if own_rank() == 0 else None)
        folder = folders[0]
        assert folder is not None
        holder = holder_of(optimizer, model)
        return cls(
            root=root,
            folder=folder,
            description=describe(model, optimizer),
            step=step,
            seed=holder.checkpoint_seed(),
            groups=_groups(model, holder),
            extra=dict(extra or {}),
            keep=keep,
        )

    def snapshot(self) -> _Work:
        """The same with copies of all tensors this rank writes, on the CPU."""
        pieces = tuple(
            dataclasses.replace(piece, tensor=piece.tensor.detach().to("cpu", copy=True))
            for piece in self.description.pieces
            if piece.saved
        )
        return dataclasses.replace(self, description=dataclasses.replace(self.description, pieces=pieces))

    def finish(self, group: dist.ProcessGroup | None) -> Path:
        """Write, then commit on rank 0; collective."""
        written = together(lambda: write_rank(self.folder, self.description.pieces, own_rank()), group)

        def publish() -> Path | None:
            if own_rank() != 0:
                return None
            tensors, files = merge(written)
            manifest = Manifest(
                step=self.step,
                seed=self.seed,
                groups=self.groups,
                parameters=self.description.records,
                tensors=tensors,
                files=files,
                versions={"torch": torch.__version__, "eco_dist": importlib.metadata.version("eco-dist")},
                extra=self.extra,
            )
            return commit(self.root, self.folder, manifest, self.keep)

        folders = together(publish, group)
        assert folders[0] is not None
        return folders[0]


def _groups(model: nn.Module, holder: Holder) -> tuple[dict[str, Any], ...]:
    """Options of the parameter groups, with names in the place of parameters."""
    names = {id(parameter): name for name, parameter in named_parameters(model, holder).items()}
    return tuple(
        {
            **{key: value for key, value in group.items() if key != "params"},
            "params": [names[id(p)] for p in group["params"]],
        }
        for group in holder.checkpoint_groups()
    )
