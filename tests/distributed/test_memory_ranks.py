"""Plans held against live ranks: static bytes to the byte, the peak of a step within a tenth, and who is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from eco_dist import ECOAdamW, measure, plan, shard_model
from eco_dist.memory import Category, MasterCopyError, MemoryReport
from eco_dist.memory.activations import Batch
from eco_dist.memory.baselines import resolve
from eco_dist.memory.plan import mesh_for, plan_shape
from eco_dist.memory.tensors import module_shape
from eco_dist.models import Llama, llama_config
from eco_dist.training.memory_report import transformer_shape
from eco_dist.weights import DEFAULT_SKIP
from tests.distributed.models import build, train
from tests.distributed.peaks import tracked_step
from tests.distributed.ranks import run_ranks
from tests.distributed.test_moe_parallel import Net as MoENet
from tests.distributed.test_moe_parallel import loss_of as moe_loss

PEAKS = {
    "activations": ("tiny", 4, 64, "fp32"),
    "weights": ("small", 1, 16, "bf16"),
    "both": ("small", 2, 64, "fp32"),
}
VOCABULARY = 512


class Tied(nn.Module):
    """Embedding and head are one parameter, of prime sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 37)
        self.up = nn.Linear(37, 131)
        self.down = nn.Linear(131, 37)
        self.head = nn.Linear(37, 23, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.zeros(41))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.embed(tokens))))


def by_tensor(report: MemoryReport, rank: int) -> dict[tuple[str, Category], int]:
    return {(t.name, t.category): t.bytes for t in report.ranks[rank].tensors if t.category.is_static}


def tied_weights(world: int) -> list[bool]:
    torch.manual_seed(0)
    model = Tied()
    planned = plan(model, "fp8-8bit", engine="fsdp2", world_size=world)
    shard_model(model, "fp8-8bit")
    optimizer = ECOAdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 1)
    measured = measure(model, optimizer, check=False)
    return [by_tensor(measured, rank) == by_tensor(planned, rank) for rank in range(world)]


@pytest.mark.parametrize("world", [2, 3])
def test_tied_weights_and_buffers(world: int) -> None:
    assert run_ranks(world, tied_weights, world) == [[True] * world] * world


def uneven_experts(recipe: str, expert_parallel: int) -> list[bool]:
    """6 experts of 19 rows: with two ranks for each half, one has 29 rows and the other 28."""
    torch.manual_seed(0)
    model = MoENet(experts=6, hidden=19)
    whole = module_shape(model, resolve(recipe), skip=DEFAULT_SKIP)
    tensors = tuple(dataclasses.replace(tensor, is_expert=".experts." in tensor.name) for tensor in whole.tensors)
    world = torch.distributed.get_world_size()
    mesh = mesh_for("fsdp2", world, ep=expert_parallel)
    planned = plan_shape(dataclasses.replace(whole, tensors=tensors), engine="fsdp2", mesh=mesh)
    shard_model(model, recipe, expert_parallel=expert_parallel)
    optimizer = ECOAdamW(model.parameters(), lr=1e-3)
    moe_loss(model, torch.arange(9)).backward()
    optimizer.step()
    optimizer.zero_grad()
    measured = measure(model, optimizer)
    return [by_tensor(measured, rank) == by_tensor(planned, rank) for rank in range(world)]


@pytest.mark.parametrize("expert_parallel", [2, 1])
def test_uneven_experts(expert_parallel: int) -> None:
    assert run_ranks(4, uneven_experts, "fp8-8bit", expert_parallel) == [[True] * 4] * 4


def peaks(recipe: str, preset: str, sequences: int, length: int, compute: str) -> tuple[int, float]:
    config = llama_config(preset, vocabulary=VOCABULARY)
    model = Llama(config)
    batch = Batch(sequences=sequences, length=length, compute_bytes=2 if compute == "bf16" else 4)
    options = {
        "engine": "fsdp2",
        "world_size": 2,
        "transformer": transformer_shape(config),
        "batch": batch,
        "backend": "gloo",
    }
    planned = plan(model, recipe, **options)  # type: ignore[arg-type]
    shard_model(model, recipe, compute_dtype=torch.bfloat16 if compute == "bf16" else torch.float32)
    optimizer = ECOAdamW(model.parameters(), lr=1e-3)

    timeline = tracked_step(model, optimizer, vocabulary=VOCABULARY, sequences=sequences, length=length)
    measured = measure(model, optimizer, check=False, timeline=timeline)
    worst, expected = measured.ranks[0], planned.ranks[0]
    assert worst.peak_bytes is not None
    assert expected.peak_bytes is not None
    return measured.static_bytes(1) - planned.static_bytes(1), expected.peak_bytes / worst.peak_bytes


@pytest.mark.parametrize("recipe", ["fp8", "fp32-master"])
@pytest.mark.parametrize("case", PEAKS)
def test_the_modelled_peak_is_near_the_measured_one(case: str, recipe: str) -> None:
    for difference, ratio in run_ranks(2, peaks, recipe, *PEAKS[case]):
        assert difference == 0
        assert ratio == pytest.approx(1, abs=0.1)


def shadow_on_one_rank() -> str:
    import torch.distributed as dist

    model = build(width=41, hidden=139)
    shard_model(model, "fp8")
    optimizer = ECOAdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 1)
    if dist.get_rank() == 1:
        model.__dict__["shadow"] = {"up": torch.zeros(139, 41)}  # a whole weight, where a rank owns a part
    try:
        measure(model, optimizer, strict=True)
    except MasterCopyError as error:
        return str(error)
    return "accepted"


def test_a_master_copy_on_one_rank_is_refused_on_all() -> None:
    sentences = run_ranks(2, shadow_on_one_rank, fresh=True)
    assert sentences[0] == sentences[1]
    assert "on rank 1 a float32 tensor of shape [139, 41] held by 'shadow' of" in sentences[0]
