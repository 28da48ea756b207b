"""Leaving: a checkpoint as plain safetensors files that other tools read.

| format               | a quantized weight becomes                                                              |
|----------------------|-----------------------------------------------------------------------------------------|
| `fp32`, `bf16`       | one tensor of that dtype, of the stored or of the virtual weight                         |
| `compressed-tensors` | `NAME` in E4M3 and `NAME_scale`, with the `quantization_config` of that package (E4M3)   |
| `hf-fp8`             | `NAME` in E4M3 and `NAME_scale_inv`, as transformers and torch read it (`export_fp8.py`) |
| `dcp`                | fp32 and the moments, as `torch.distributed.checkpoint` has them of FSDP2 with AdamW     |
| `universal`          | fp32 and the moments, as DeepSpeed has them for AdamW (`export_universal.py`)            |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eco_dist.checkpoint.dcp import write_masters
from eco_dist.checkpoint.export_fp8 import check_codes, codes_and_scales, has_codes, quantization_config
from eco_dist.checkpoint.export_universal import check_adamw, write_universal
from eco_dist.checkpoint.reader import CheckpointReader
from eco_dist.numerics import Rounding

FORMATS = ("fp32", "bf16", "compressed-tensors", "hf-fp8", "dcp", "universal")
_WITH_MOMENTS = {"dcp": write_masters, "universal": write_universal}
_WITH_CODES = ("compressed-tensors", "hf-fp8")
FILE_BYTES = 4 << 30
"""A file is closed once it holds this much."""


def export(
    checkpoint: Path | str,
    target: Path | str,
    *,
    format: str = "bf16",
    virtual: bool = False,
    force: bool = False,
    config: Path | None = None,
) -> list[Path]:
    """Write the weights of a checkpoint in another format.

    Args:
        checkpoint: folder of a checkpoint, or of a run, of which the newest one is taken.
        target: folder for the files; must not exist, or be empty.
        format: one of `FORMATS`.
        virtual: write the virtual weight, without the rounding errors pending in the momentum, for `fp32` and `bf16`.
        force: allow `virtual` after rounding to nearest, where it does harm.
        config: a Hugging Face `config.json` to put beside the weights.

    Returns:
        The files written.

    Raises:
        ValueError: the format does not exist or cannot hold the weights, `virtual` does harm, or the target has files.
        CheckpointError: the checkpoint cannot be read.
    """
    if format not in FORMATS:
        raise ValueError(f"expected format to be one of {', '.join(FORMATS)}, got {format!r}")
    target = Path(target)
    if target.exists() and any(target.iterdir()):
        raise ValueError(f"expected an empty folder for the export, got {target} with files; choose another one")
    reader = CheckpointReader(checkpoint)
    if virtual:
        _check_virtual(reader, format, force)
    if format in _WITH_MOMENTS:
        check_adamw(reader, format)
        _WITH_MOMENTS[format](reader, target)
        return sorted(path for path in target.rglob("*") if path.is_file())
    if format in _WITH_CODES:
        check_codes(reader, format)
    tensors = _codes(reader, format) if format in _WITH_CODES else _plain(reader, format, virtual)
    target.mkdir(parents=True, exist_ok=True)
    files = _write(tensors, target, with_index=format == "hf-fp8")
    content: dict[str, Any] = {} if config is None else json.loads(Path(config).read_text(encoding="utf-8"))
    if format in _WITH_CODES:
        content["quantization_config"] = quantization_config(reader, format)
    if content:
        files.append(target / "config.json")
        files[-1].write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return files


def _check_virtual(reader: CheckpointReader, format: str, force: bool) -> None:
    if format not in ("fp32", "bf16"):
        raise ValueError(
            f"expected format 'fp32' or 'bf16' for virtual weights, got {format!r}, which stores codes or momenta"
        )
    for name in reader.manifest.parameters:
        recipe = reader.recipe(name)
        if recipe is not None and recipe.injects and recipe.rounding is Rounding.NEAREST and not force:
            raise ValueError(
                f"expected stochastic rounding for virtual weights, got '{name}' rounded to nearest, where the "
                "momentum holds more than the pending errors and the virtual weight is worse than the stored one; "
                "force it if you want to compare"
            )


def _plain(reader: CheckpointReader, format: str, virtual: bool) -> Iterator[tuple[str, Tensor]]:
    dtype = torch.float32 if format == "fp32" else torch.bfloat16
    for name in reader.manifest.parameters:
        yield name, (reader.virtual_weight(name) if virtual else reader.weight(name)).to(dtype)
    for name in reader.buffers():
        yield name, reader.tensor(name)


def _codes(reader: CheckpointReader, format: str) -> Iterator[tuple[str, Tensor]]:
    for name in reader.manifest.parameters:
        if has_codes(reader.recipe(name)):
            yield from codes_and_scales(reader, name, format)
        else:
            yield name, reader.weight(name).to(torch.bfloat16)
    for name in reader.buffers():
        yield name, reader.tensor(name)


def _write(tensors: Iterator[tuple[str, Tensor]], target: Path, *, with_index: bool) -> list[Path]:
    """Files of at most about `FILE_BYTES`, and an index of them if there are several or a reader always wants one."""
    written: list[Path] = []
    index: dict[str, str] = {}
    file: dict[str, Tensor] = {}
    held = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if file and held + size > FILE_BYTES:
            written.append(_close(file, target, len(written)))
            file, held = {}, 0
        file[name] = tensor.contiguous()
        index[name] = f"model-{len(written):05d}.safetensors"
        held += size
    written.append(_close(file, target, len(written)))
    if len(written) == 1:
        written = [written[0].rename(target / "model.safetensors")]
        index = dict.fromkeys(index, written[0].name)
        if not with_index:
            return written
    path = target / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=1) + "\n", encoding="utf-8")
    return [*written, path]


def _close(tensors: dict[str, Tensor], target: Path, number: int) -> Path:
    path = target / f"model-{number:05d}.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path
