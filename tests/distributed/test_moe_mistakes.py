"""What expert parallelism refuses: one sentence, the same on every rank."""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from eco_dist import quantize_weights_, shard_model
from eco_dist.moe import MoEConfig, MoELayer
from eco_dist.moe.parallel import check_members, expert_mesh, shard_experts
from tests.distributed.ranks import run_ranks
from tests.distributed.test_moe_parallel import SHAPE, build


def mistakes() -> list[str]:
    """Messages of what is refused, the same on every rank."""
    rank = dist.get_rank()
    layer = MoELayer(MoEConfig(**SHAPE))
    mesh = expert_mesh(2, "cpu")
    shard_experts(layer, mesh)
    tensor_scale = MoELayer(MoEConfig(**SHAPE))
    quantize_weights_(tensor_scale, "int4")
    other = MoELayer(MoEConfig(**{**SHAPE, "top_k": 1 + (rank == 3)}))
    members = ([0, 1], [1, 3], [2, 3], [1, 3])[rank]
    calls = (
        lambda: expert_mesh(3, "cpu"),
        lambda: expert_mesh(2 if rank else 4, "cpu"),
        lambda: shard_experts(MoELayer(MoEConfig(**{**SHAPE, "experts": 5})), mesh),
        lambda: shard_experts(MoELayer(MoEConfig(**{**SHAPE, "experts": 1, "top_k": 1, "hidden": 21})), mesh),
        lambda: shard_experts(layer, mesh),
        lambda: shard_experts(tensor_scale, mesh),
        lambda: shard_experts(nn.Linear(8, 8), mesh),
        lambda: shard_experts(other, mesh),
        lambda: check_members(members),
        lambda: shard_model(
            build(), "fp8", expert_parallel=2, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
        ),
    )
    messages = []
    for call in calls:
        try:
            call()
            messages.append("nothing was raised")
        except ValueError as error:
            messages.append(str(error))
        dist.barrier()
    return messages


def test_mistakes_are_one_sentence_on_every_rank() -> None:
    parts = (
        "divide the world size 4, got 3",
        "expert_parallel to be the same on all ranks, got 4 on rank 0 and 2 on rank 1",
        "divide the 5 experts",
        "a multiple of them that divides their 21 hidden features, got 2",
        "got a DTensor",
        "granularity 'tensor'",
        "got a Linear without",
        "layers with experts to be the same",
        "in the same order",
        "leave mesh out",
    )
    for messages in run_ranks(4, mistakes):
        for message, part in zip(messages, parts, strict=True):
            assert part in message
