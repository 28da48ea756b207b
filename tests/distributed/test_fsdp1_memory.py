"""What a rank of a converted FSDP1 model holds: as planned to the byte, and nothing weight-sized in fp32."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from eco_dist import plan
from eco_dist.fsdp1 import measure
from eco_dist.memory.activations import Batch
from eco_dist.memory.report import RankMemory
from eco_dist.models import Llama, llama_config
from eco_dist.models.llama import Block as LlamaBlock
from eco_dist.training.memory_report import transformer_shape
from tests.distributed.fsdp1_models import BF16, converted
from tests.distributed.models import Block, batch, build, loss_of
from tests.distributed.peaks import tracked_step
from tests.distributed.ranks import run_ranks


def small(is_tied: bool, **sizes: int) -> nn.Module:
    model = build(**sizes)
    if is_tied:
        model.head.weight = model.embed.weight
    return model


def by_tensor(rank: RankMemory) -> Counter[tuple[str, str]]:
    """Bytes by tensor and category; FSDP's own flat parameters under one name."""
    counts: Counter[tuple[str, str]] = Counter()
    for tensor in rank.holding.tensors:
        counts["flat" if "_flat_param" in tensor.name else tensor.name, tensor.category.value] += tensor.bytes
    return counts


def differences(recipe: str, is_tied: bool, sizes: dict[str, int], options: dict[str, Any]) -> list[dict[str, Any]]:
    """Bytes of each tensor and category that differ between plan and measurement, rank by rank."""
    if options.pop("grad_op", False):
        options["sharding_strategy"] = ShardingStrategy.SHARD_GRAD_OP
    also_skip = ("blocks.1.*",) if options.pop("frozen", False) else ()
    whole = small(is_tied, **sizes)
    if also_skip:
        whole.blocks[1].requires_grad_(False)
    planned = plan(whole, recipe, engine="fsdp1", world_size=dist.get_world_size())
    model, optimizer = converted(whole, recipe, {Block}, mixed_precision=BF16, **options)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss_of(model, batch(9))  # leaves the root unsharded
    measured = measure(model, optimizer)
    assert measured.parameters == planned.parameters
    result = []
    for one, other in zip(planned.ranks, measured.ranks, strict=True):
        held, found = by_tensor(one), by_tensor(other)
        counts = {key: (held[key], found[key]) for key in {*held, *found}}
        result.append({str(key): pair for key, pair in counts.items() if pair[0] != pair[1]})
        assert one.holding.quantized_bytes == other.holding.quantized_bytes
        assert one.holding.quantized_parameters == other.holding.quantized_parameters
    return result


@pytest.mark.parametrize(
    ("world", "recipe", "is_tied", "sizes", "options"),
    [
        (1, "fp8", False, {}, {}),
        (2, "fp8-8bit", True, {}, {}),
        (3, "fp8", False, {"width": 128, "hidden": 384}, {}),
        (3, "int4", False, {}, {"grad_op": True}),
        (4, "fp8-8bit", False, {}, {}),
        (4, "fp8", True, {"width": 3, "hidden": 2}, {}),
        (2, "fp8", False, {}, {"frozen": True}),
    ],
)
def test_every_rank_holds_what_was_planned(
    world: int, recipe: str, is_tied: bool, sizes: dict[str, int], options: dict[str, Any]
) -> None:
    for ranks in run_ranks(world, differences, recipe, is_tied, sizes, options):
        assert not any(ranks), ranks


def strictly() -> list[float]:
    """Bytes of a quantized parameter, and none of a master copy."""
    model, optimizer = converted(build(width=128, hidden=512), "fp8-8bit", {Block}, use_orig_params=True)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return [measure(model, optimizer, strict=True).quantized_bytes_per_parameter()]


def test_nothing_weight_sized_is_left() -> None:
    for (bytes_,) in run_ranks(2, strictly, fresh=True):
        assert bytes_ == pytest.approx(3 + 3 * 4 / 128, abs=1e-3)


def peak_ratio(preset: str, sequences: int, length: int, mixed: bool) -> float:
    """Planned over measured bytes at the peak."""
    config = llama_config(preset, vocabulary=512)
    whole = Llama(config)
    sizes = Batch(sequences=sequences, length=length, compute_bytes=2 if mixed else 4)
    shape, world = transformer_shape(config), dist.get_world_size()
    planned = plan(whole, "fp8", engine="fsdp1", world_size=world, transformer=shape, batch=sizes, backend="gloo")
    model, optimizer = converted(whole, "fp8", {LlamaBlock}, mixed_precision=BF16 if mixed else None)

    timeline = tracked_step(model, optimizer, vocabulary=config.vocabulary, sequences=sequences, length=length)
    found = measure(model, optimizer, timeline=timeline).ranks[0].peak_bytes
    expected = planned.ranks[0].peak_bytes
    assert found is not None
    assert expected is not None
    return expected / found


@pytest.mark.parametrize(
    ("world", "preset", "sequences", "length", "mixed"),
    [(2, "tiny", 4, 64, False), (3, "tiny", 4, 64, True), (2, "small", 1, 16, False), (2, "small", 1, 16, True)],
)
def test_the_modelled_peak_is_near_the_measured_one(
    world: int, preset: str, sequences: int, length: int, mixed: bool
) -> None:
    ratios = run_ranks(world, peak_ratio, preset, sequences, length, mixed)
    assert ratios == pytest.approx([1] * world, abs=0.1)
