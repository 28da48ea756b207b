"""Weights of other tools, one parameter at a time, under the names of the model.

| what                                   | has                                                                    |
|----------------------------------------|------------------------------------------------------------------------|
| safetensors: a file, a folder of them  | fp32, bf16, fp16; E4M3 with `NAME_scale` or `NAME_scale_inv`             |
| `torch.distributed.checkpoint`         | weights, and AdamW's moments as `get_state_dict` names them            |
| DeepSpeed universal checkpoint         | fp32 masters and AdamW's moments; our codes, if `export` wrote it      |
| a mapping of tensors                   | weights, such as `get_fp32_state_dict_from_zero_checkpoint` returns       |

Only safetensors are free of pickle: take checkpoints of the other two from where you trust.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eco_dist.checkpoint.manifest import CheckpointError
from eco_dist.numerics import BLOCK_SIZE
from eco_dist.optim import StateKey
from eco_dist.recipe import Recipe

CODES_FILE = "eco.safetensors"
"""Codes and scales of a parameter beside its files in a universal checkpoint, where DeepSpeed looks for `*.pt`."""
MOMENTS = (StateKey.EXP_AVG, StateKey.EXP_AVG_SQ)
_SCALES = ("_scale", "_scale_inv")
_PREFIXES = tuple(app + what for app in ("", "app.") for what in ("", "model.", "optim.state.", "optimizer.state."))
"""What programs put in front of the names of weights and of optimizer state."""
_READABLE = (torch.float32, torch.bfloat16, torch.float16)


class Source(Protocol):
    """Where weights come from; every rank reads whole parameters."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of a parameter, or its number of elements alone; None if there is none of that name."""

    def values(self, name: str) -> Tensor:
        """Values of a parameter in fp32."""

    def codes(self, name: str) -> tuple[Tensor, Tensor] | None:
        """E4M3 codes and a scale for each 128 columns of each row; None if it is not stored so."""

    def as_stored(self, name: str, recipe: Recipe) -> tuple[Tensor, Tensor] | None:
        """Codes and scales as the recipe stores them, where the source has just these."""

    def moments(self, name: str) -> tuple[dict[str, Tensor], float]:
        """AdamW's moments in fp32 and steps taken; empty and 0 if there are none."""


def source_of(where: Path | str | Mapping[str, Tensor]) -> Source:
    """The source that a path or a mapping means.

    Raises:
        CheckpointError: there is nothing there that can be read.
    """
    if isinstance(where, Mapping):
        return _InMemory(where)
    path = Path(where)
    if (path / ".metadata").is_file():
        return _Distributed(path)
    if (path / "zero").is_dir():
        return _Universal(path / "zero")
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(
            f"expected safetensors files, a torch.distributed.checkpoint or a universal checkpoint in {path}, found "
            "none of them; checkpoints of eco_dist are read with eco_dist.checkpoint.load"
        )
    return _Safetensors(files)


class _Plain:
    """A source without codes and moments, unless it says otherwise."""

    def codes(self, name: str) -> tuple[Tensor, Tensor] | None:
        return None

    def as_stored(self, name: str, recipe: Recipe) -> tuple[Tensor, Tensor] | None:
        return None

    def moments(self, name: str) -> tuple[dict[str, Tensor], float]:
        return {}, 0.0


class _InMemory(_Plain):
    """Tensors by name."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._tensors[name].shape) if name in self._tensors else None

    def values(self, name: str) -> Tensor:
        return _readable(self._tensors[name], name)


class _Safetensors(_Plain):
    """Files of safetensors, codes among them."""

    def __init__(self, files: list[Path]) -> None:
        self._files: dict[str, Any] = {}
        for path in files:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"expected a safetensors file at {path}, got: {error}") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._files[name].get_slice(name).get_shape()) if name in self._files else None

    def codes(self, name: str) -> tuple[Tensor, Tensor] | None:
        codes = self._tensor(name)
        if codes.dtype is not torch.float8_e4m3fn:
            return None
        keys = [name + suffix for suffix in _SCALES if name + suffix in self._files]
        if not keys:
            raise CheckpointError(f"expected scales '{name}_scale' or '{name}_scale_inv' beside the codes, got none")
        return codes, _for_every_block(self._tensor(keys[0]).float(), codes.shape, keys[0])

    def values(self, name: str) -> Tensor:
        stored = self.codes(name)
        if stored is None:
            return _readable(self._tensor(name), name)
        codes, scales = stored
        return codes.float() * scales.repeat_interleave(BLOCK_SIZE, -1)[..., : codes.shape[-1]]

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor


class _Distributed(_Plain):
    """A `torch.distributed.checkpoint`."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._path = path
        entries = FileSystemReader(path).read_metadata().state_dict_metadata
        self._tensors = {key: entry for key, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}

    def shape(self, name: str) -> tuple[int, ...] | None:
        key = self._key(name)
        return None if key is None else tuple(self._tensors[key].size)

    def values(self, name: str) -> Tensor:
        key = self._key(name)
        assert key is not None
        return _readable(self._read(key), name)

    def moments(self, name: str) -> tuple[dict[str, Tensor], float]:
        keys = {key: self._key(f"{name}.{key}") for key in (*MOMENTS, StateKey.STEP)}
        found = {key: self._read(stored).float() for key, stored in keys.items() if stored is not None}
        step = found.pop(StateKey.STEP, torch.tensor(0.0))
        return found, float(step)

    def _key(self, name: str) -> str | None:
        return next((prefix + name for prefix in _PREFIXES if prefix + name in self._tensors), None)

    def _read(self, key: str) -> Tensor:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        entry = self._tensors[key]
        state = {key: torch.empty(entry.size, dtype=entry.properties.dtype)}
        load(state, storage_reader=FileSystemReader(self._path), no_dist=True)
        return state[key]


class _Universal(_Plain):
    """What `ds_to_universal` or our export leaves: a folder a parameter. Those of stage 3 are flat."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def shape(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.values(name).shape) if (self._path / name).is_dir() else None

    def values(self, name: str) -> Tensor:
        return self._read(name, "fp32")

    def as_stored(self, name: str, recipe: Recipe) -> tuple[Tensor, Tensor] | None:
        path = self._path / name / CODES_FILE
        if not path.is_file():
            return None
        with safe_open(path, framework="pt") as file:
            if file.metadata() != storage_of(recipe):
                return None
            return file.get_tensor("codes"), file.get_tensor("scales")

    def moments(self, name: str) -> tuple[dict[str, Tensor], float]:
        found = {key: self._read(name, key) for key in MOMENTS if (self._path / name / f"{key}.pt").is_file()}
        return found, self._step(name) if found else 0.0

    def _step(self, name: str) -> float:
        path = self._path / name / f"{StateKey.STEP}.pt"
        if path.is_file():
            return float(torch.load(path, weights_only=True))
        common = torch.load(self._path / "optimizer_state.pt", weights_only=False)["optimizer_state_dict"]  # stage 3
        return float(common["state"][0][StateKey.STEP])

    def _read(self, name: str, key: str) -> Tensor:
        stored = torch.load(self._path / name / f"{key}.pt", weights_only=True, mmap=True)
        tensor: Tensor = stored["param"] if isinstance(stored, dict) else stored
        return tensor.float()


def storage_of(recipe: Recipe) -> dict[str, str]:
    """The fields of a recipe that say what its codes and scales mean."""
    return {key: str(recipe.to_dict()[key]) for key in ("format", "granularity")}


def _readable(tensor: Tensor, name: str) -> Tensor:
    if tensor.dtype not in _READABLE:
        raise CheckpointError(f"expected fp32, bf16, fp16 or E4M3 values of '{name}', got {tensor.dtype}")
    return tensor.float()


def _for_every_block(scales: Tensor, shape: torch.Size, name: str) -> Tensor:
    """Scales of a tensor, of rows, or of blocks of any height as one for each 128 columns of each row."""
    rows, blocks = shape[0], -(-shape[-1] // BLOCK_SIZE)
    if scales.ndim < 2:
        scales = scales.reshape(-1, 1)
    if scales.shape[0] not in (1, rows):
        scales = scales.repeat_interleave(BLOCK_SIZE, 0)[:rows]
    if len(shape) != 2 or scales.shape[0] not in (1, rows) or scales.shape[1] not in (1, blocks):
        raise CheckpointError(
            f"expected '{name}' with a scale for the tensor, for each row, or for blocks of 128 columns, got shape "
            f"{list(scales.shape)} for codes of shape {list(shape)}"
        )
    return scales.expand(rows, blocks).contiguous()
