"""PyTorch's first FSDP under ordinary AdamW: what its flat parameters hold to the byte, the peak within a tenth."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from eco_dist import measure, plan
from eco_dist.memory.activations import Batch
from eco_dist.models import Llama, llama_config
from eco_dist.models.llama import Block as LlamaBlock
from eco_dist.training.memory_report import transformer_shape
from tests.distributed.models import Block, batch, build, loss_of
from tests.distributed.peaks import tracked_step
from tests.distributed.ranks import run_ranks


def differences(strategy: str, mixed: bool, is_tied: bool) -> list[dict[str, tuple[int, int]]]:
    """Categories whose planned and measured bytes differ, rank by rank."""
    model: nn.Module = build()
    if is_tied:
        model.head.weight = model.embed.weight
    world = dist.get_world_size()
    planned = plan(model, "fp32-master", engine="fsdp1", world_size=world)
    model = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16) if mixed else None,
        device_id=torch.device("cpu"),
        use_orig_params=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    result = []
    for one, other in zip(planned.ranks, measure(model, optimizer).ranks, strict=True):
        held, found = one.by_category(), other.by_category()
        counts = {kind.value: (held.get(kind, 0), found.get(kind, 0)) for kind in {*held, *found}}
        result.append({kind: pair for kind, pair in counts.items() if pair[0] != pair[1]})
    return result


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("strategy", "mixed", "is_tied"),
    [("FULL_SHARD", False, False), ("FULL_SHARD", True, True), ("SHARD_GRAD_OP", True, False)],
)
def test_every_rank_holds_what_was_planned(world: int, strategy: str, mixed: bool, is_tied: bool) -> None:
    for ranks in run_ranks(world, differences, strategy, mixed, is_tied):
        assert not any(ranks)


def peak_ratio(preset: str, sequences: int, length: int, mixed: bool) -> float:
    """Planned over measured bytes at the peak."""
    config = llama_config(preset, vocabulary=512)
    whole = Llama(config)
    sizes = Batch(sequences=sequences, length=length, compute_bytes=2 if mixed else 4)
    world = dist.get_world_size()
    shape = transformer_shape(config)
    planned = plan(
        whole, "fp32-master", engine="fsdp1", world_size=world, transformer=shape, batch=sizes, backend="gloo"
    )
    model = FullyShardedDataParallel(
        whole,
        auto_wrap_policy=ModuleWrapPolicy({LlamaBlock}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if mixed else None,
        device_id=torch.device("cpu"),
        use_orig_params=False,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    timeline = tracked_step(model, optimizer, vocabulary=config.vocabulary, sequences=sequences, length=length)
    found = measure(model, optimizer, check=False, timeline=timeline).ranks[0].peak_bytes
    expected = planned.ranks[0].peak_bytes
    assert found is not None
    assert expected is not None
    return expected / found


@pytest.mark.parametrize(("preset", "sequences", "length"), [("tiny", 4, 64), ("small", 1, 16)])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_modelled_peak_is_near_the_measured_one(preset: str, sequences: int, length: int, mixed: bool) -> None:
    assert run_ranks(2, peak_ratio, preset, sequences, length, mixed) == pytest.approx([1, 1], abs=0.1)
