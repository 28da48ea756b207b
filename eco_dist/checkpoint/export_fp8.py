"""E4M3 codes in the layouts of other tools, and the `quantization_config` that tells them how to read these.

| format                | of a weight `M.weight`                                | granularities                    |
|-----------------------|-------------------------------------------------------|----------------------------------|
| `compressed-tensors`  | `M.weight`, `M.weight_scale`                          | block, row, tensor               |
| `hf-fp8`              | `M.weight`, `M.weight_scale_inv`, one fp32 a block    | tensor: blocks of 128 x 128;     |
|                       |                                                       | block and row: blocks of 1 x 128 |

The scales of `hf-fp8` are those that codes are multiplied with, whatever its name for them says. Its blocks are cut
evenly, so a width that 128 does not divide has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from eco_dist.checkpoint.manifest import CheckpointError
from eco_dist.checkpoint.pieces import SCALE_SUFFIX
from eco_dist.checkpoint.reader import CheckpointReader
from eco_dist.numerics import BLOCK_SIZE, Format, Granularity
from eco_dist.recipe import Recipe

HF_SCALE_SUFFIX = "_scale_inv"


def codes_and_scales(reader: CheckpointReader, name: str, format: str) -> Iterator[tuple[str, Tensor]]:
    """What a weight becomes in a format that `check_codes` has found to hold it."""
    recipe, scales = reader.recipe(name), reader.scales(name)
    is_whole = recipe is not None and recipe.granularity is Granularity.TENSOR
    yield name, reader.tensor(name)
    if format == "hf-fp8":
        rows, columns = reader.manifest.parameters[name].shape
        grid = (rows // BLOCK_SIZE if is_whole else rows, columns // BLOCK_SIZE)
        yield name + HF_SCALE_SUFFIX, scales.expand(grid).contiguous()
    else:
        yield name + SCALE_SUFFIX, scales.reshape(-1) if is_whole else scales


def has_codes(recipe: Recipe | None) -> bool:
    """Whether a weight is codes with scales."""
    return recipe is not None and recipe.quantizes and recipe.format is not Format.BF16


def check_codes(reader: CheckpointReader, format: str) -> None:
    """Whether a format holds all weights of a checkpoint.

    Raises:
        ValueError: it does not hold one.
    """
    for name in reader.manifest.parameters:
        recipe = reader.recipe(name)
        if recipe is None or not has_codes(recipe):
            continue
        if recipe.format is not Format.E4M3:
            raise ValueError(f"expected E4M3 weights for {format}, got '{name}' in {recipe.format}; export as bf16")
        if format == "hf-fp8":
            _check_hf(name, reader.manifest.parameters[name].shape, recipe)


def quantization_config(reader: CheckpointReader, format: str) -> dict[str, Any]:
    """What other tools need to know: FP8, who shares a scale, which modules are not quantized.

    Raises:
        CheckpointError: the weights have different granularities.
    """
    recipes = {name: reader.recipe(name) for name in reader.manifest.parameters}
    quantized = {name: r for name, r in recipes.items() if r is not None and r.format is Format.E4M3}
    granularities = {recipe.granularity for recipe in quantized.values()}
    if len(granularities) != 1:
        raise CheckpointError(f"expected one granularity for {format}, got {sorted(map(str, granularities))}")
    granularity = granularities.pop()
    ignored = sorted({name.rpartition(".")[0] for name in recipes if name.endswith("weight") and name not in quantized})
    if format == "hf-fp8":
        return {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK_SIZE if granularity is Granularity.TENSOR else 1, BLOCK_SIZE],
            "modules_to_not_convert": ignored,
        }
    groups: dict[Granularity | None, dict[str, Any]] = {
        Granularity.BLOCK: {"strategy": "group", "group_size": BLOCK_SIZE},
        Granularity.ROW: {"strategy": "channel"},
        Granularity.TENSOR: {"strategy": "tensor"},
    }
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **groups[granularity]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ignored,
    }


def _check_hf(name: str, shape: tuple[int, ...], recipe: Recipe) -> None:
    is_whole = recipe.granularity is Granularity.TENSOR
    if len(shape) != 2 or not name.endswith(".weight"):
        raise ValueError(f"expected matrices named '*.weight' for hf-fp8, got '{name}' of shape {list(shape)}")
    if shape[1] % BLOCK_SIZE or (is_whole and shape[0] % BLOCK_SIZE):
        what = "rows and columns" if is_whole else "columns"
        raise ValueError(
            f"expected {what} that {BLOCK_SIZE} divides for hf-fp8, got '{name}' of shape {list(shape)}, whose blocks "
            "other tools would cut elsewhere; export as compressed-tensors or bf16"
        )
