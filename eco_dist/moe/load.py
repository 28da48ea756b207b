"""Experts of Hugging Face checkpoints: Mixtral, Qwen3-MoE and DeepSeek-MoE layers from safetensors.

They keep each expert apart, `down` transposed, and name things differently; the numbers are copied, not computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from eco_dist.moe.layer import MoELayer
from eco_dist.weights import QuantizedWeight


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """How a family names the parts of a layer, below the layer's prefix.

    Attributes:
        router: of the router's weight.
        gate, up, down: of an expert's matrices; `{}` is its number.
        shared: of the shared expert's three matrices, `{}` is gate, up or down; None without one.
    """

    router: str
    gate: str
    up: str
    down: str
    shared: str | None = None


FAMILIES = {
    "mixtral": Names(
        router="block_sparse_moe.gate.weight",
        gate="block_sparse_moe.experts.{}.w1.weight",
        up="block_sparse_moe.experts.{}.w3.weight",
        down="block_sparse_moe.experts.{}.w2.weight",
    ),
    "qwen3_moe": Names(
        router="mlp.gate.weight",
        gate="mlp.experts.{}.gate_proj.weight",
        up="mlp.experts.{}.up_proj.weight",
        down="mlp.experts.{}.down_proj.weight",
    ),
    "deepseek": Names(
        router="mlp.gate.weight",
        gate="mlp.experts.{}.gate_proj.weight",
        up="mlp.experts.{}.up_proj.weight",
        down="mlp.experts.{}.down_proj.weight",
        shared="mlp.shared_experts.{}_proj.weight",
    ),
}
"""Families by name. Mixtral and Qwen3 want `score` softmax and `normalize` true, as their configurations say."""


@torch.no_grad()
def load_layer(layer: MoELayer, folder: Path | str, prefix: str, family: str) -> None:
    """Fill a layer from the safetensors files of a checkpoint, one expert at a time.

    Args:
        layer: not converted and not sharded yet; gated, with as many experts as the checkpoint has.
        folder: of the `*.safetensors` files.
        prefix: of the decoder layer, such as `model.layers.3.`.
        family: a name of `FAMILIES`.

    Raises:
        ValueError: for an unknown family, a layer that is converted, sharded or not gated, or a tensor that is missing
            or has another shape. What was read before it has been copied then.
    """
    if family not in FAMILIES:
        raise ValueError(f"expected family to be one of {', '.join(FAMILIES)}, got {family!r}")
    mlp, names = layer.experts.mlp, FAMILIES[family]
    if isinstance(mlp.w1, DTensor | QuantizedWeight):
        raise ValueError(f"expected a plain layer, got a {type(mlp.w1).__name__}; load before converting and sharding")
    if mlp.v1 is None or (layer.shared_expert is None) != (names.shared is None):
        raise ValueError(
            f"expected a gated layer {'without' if names.shared is None else 'with'} a shared expert for family "
            f"'{family}', got glu={layer.config.glu} and shared_hidden={layer.config.shared_hidden}"
        )
    stored = _Stored(Path(folder), prefix)
    stored.copy(names.router, layer.router.layer.weight)
    for expert in range(layer.config.experts):
        rows = slice(expert * layer.config.hidden, (expert + 1) * layer.config.hidden)
        stored.copy(names.gate.format(expert), mlp.w1[rows])
        stored.copy(names.up.format(expert), mlp.v1[rows])
        stored.copy(names.down.format(expert), mlp.w2[rows].t())
    if stored.has(names.gate.format(layer.config.experts)):
        raise ValueError(f"expected {layer.config.experts} experts below {prefix} in {folder}, got more")
    if layer.shared_expert is not None and names.shared is not None:
        for part in ("gate", "up", "down"):
            stored.copy(names.shared.format(part), layer.shared_expert.get_parameter(f"{part}_proj.weight"))


class _Stored:
    """Tensors of several safetensors files, read when they are asked for."""

    def __init__(self, folder: Path, prefix: str) -> None:
        """Open the files and list their tensors."""
        self._folder, self._prefix = folder, prefix
        self._files = dict(_names_of(folder))
        if not self._files:
            raise ValueError(f"expected safetensors files in {folder}, found none; check the folder")

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return self._prefix + name in self._files

    def copy(self, name: str, target: Tensor) -> None:
        """Copy a tensor into a part of a parameter."""
        if not self.has(name):
            raise ValueError(f"expected {self._prefix}{name} in {self._folder}, found none; check prefix and family")
        with safe_open(str(self._files[self._prefix + name]), framework="pt") as file:
            tensor = file.get_tensor(self._prefix + name)
        if tensor.shape != target.shape:
            raise ValueError(
                f"expected {self._prefix}{name} to have shape {list(target.shape)}, got {list(tensor.shape)}; "
                "give the layer the checkpoint's sizes"
            )
        target.copy_(tensor)


def _names_of(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
                yield name, path
