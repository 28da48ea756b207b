"""What is kept of experts on several ranks: every byte foreseen, and checkpoints that hold all experts."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from eco_dist import ECOAdamW, measure, quantize_weights_, shard_model
from eco_dist.checkpoint import load, save
from eco_dist.models import Llama, build_transformer, model_config, next_token_loss
from eco_dist.optim.shard import first_row, local
from eco_dist.training.config import EngineConfig, ModelConfig, TrainConfig
from eco_dist.training.memory_report import plan_run
from eco_dist.weights import QuantizedWeight
from tests.distributed.ranks import run_ranks

Parts = dict[str, tuple[int, list[Tensor]]]


def prepared(recipe: str, expert_parallel: int | None, seed: int) -> tuple[Llama, ECOAdamW]:
    model = build_transformer(model_config("smoe-nano", vocabulary=31, backend="native"), seed=seed)
    if expert_parallel is None:
        quantize_weights_(model, recipe)
    else:
        shard_model(model, recipe, expert_parallel=expert_parallel)
    return model, ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1, seed=seed)


def train(model: Llama, optimizer: ECOAdamW, first: int, steps: int) -> list[float]:
    """The same batch on all ranks."""
    losses = []
    for step in range(first, first + steps):
        tokens = torch.randint(0, 31, (2, 9), generator=torch.Generator().manual_seed(step))
        logits, routing = model(tokens[:, :-1])
        loss = next_token_loss(logits, tokens[:, 1:]) + 0.01 * routing.load_balancing_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def parts(model: Llama, optimizer: ECOAdamW) -> Parts:
    """First row and local tensors of every expert weight and its moments."""
    result = {}
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            continue
        weight = local(parameter)
        stored = [weight.codes, weight.scales] if isinstance(weight, QuantizedWeight) else [weight.detach()]
        state = [local(value) for _, value in sorted(optimizer.state[parameter].items()) if value.ndim]
        result[name] = (first_row(parameter), [tensor.clone() for tensor in (*stored, *state)])
    return result


def saved(recipe: str, expert_parallel: int, folder: str) -> tuple[Parts, list[float]]:
    model, optimizer = prepared(recipe, expert_parallel, seed=0)
    train(model, optimizer, 0, 2)
    save(folder, model, optimizer, step=2)
    return parts(model, optimizer), train(model, optimizer, 2, 2)


def loaded(recipe: str, expert_parallel: int | None, folder: str) -> tuple[Parts, list[float]]:
    model, optimizer = prepared(recipe, expert_parallel, seed=5)
    load(folder, model, optimizer)
    return parts(model, optimizer), train(model, optimizer, 2, 2)


def together(ranks: list[Parts]) -> dict[str, list[Tensor]]:
    result = {}
    for name in ranks[0]:
        pieces = sorted((part[name] for part in ranks), key=lambda piece: piece[0])
        result[name] = [torch.cat(tensors) for tensors in zip(*(piece[1] for piece in pieces), strict=True)]
    return result


@pytest.mark.parametrize("recipe", ["fp8", "fp8-8bit"])
def test_a_checkpoint_of_two_holds_all_experts_for_one_and_four(recipe: str, tmp_path: Path) -> None:
    results = run_ranks(2, saved, recipe, 2, str(tmp_path))
    expected, losses = together([result[0] for result in results]), results[0][1]
    for world, expert_parallel in ((1, None), (2, 1), (4, 2), (4, 4)):
        results = run_ranks(world, loaded, recipe, expert_parallel, str(tmp_path))
        got = together([result[0] for result in results])
        assert got.keys() == expected.keys()
        for name, tensors in expected.items():
            assert all(torch.equal(a, b) for a, b in zip(tensors, got[name], strict=True)), (name, world)
        assert results[0][1] == pytest.approx(losses, rel=1e-3)


def bytes_of(recipe: str, expert_parallel: int, preset: str) -> list[tuple[int, int]]:
    """Planned and measured static bytes of every rank."""
    shape = model_config(preset, vocabulary=31, backend="native")
    model = build_transformer(shape)
    world = torch.distributed.get_world_size()
    engine = EngineConfig(name="fsdp2", expert_parallel=expert_parallel)
    config = TrainConfig(model=ModelConfig(preset=preset), engine=engine)
    planned = plan_run(model, recipe, config, shape, world)
    shard_model(model, recipe, expert_parallel=expert_parallel)
    optimizer = ECOAdamW(model.parameters(), lr=1e-3)
    train(model, optimizer, 0, 1)
    measured = measure(model, optimizer)
    return [(planned.static_bytes(rank), measured.static_bytes(rank)) for rank in range(world)]


@pytest.mark.parametrize("recipe", ["fp8", "fp8-8bit", "paper", "fp32-master"])
def test_every_rank_holds_what_was_planned(recipe: str) -> None:
    for world, expert_parallel in ((2, 2), (4, 2), (4, 4)):
        for ranks in run_ranks(world, bytes_of, recipe, expert_parallel, "smoe-nano"):
            for planned, measured in ranks:
                assert planned == measured, (world, expert_parallel)


def placements() -> list[str]:
    model, _ = prepared("fp8", 2, seed=0)
    return [str(p.placements) for n, p in model.named_parameters() if ".experts." in n and isinstance(p, DTensor)]


def test_experts_are_cut_by_both_meshes() -> None:
    for cuts in run_ranks(4, placements):
        assert cuts == ["(_StridedShard(dim=0, sf=2), Shard(dim=0))"] * 6
