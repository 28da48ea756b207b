"""What FSDP2 asks of a sharded parameter: what to all-gather, and what to make of it.

The contract was read in `torch/distributed/fsdp/_fully_shard/_fsdp_param.py` (2.13). Three things are not obvious:

* The pre-hook takes the one-argument form. With five arguments FSDP2 demands that every input have the parameter's
  padded size, which refuses the smaller scales on ranks whose shard is short. We pad both ourselves.
* FSDP2 copies only the first input when the mesh has one rank, so there the scales travel as metadata; so do scales
  that every rank already has (granularity `tensor`).
* Codes are uint8 (or bf16): float8 never meets a collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.tensor import DTensor

from eco_dist.numerics import Granularity, decode_into

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from eco_dist.recipe import Recipe
    from eco_dist.weights.tensor import QuantizedWeight

Metadata = tuple["Recipe", int, int, Tensor]


class FSDPHooks:
    """Mixin with the two hooks that `fully_shard` discovers on the local tensor of a parameter."""

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[Tensor, ...], Metadata]:
        """Codes and scales of this rank, padded to the longest shard."""
        weight = cast("QuantizedWeight", self)
        metadata = (weight.recipe, weight.shape[-1], weight.full_rows, weight.scales)
        rows = -(-weight.full_rows // mesh.size())
        codes = _padded(weight.codes, rows)
        if mesh.size() == 1 or not _has_row_scales(weight.recipe):
            return (codes,), metadata
        return (codes, _padded(weight.scales, rows)), metadata

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Metadata,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Stored weight of all ranks in the compute dtype; the wire buffers are freed at once."""
        recipe, columns, full_rows, local_scales = metadata
        assert recipe.format is not None
        codes = outputs[0][:full_rows]
        scales = outputs[1][:full_rows] if len(outputs) > 1 else local_scales
        # FSDP2 reuses the unsharded parameter that autograd may have saved: same version, new contents. With expert
        # parallelism that parameter is a DTensor, whose local part the values are.
        target = out._local_tensor if isinstance(out, DTensor) else out
        if target is None:
            target = torch.empty((*codes.shape[:-1], columns), dtype=param_dtype, device=codes.device)
        with torch.no_grad(), _unsafe_preserve_version_counter(target):
            decode_into(target, codes, scales, recipe.format, recipe.granularity)
        for buffer in outputs:
            # FSDP2 allocates them again at the next all-gather; until then they would be dead weight.
            buffer.untyped_storage().resize_(0)
        return (target, (target,)) if out is None else None


def _has_row_scales(recipe: Recipe) -> bool:
    """Whether scales are cut along dimension 0 together with the codes."""
    return recipe.granularity not in (None, Granularity.TENSOR)


def _padded(tensor: Tensor, rows: int) -> Tensor:
    """`tensor` lengthened to `rows` rows; what the extra rows hold is never read."""
    if tensor.shape[0] >= rows:  # more under replicate(), where nothing is cut
        return tensor
    needed = tensor.storage_offset() + rows * tensor.stride(0)
    if tensor.stride(0) and needed * tensor.element_size() <= tensor.untyped_storage().nbytes():
        # FSDP2 keeps a short shard as a view of a padded tensor: the room is already there.
        return tensor.as_strided((rows, *tensor.shape[1:]), tensor.stride())
    longer = tensor.new_zeros((rows, *tensor.shape[1:]))
    longer[: tensor.shape[0]] = tensor
    return longer
