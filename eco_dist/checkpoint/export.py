"""Leaving: a checkpoint as plain safetensors files that other tools read.

| format               | a quantized weight becomes                                                              |
|----------------------|-----------------------------------------------------------------------------------------|
| `fp32`, `bf16`       | one tensor of that dtype, of the stored or of the virtual weight                         |
| `compressed-tensors` | `NAME` in E4M3 and `NAME_scale`, with the `quantization_config` of that package (E4M3)   |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eco_dist.checkpoint.manifest import CheckpointError
from eco_dist.checkpoint.pieces import SCALE_SUFFIX
from eco_dist.checkpoint.reader import CheckpointReader
from eco_dist.numerics import BLOCK_SIZE, Format, Granularity, Rounding
from eco_dist.recipe import Recipe

FORMATS = ("fp32", "bf16", "compressed-tensors")
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
        format: `fp32`, `bf16` or `compressed-tensors`.
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
    tensors = _compressed(reader) if format == "compressed-tensors" else _plain(reader, format, virtual)
    target.mkdir(parents=True, exist_ok=True)
    files = _write(tensors, target)
    content: dict[str, Any] = {} if config is None else json.loads(Path(config).read_text(encoding="utf-8"))
    if format == "compressed-tensors":
        content["quantization_config"] = _quantization_config(reader)
    if content:
        files.append(target / "config.json")
        files[-1].write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return files


def _check_virtual(reader: CheckpointReader, format: str, force: bool) -> None:
    if format == "compressed-tensors":
        raise ValueError(f"expected format 'fp32' or 'bf16' for virtual weights, got {format!r}, which stores codes")
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
    for name in _buffers(reader):
        yield name, reader.tensor(name)


def _compressed(reader: CheckpointReader) -> Iterator[tuple[str, Tensor]]:
    for name in reader.manifest.parameters:
        recipe = reader.recipe(name)
        if recipe is None or not recipe.quantizes or recipe.format is Format.BF16:
            yield name, reader.weight(name).to(torch.bfloat16)
            continue
        if recipe.format is not Format.E4M3:
            raise ValueError(
                f"expected E4M3 weights for compressed-tensors, got '{name}' in {recipe.format}; export as bf16"
            )
        yield name, reader.tensor(name)
        yield name + SCALE_SUFFIX, reader.scales(name).reshape(-1) if _is_whole(recipe) else reader.scales(name)
    for name in _buffers(reader):
        yield name, reader.tensor(name)


def _is_whole(recipe: Recipe) -> bool:
    return recipe.granularity is Granularity.TENSOR


def _buffers(reader: CheckpointReader) -> list[str]:
    """Tensors that belong to no parameter."""
    parameters = reader.manifest.parameters
    return [
        name
        for name in reader.manifest.tensors
        if name not in parameters
        and name.removesuffix(SCALE_SUFFIX) not in parameters
        and not any(name.startswith(f"{parameter}.") for parameter in parameters)
    ]


def _quantization_config(reader: CheckpointReader) -> dict[str, Any]:
    """What compressed-tensors needs to know: FP8, who shares a scale, which modules are not quantized."""
    recipes = {name: reader.recipe(name) for name in reader.manifest.parameters}
    quantized = {name: r for name, r in recipes.items() if r is not None and r.format is Format.E4M3}
    granularities = {recipe.granularity for recipe in quantized.values()}
    if len(granularities) != 1:
        raise CheckpointError(f"expected one granularity for compressed-tensors, got {sorted(map(str, granularities))}")
    groups: dict[Granularity | None, dict[str, Any]] = {
        Granularity.BLOCK: {"strategy": "group", "group_size": BLOCK_SIZE},
        Granularity.ROW: {"strategy": "channel"},
        Granularity.TENSOR: {"strategy": "tensor"},
    }
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **groups[granularities.pop()]}
    ignored = sorted({name.rpartition(".")[0] for name in recipes if name.endswith("weight") and name not in quantized})
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignored,
    }


def _write(tensors: Iterator[tuple[str, Tensor]], target: Path) -> list[Path]:
    """Files of at most about `FILE_BYTES`, and an index of them if there are several."""
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
        return [written[0].rename(target / "model.safetensors")]
    path = target / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=1) + "\n", encoding="utf-8")
    return [*written, path]


def _close(tensors: dict[str, Tensor], target: Path, number: int) -> Path:
    path = target / f"model-{number:05d}.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path
