"""A shard: the tensors of one parameter on one rank, and where they lie in the whole parameter.

Every engine describes what it owns as a `Shard`; the step (`step.py`) knows nothing else.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.placement_types import _StridedShard

from eco_dist.numerics import Granularity, Stream
from eco_dist.recipe import Recipe
from eco_dist.weights import QuantizedWeight


class StateKey:
    """Keys of a parameter's optimizer state. All are checkpointed."""

    STEP = "step"
    EXP_AVG = "exp_avg"
    EXP_AVG_SCALE = "exp_avg_scale"
    EXP_AVG_SQ = "exp_avg_sq"
    EXP_AVG_SQ_SCALE = "exp_avg_sq_scale"
    RESIDUAL = "residual"
    MASTER = "master"
    LR_PEAK = "lr_peak"
    LR_LAST = "lr_last"
    LAYOUT = "layout"


@dataclasses.dataclass(kw_only=True)
class Shard:
    """Codes, scales and moments of a run of whole rows.

    Attributes:
        codes: codes of the stored weight.
        scales: scales of the stored weight.
        recipe: how they are stored and stepped; it has a format.
        columns: width of a row.
        first_row: number of the first row in the whole parameter, leading dimensions flattened.
        tensor_id: name of the stream of random bits.
        state: optimizer state, keys of `StateKey`, local tensors.
        scale_group: ranks that hold other rows of the same scale group; None if no group is cut.
    """

    codes: Tensor
    scales: Tensor
    recipe: Recipe
    columns: int
    first_row: int
    tensor_id: int
    state: dict[str, Tensor]
    scale_group: dist.ProcessGroup | None = None

    @classmethod
    def of(
        cls,
        weight: QuantizedWeight,
        state: Mapping[str, Tensor],
        *,
        first_row: int = 0,
        tensor_id: int | None = None,
        scale_group: dist.ProcessGroup | None = None,
    ) -> Shard:
        """The shard of a local quantized weight and its local state; of a whole weight unless told otherwise."""
        return cls(
            codes=weight.codes,
            scales=weight.scales,
            recipe=weight.recipe,
            columns=weight.shape[-1],
            first_row=first_row,
            tensor_id=weight.tensor_id if tensor_id is None else tensor_id,
            state=dict(state),
            scale_group=scale_group,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical local shape."""
        return (*self.codes.shape[:-1], self.columns)

    @property
    def rows(self) -> int:
        """Rows held here, leading dimensions flattened."""
        return math.prod(self.codes.shape[:-1])

    def stream(self, seed: int, step: int, purpose: int = 0) -> Stream:
        """Random bits of one step."""
        return Stream(seed=seed, tensor=self.tensor_id, step=step, purpose=purpose)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Free what a forward pass without backward has left unsharded under FSDP2, which stands for the parameters."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_quantized(parameter: Tensor) -> bool:
    """Whether a parameter, sharded or not, is a quantized weight."""
    return isinstance(local(parameter), QuantizedWeight)


def check_placements(parameter: Tensor) -> None:
    """Refuse layouts whose shards are not runs of whole rows.

    Raises:
        ValueError: for a DTensor that is neither replicated, nor cut along dimension 0 by one mesh dimension, nor so
            cut by two of which FSDP2 cut the parts of the other (expert parallelism).
    """
    if not isinstance(parameter, DTensor):
        return
    cuts = [placement for placement in parameter.placements if not isinstance(placement, Replicate)]
    kinds = [type(cut) for cut in cuts]
    if any(kinds.count(kind) > 1 for kind in kinds) or any(
        not isinstance(cut, ShardPlacement | _StridedShard) or cut.dim != 0 for cut in cuts
    ):
        raise ValueError(
            "expected a quantized weight cut along dimension 0 by one mesh dimension (FSDP2, HSDP), by FSDP2 and "
            f"expert parallelism, or replicated, got placements {parameter.placements}; tensor parallelism of "
            "quantized weights is not supported yet"
        )


def first_row(parameter: Tensor) -> int:
    """Global number of the first row of this rank's shard, leading dimensions flattened."""
    if not isinstance(parameter, DTensor):
        return 0
    start, rows = 0, parameter.shape[0]
    for dim in _sharding_dims(parameter):
        # Every rank gets ceil(rows / ranks) rows and the last ones what is left.
        chunk = math.ceil(rows / parameter.device_mesh.size(dim))
        before = min(chunk * parameter.device_mesh.get_local_rank(dim), rows)
        start, rows = start + before, min(chunk, rows - before)
    return start * math.prod(parameter.shape[1:-1])


def scale_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """Ranks that share a scale group which shard borders cut (granularity `tensor`); None if no group is cut."""
    weight = local(parameter)
    if not isinstance(parameter, DTensor) or not isinstance(weight, QuantizedWeight):
        return None
    dims = _sharding_dims(parameter)
    if not dims or weight.recipe.granularity is not Granularity.TENSOR:
        return None
    assert len(dims) == 1, "expert parallelism refuses granularity 'tensor'"
    return parameter.device_mesh.get_group(dims[0])


def _sharding_dims(parameter: DTensor) -> list[int]:
    """Mesh dimensions that cut dimension 0, in the order of the cuts: what FSDP2 cut last was cut before."""
    dims = [dim for dim, placement in enumerate(parameter.placements) if not isinstance(placement, Replicate)]
    return sorted(dims, key=lambda dim: isinstance(parameter.placements[dim], _StridedShard))


def mesh_groups(parameters: Sequence[Tensor]) -> list[dist.ProcessGroup]:
    """Process groups that together span every rank holding a part of these parameters, in an order all ranks share."""
    groups: dict[str, dist.ProcessGroup] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            for dim in range(parameter.device_mesh.ndim):
                group = parameter.device_mesh.get_group(dim)
                groups.setdefault(group.group_name, group)
    return [group for group in groups.values() if group.size() > 1]
