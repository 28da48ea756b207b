"""Expert parallelism: each rank keeps a part of the experts.

[Note: two meshes]
`world = expert data x expert`, experts innermost, so that the ranks that exchange tokens are neighbours:
rank = d * EP + e holds the experts e E/EP .. (e+1) E/EP - 1 and, under FSDP2, the d-th cut of their rows. An expert
parameter is a DTensor `Shard(0)` on the `expert` dimension before `fully_shard` sees it; FSDP2 cuts it further along
`expert_data`. So its global shape stays that of all experts, and with it scale groups, random bits and checkpoints.
More ranks than experts share each expert's rows, see "expert parameters" in experts.py.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from eco_dist.moe.experts import Experts
from eco_dist.numerics import Granularity
from eco_dist.weights import QuantizedWeight

EXPERT_DATA, EXPERT = "expert_data", "expert"
"""Names of the mesh dimensions: ranks with the same experts, ranks that share a set of experts."""


def expert_mesh(expert_parallel: int, device_type: str) -> DeviceMesh:
    """The mesh of the note; collective over all ranks.

    Args:
        expert_parallel: ranks that share one set of experts, a divisor of the world size.
        device_type: of the parameters.

    Raises:
        RuntimeError: without an initialized process group.
        ValueError: if it does not divide the world size, or ranks ask for different numbers.
    """
    if not dist.is_initialized():
        raise RuntimeError("expected an initialized process group; start with torchrun and init_process_group() first")
    check_divides_world(expert_parallel)
    shape = (dist.get_world_size() // expert_parallel, expert_parallel)
    return init_device_mesh(device_type, shape, mesh_dim_names=(EXPERT_DATA, EXPERT))


def check_divides_world(expert_parallel: int) -> None:
    """Refuse a number of ranks that cannot share experts; collective over all ranks.

    Raises:
        ValueError: if it does not divide the world size, or ranks ask for different numbers.
    """
    check_same_everywhere("expert_parallel", expert_parallel)
    world = dist.get_world_size()
    if expert_parallel < 1 or world % expert_parallel:
        raise ValueError(
            f"expected expert_parallel to divide the world size {world}, got {expert_parallel}; "
            "change it or the number of ranks"
        )


def check_same_everywhere(what: str, value: Any) -> None:
    """Refuse a value that differs between ranks before it makes them wait for each other; collective over all ranks.

    Raises:
        ValueError: on every rank; names the first rank that differs from rank 0.
    """
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    for rank, other in enumerate(values):
        if other != values[0]:
            raise ValueError(
                f"expected {what} to be the same on all ranks, got {values[0]} on rank 0 and {other} on rank {rank}; "
                "start all ranks with the same configuration"
            )


def check_members(mine: list[int]) -> None:
    """Refuse expert-parallel groups that ranks see differently; collective over all ranks.

    Ranks that make groups in different orders wait for each other, some backends when they make them and some at the
    first exchange; call this with the ranks of your group before you make it.

    Args:
        mine: ranks of the group that this rank is in.

    Raises:
        ValueError: on every rank, if the members of a group do not all name the same members.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    for rank, members in enumerate(everyone):
        for member in members:
            if rank not in members or everyone[member] != members:
                raise ValueError(
                    f"expected the ranks of an expert-parallel group to name the same members in the same order, got "
                    f"{members} on rank {rank} and {everyone[member]} on rank {member}; "
                    "make the same groups in the same order on every rank, as expert_mesh() does"
                )


def shard_experts(model: nn.Module, mesh: DeviceMesh) -> list[Experts]:
    """Keep this rank's experts of every layer, in place; collective over all ranks.

    Call it after `quantize_weights_` and before `fully_shard`. Parameters become DTensors on the mesh's `expert`
    dimension; with one rank there they stay as they are.

    Args:
        model: any module with `MoELayer`s, equal on all ranks.
        mesh: of `expert_mesh`, or one of your own with a dimension named `expert`.

    Returns:
        The experts of each layer, to shard further.

    Raises:
        ValueError: if there are no experts, or they do not split evenly, are sharded already or have one scale
            for the whole tensor, or if ranks differ in the layers they have or in the groups of the mesh.
    """
    group = mesh.get_group(EXPERT)
    check_members(dist.get_process_group_ranks(group))
    layers = expert_layers(model, group.size())
    if group.size() > 1:
        for layer in layers:
            _shard_layer(layer, mesh[EXPERT])
    return layers


def expert_layers(model: nn.Module, ranks: int) -> list[Experts]:
    """The experts of every layer, if that many ranks can share each; collective over all ranks.

    Raises:
        ValueError: see `shard_experts`.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Experts)}
    if not layers:
        raise ValueError(
            f"expected a model with MoELayers for expert parallelism, got a {type(model).__name__} without; "
            "leave expert_parallel at 1"
        )
    check_same_everywhere("the layers with experts", {name: layer.config for name, layer in layers.items()})
    for name, layer in layers.items():
        _check_layer(name, layer, ranks)
    return list(layers.values())


def _check_layer(name: str, layer: Experts, ranks: int) -> None:
    experts, hidden = layer.config.experts, layer.config.hidden
    if experts % ranks and (ranks % experts or hidden % (ranks // experts)):
        raise ValueError(
            f"expected expert_parallel to divide the {experts} experts of '{name}', or to be a multiple of them that "
            f"divides their {hidden} hidden features, got {ranks}; choose another"
        )
    for key, parameter in layer.mlp.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"expected '{name}.mlp.{key}' to be whole, got a DTensor with placements {parameter.placements}: "
                "experts are cut once, by shard_experts() before fully_shard()"
            )
        if ranks > 1 and isinstance(parameter, QuantizedWeight) and parameter.recipe.granularity is Granularity.TENSOR:
            raise ValueError(
                f"expected row or block scales for '{name}.mlp.{key}' under expert parallelism, got granularity "
                "'tensor', one scale for the experts of all ranks; choose granularity 'row' or 'block'"
            )


def _shard_layer(layer: Experts, mesh: DeviceMesh) -> None:
    layer.group = mesh.get_group()
    for key, parameter in list(layer.mlp.named_parameters()):
        sharded = DTensor.from_local(
            rows_of(parameter.detach(), mesh.get_local_rank(), mesh.size()),
            mesh,
            [Shard(0)],
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        setattr(layer.mlp, key, nn.Parameter(sharded, requires_grad=parameter.requires_grad))


def rows_of(whole: Tensor, rank: int, ranks: int) -> Tensor:
    """A copy of the rank-th of equal parts along dimension 0, as a tensor of its own."""
    rows = whole.shape[0] // ranks
    mine = slice(rank * rows, (rank + 1) * rows)
    if not isinstance(whole, QuantizedWeight):
        return whole[mine].clone()
    codes, scales = whole.codes[mine].clone(), whole.scales[mine].clone()
    # FSDP2 cuts these rows alone, so they are all the rows there are.
    return QuantizedWeight(codes, scales, whole.recipe, whole.shape[-1], rows, whole.tensor_id)
