"""A FSDP1 handle without weights: what it gathers is decoded from a chunk of codes.

[Note: hollow handles]
FSDP1 keeps this rank's chunk of a flat parameter in `_local_shard`, and everything it computes with starts from there.
We put one NaN in its place that looks as long as the chunk (nothing reads it; if something did, it would show), and
override, on the handle itself, the places that would read or write it:

| method                     | when                               | ours                                              |
|----------------------------|------------------------------------|---------------------------------------------------|
| `_use_low_precision_shard` | mixed precision, before a gather   | nothing: `_all_gather_flat_param` decodes         |
| `_all_gather_flat_param`   | gather                             | decodes into this rank's part of the gathered one |
| `pre_unshard`              | `NO_SHARD`, which gathers nothing  | decodes                                           |
| `pre_unshard`, `reshard`   | `summon_full_params`, `state_dict` | a real chunk for FSDP to write into; then encoded |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp._common_utils import HandleTrainingState
from torch.distributed.utils import _alloc_storage

from eco_dist.engines.fsdp1.chunk import Chunk


class HollowHandle:
    """Our methods on a handle of FSDP1.

    Attributes:
        handle: FSDP's handle.
        chunk: what this rank holds in the place of its fp32 chunk.
        on_write: called on all ranks after the weights were written from outside.
    """

    def __init__(self, handle: Any, chunk: Chunk, nothing: Tensor) -> None:
        """Drop the fp32 chunk.

        Args:
            handle: sharded, of an FSDP model that has been initialized.
            chunk: has its values.
            nothing: one element.
        """
        self.handle, self.chunk = handle, chunk
        self.on_write: Callable[[], None] = lambda: None
        self._version = 0
        ours = {
            "_use_low_precision_shard": self._use_low_precision_shard,
            "_all_gather_flat_param": self._all_gather_flat_param,
            "pre_unshard": self._pre_unshard,
            "reshard": self._reshard,
        }
        self._original = {name: getattr(handle, name) for name in ours}
        for name, method in ours.items():
            setattr(handle, name, torch.compiler.disable(method))  # as torch.compile leaves FSDP's own alone
        self._hollow = nothing.to(handle.flat_param.dtype).expand(handle.flat_param._sharded_size)
        self._show(self._hollow)

    def _show(self, local_shard: Tensor) -> None:
        """Make a tensor what FSDP takes for this rank's chunk."""
        flat = self.handle.flat_param
        flat._local_shard = local_shard
        flat.data = local_shard
        if self.handle._use_orig_params:
            self.handle._use_sharded_views()

    @property
    def _is_summoned(self) -> bool:
        return bool(self.handle._training_state is HandleTrainingState.SUMMON_FULL_PARAMS)

    @property
    def gradient(self) -> Tensor | None:
        """Gradient of this rank's chunk.

        Raises:
            RuntimeError: if it is that of whole parameters, which no rank has reduced.
        """
        self.handle._reset_flat_param_grad_info_if_needed()
        flat = self.handle.flat_param
        if flat.grad is not None and flat.grad.shape != flat._sharded_size:
            raise RuntimeError(
                "expected reduced gradients, got those of a backward under no_sync(); run the last micro-batch of a "
                "step outside of no_sync()"
            )
        grad: Tensor | None = flat.grad
        return grad

    def stepped(self) -> list[bool]:
        """Whether each parameter has a gradient on this rank."""
        flat, grad = self.handle.flat_param, self.gradient
        if flat._params is None:
            return [grad is not None] * len(self.chunk.geometry.members)
        return [grad is not None and parameter.grad is not None for parameter in flat._params]

    def free_unsharded(self) -> None:
        """Free what a forward without backward has left unsharded, which the step makes stale."""
        if self.handle.uses_sharded_strategy and not self.handle.needs_unshard():
            self.handle.reshard(True)

    # --- in the place of the handle's methods -----------------------------------------------------------------------

    def _use_low_precision_shard(self) -> None:
        if not self.handle.uses_sharded_strategy:
            flat = self.handle.flat_param
            _alloc_storage(flat._mp_shard, flat._local_shard.size())
            self.chunk.fill(flat._mp_shard)
            flat.data = flat._mp_shard

    def _all_gather_flat_param(self, padded: Tensor) -> Tensor:
        flat, size = self.handle.flat_param, self.chunk.geometry.chunk
        flat.data = padded[self.chunk.rank * size :][:size]
        self.chunk.fill(flat.data)
        gathered: Tensor = self._original["_all_gather_flat_param"](padded)
        return gathered

    def _pre_unshard(self) -> bool:
        flat = self.handle.flat_param
        if self._is_summoned and flat._local_shard is self._hollow:
            self._show(torch.full_like(self._hollow, torch.nan, memory_format=torch.contiguous_format))
            self._version = flat._local_shard._version
        ran = bool(self._original["pre_unshard"]())
        if not self.handle.uses_sharded_strategy and flat.data_ptr() == flat._local_shard.data_ptr():
            values = torch.empty(flat.shape, dtype=flat.dtype, device=flat.device)
            self.chunk.fill(values)
            flat.data = values
        return ran

    def _reshard(self, free_unsharded_flat_param: bool) -> None:
        local_shard = self.handle.flat_param._local_shard
        if local_shard is self._hollow or not self._is_summoned:
            self._original["reshard"](free_unsharded_flat_param)
            return
        was_written = local_shard._version > self._version
        if was_written:
            self._take_over(self.handle.flat_param.data)
        self.handle.flat_param._local_shard = self._hollow
        self._original["reshard"](free_unsharded_flat_param or was_written)  # what was written is not what is stored
        if was_written:
            self.on_write()

    def _take_over(self, values: Tensor) -> None:
        """Encode parameters that were changed while they were summoned; `values` is the whole flat parameter."""
        flat = self.handle.flat_param
        elements = self.chunk.geometry.chunk * self.chunk.geometry.ranks
        before = torch.empty(elements, dtype=flat.dtype, device=flat.device)
        if self.handle.uses_sharded_strategy:
            self._all_gather_flat_param(before)
        else:
            self.chunk.fill(before)
        self.chunk.assign_changed(values, before)
