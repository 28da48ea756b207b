"""Plain weights in a safetensors file: what a run may start from, and what it leaves behind.

This is an exchange format for fine-tuning studies: fp32 or bf16 values of the stored weights, one tensor a parameter,
readable by anything. It is not a checkpoint: it has no codes, no scales and no moments, and under ECO the first moment
carries weight information, so a run cannot be *continued* from it. Full checkpoints are a feature of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from eco_dist.training.ranks import Ranks
from eco_dist.weights import QuantizedWeight

__all__ = ["load_plain_weights", "plain_weight", "save_plain_weights"]

PLAIN_DTYPES = ("F32", "BF16")


@torch.no_grad()
def load_plain_weights(model: nn.Module, file: Path) -> None:
    """Fill a plain model, before it is converted or sharded, from a file of fp32 or bf16 weights.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no safetensors file, or its names, shapes or dtypes are not the model's.
    """
    if not file.is_file():
        raise FileNotFoundError(f"expected a safetensors file at model.init_from={file}, found none; check the path")
    own = dict(model.named_parameters())
    try:
        with safe_open(str(file), framework="pt") as stored:
            names = set(stored.keys())
            _check_names(set(own), names, file)
            for name in sorted(names):
                _check_tensor(name, own[name], stored.get_slice(name), file)
                own[name].copy_(stored.get_tensor(name))
    except SafetensorError as error:
        raise ValueError(f"expected a safetensors file at {file}, got: {error}; name another one") from error


@torch.no_grad()
def plain_weight(parameter: Tensor) -> Tensor:
    """The whole stored weight as an ordinary tensor, decoded where it is codes; collective where it is sharded."""
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()
    return whole.decode() if isinstance(whole, QuantizedWeight) else whole


def save_plain_weights(weights: Iterable[tuple[str, Tensor]], file: Path, ranks: Ranks) -> None:
    """Write the decoded stored weights, codes * scales, as fp32; collective, rank 0 writes.

    Args:
        weights: names and whole weights, gathered one by one.
        file: the safetensors file.
        ranks: that hold the model.
    """
    gathered: dict[str, Tensor] = {}
    for name, whole in weights:
        if ranks.is_first:
            gathered[name] = whole.float().cpu().contiguous()
    if ranks.is_first:
        save_file(gathered, str(file))


def _check_names(own: set[str], stored: set[str], file: Path) -> None:
    missing, extra = sorted(own - stored), sorted(stored - own)
    if missing or extra:
        problem = f"no {missing[0]}" if missing else f"an unknown {extra[0]}"
        counts = f"{len(missing)} missing, {len(extra)} unknown"
        raise ValueError(
            f"expected the weights of this model in {file}, got {problem} ({counts}); "
            "set model.preset to that of the run that wrote it"
        )


def _check_tensor(name: str, parameter: Tensor, stored: object, file: Path) -> None:
    shape, dtype = list(stored.get_shape()), stored.get_dtype()  # type: ignore[attr-defined]
    if dtype not in PLAIN_DTYPES:
        raise ValueError(f"expected fp32 or bf16 weights in {file}, got {dtype} for {name}; decode them first")
    if shape == list(parameter.shape):
        return
    if name in ("embed.weight", "head.weight") and shape[1:] == list(parameter.shape[1:]):
        raise ValueError(
            f"expected a vocabulary of {parameter.shape[0]} (from data.tokenizer), got {shape[0]} in {file}; "
            "set data.tokenizer to the tokenizer of the run that wrote it"
        )
    raise ValueError(
        f"expected shape {list(parameter.shape)} for {name}, got {shape} in {file}; "
        "set model.preset to that of the run that wrote it"
    )
