"""The manifest: what a checkpoint consists of. A folder without a whole one is not a checkpoint.

It is JSON and carries a hash of itself, of every file and of nothing executable: tensors are in safetensors files, and
no pickle is ever read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eco_dist.checkpoint.pieces import ParameterRecord

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "LATEST"
_CHUNK = 1 << 22


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; nothing was loaded."""


class CheckpointCorruptError(CheckpointError):
    """A checkpoint whose bytes are not those that were written."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """Where a run of elements of a tensor lies.

    Attributes:
        file: its file.
        key: its name there.
        start: first element of the run in the flattened tensor.
        count: number of elements.
    """

    file: str
    key: str
    start: int
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of the checkpoint: global shape, dtype by torch's name, and its runs."""

    shape: tuple[int, ...]
    dtype: str
    runs: tuple[Run, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredFile:
    """Size and SHA-256 of a file."""

    bytes: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: optimizer step it was taken after.
        seed: of stochastic rounding; None without an optimizer.
        groups: options of the optimizer's parameter groups, with the names of their parameters.
        parameters: records by name.
        tensors: by name.
        files: by name.
        versions: of what wrote it.
        extra: what the training program added: data position, schedule, metrics.
    """

    step: int
    seed: int | None
    groups: tuple[dict[str, Any], ...]
    parameters: Mapping[str, ParameterRecord]
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    versions: Mapping[str, str]
    extra: Mapping[str, Any]

    def write(self, path: Path) -> None:
        """Write it as JSON with its own hash."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        text = json.dumps({**content, "digest": _digest(content)}, indent=1, sort_keys=True) + "\n"
        path.write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """The manifest of a checkpoint.

        Raises:
            CheckpointError: there is none, or it is of a newer version.
            CheckpointCorruptError: it is not what was written.
        """
        path = directory / MANIFEST
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            if isinstance(error, UnicodeDecodeError):
                raise CheckpointCorruptError(_not_whole(path)) from error
            raise CheckpointError(
                f"expected a checkpoint with a {MANIFEST} in {directory}, got none ({error}); "
                "give a folder that a finished save has left"
            ) from error
        try:
            content = json.loads(text)
            digest, version = content.pop("digest"), content.pop("format")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CheckpointCorruptError(_not_whole(path)) from error
        if digest != _digest({"format": version, **content}):
            raise CheckpointCorruptError(_not_whole(path))
        if version != FORMAT:
            raise CheckpointError(
                f"expected a checkpoint of format {FORMAT} in {directory}, got format {version}; "
                "load it with the version of eco_dist that wrote it"
            )
        return cls._from_plain(content)

    @classmethod
    def _from_plain(cls, content: dict[str, Any]) -> Manifest:
        records = {
            name: ParameterRecord(**{**record, "shape": tuple(record["shape"])})
            for name, record in content.pop("parameters").items()
        }
        tensors = {
            name: StoredTensor(
                shape=tuple(item["shape"]), dtype=item["dtype"], runs=tuple(Run(**run) for run in item["runs"])
            )
            for name, item in content.pop("tensors").items()
        }
        files = {name: StoredFile(**item) for name, item in content.pop("files").items()}
        for name in files:
            if Path(name).name != name or name in (".", ".."):
                raise CheckpointError(f"expected files inside the checkpoint, got the name {name!r}; do not load it")
        groups = tuple(content.pop("groups"))
        return cls(parameters=records, tensors=tensors, files=files, groups=groups, **content)


def file_digest(path: Path) -> StoredFile:
    """Size and SHA-256 of a file, read in pieces."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return StoredFile(bytes=size, sha256=digest.hexdigest())


def verify(directory: Path, name: str, expected: StoredFile) -> None:
    """Compare a file with what the manifest says of it.

    Raises:
        CheckpointCorruptError: it is missing, or its bytes are others.
    """
    path = directory / name
    try:
        found = file_digest(path)
    except OSError as error:
        raise CheckpointCorruptError(
            f"expected the file {path} of the checkpoint, got none ({error.strerror})"
        ) from None
    if found != expected:
        raise CheckpointCorruptError(
            f"expected {path} with {expected.bytes} bytes and SHA-256 {expected.sha256[:16]}, got {found.bytes} bytes "
            f"and {found.sha256[:16]}; the file was changed after it was written, use another checkpoint"
        )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _not_whole(path: Path) -> str:
    return f"expected {path} as it was written, got other bytes; use another checkpoint"
