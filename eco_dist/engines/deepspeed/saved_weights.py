"""Keep decoded weights out of autograd's hands.

Autograd saves a layer's weight, or a view of it, for backward, which would keep every decoded weight alive until then.
Inside a unit's forward, a saved tensor that lies in the storage of one of its weights is replaced by a note of where it
lay, and decoded again when backward asks for it. Everything else goes to the hooks that were in force before
(activation checkpointing), which these would otherwise switch off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


@dataclasses.dataclass(frozen=True)
class _Note:
    """Where a saved tensor lay in a weight."""

    parameter: nn.Parameter
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True)
class _Passed:
    """What the surrounding hooks made of a tensor, and their way back."""

    value: Any
    unpack: Callable[[Any], Tensor]


class SavedWeights:
    """Saved-tensor hooks of the units that are in their forward."""

    def __init__(self, decode: Callable[[nn.Parameter, Tensor], None]) -> None:
        """Create it; `decode` writes a parameter's stored values over a tensor."""
        self._decode = decode
        self._entered: list[torch.autograd.graph.saved_tensors_hooks] = []

    def enter(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before a unit's forward; its parameters are filled."""
        owners = {parameter.untyped_storage().data_ptr(): parameter for parameter in parameters}
        outer: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor: Tensor) -> Any:
            owner = owners.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
            if owner is not None and tensor.dtype is owner.dtype:
                return _Note(owner, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
            return tensor if outer is None else _Passed(outer[0](tensor), outer[1])

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, self._unpack)
        hooks.__enter__()
        self._entered.append(hooks)

    def leave(self) -> None:
        """After a unit's forward, whether it returned or raised."""
        self._entered.pop().__exit__()

    def _unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, _Note):
            with torch.no_grad():
                values = torch.empty(saved.parameter.shape, dtype=saved.parameter.dtype, device=saved.parameter.device)
                self._decode(saved.parameter, values)
                return values.as_strided(saved.size, saved.stride, saved.offset)
        return saved.unpack(saved.value) if isinstance(saved, _Passed) else saved
