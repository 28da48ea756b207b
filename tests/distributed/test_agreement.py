"""Ranks decide together: a gradient that is bad on one rank stops the step on all, and nothing is lost."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from eco_dist import ECOAdamW, Recipe, shard_model
from eco_dist.optim.shard import local
from tests.distributed.models import Net, batch, build, loss_of, train
from tests.distributed.ranks import run_ranks
from tests.distributed.test_fsdp2_step import contents

BAD = [math.nan, math.inf, -math.inf, 1e30]


def prepared(recipe: Recipe | str, **options: object) -> tuple[Net, ECOAdamW]:
    model = build()
    shard_model(model, recipe)
    optimizer = ECOAdamW(model.parameters(), lr=3e-3, **options)  # type: ignore[arg-type]
    train(model, optimizer, 2)
    return model, optimizer


def everything(model: Net, optimizer: ECOAdamW) -> list[Tensor]:
    tensors = [tensor for tensors in contents(model, optimizer).values() for tensor in tensors]
    counters = [state["step"].clone() for state in optimizer.state.values()]
    return [tensor.clone() for tensor in (*tensors, *counters)]


def changed_by(action: Callable[[], None], model: Net, optimizer: ECOAdamW) -> bool:
    before = everything(model, optimizer)
    action()
    return not all(torch.equal(a, b) for a, b in zip(before, everything(model, optimizer), strict=True))


def spoil(model: Net, value: float, rank: int) -> None:
    """Backward, then one bad element in one gradient of one rank."""
    loss_of(model, batch(9)).backward()
    if dist.get_rank() == rank:
        local(model.blocks[1].down.weight.grad)[0, 0] = value


def skip(recipe: str, value: float) -> tuple[bool, int, bool]:
    model, optimizer = prepared(recipe)
    spoil(model, value, rank=1)
    changed = changed_by(optimizer.step, model, optimizer)
    optimizer.zero_grad()
    moved = changed_by(lambda: train(model, optimizer, 1), model, optimizer)
    return changed, optimizer.skipped_steps, moved


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("recipe", ["fp8", "int4", "fp8-8bit"])
def test_all_ranks_skip_together_bit_exactly(recipe: str, value: float) -> None:
    assert run_ranks(3, skip, recipe, value) == [(False, 1, True)] * 3


def refuse() -> tuple[str, bool]:
    model, optimizer = prepared("fp8", nonfinite="raise")
    spoil(model, math.nan, rank=1)
    message = []

    def step() -> None:
        try:
            optimizer.step()
        except FloatingPointError as error:
            message.append(str(error))

    changed = changed_by(step, model, optimizer)
    return message[0], changed


def test_raise_raises_on_every_rank_and_says_where() -> None:
    first, second = run_ranks(2, refuse)
    assert not first[1]
    assert not second[1]
    assert "another rank (rank 0)" in first[0]
    assert "1 parameters of this rank (rank 1)" in second[0]


def hsdp_skip() -> int:
    from torch.distributed.device_mesh import init_device_mesh

    model = build()
    shard_model(model, "fp8", mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = ECOAdamW(model.parameters(), lr=3e-3)
    spoil(model, math.nan, rank=3)
    optimizer.step()
    return optimizer.skipped_steps


def test_the_decision_reaches_all_ranks_of_a_two_dimensional_mesh() -> None:
    assert run_ranks(4, hsdp_skip) == [1] * 4


def zero_learning_rate(recipe: str) -> bool:
    model, optimizer = prepared(recipe)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    loss_of(model, batch(9)).backward()
    return changed_by(optimizer.step, model, optimizer)


@pytest.mark.parametrize("recipe", ["fp8", "int4", "fp8-8bit", "fp8-master"])
def test_zero_learning_rate_changes_nothing(recipe: str) -> None:
    assert run_ranks(2, zero_learning_rate, recipe) == [False, False]


def warmup_from_zero(lr: float) -> list[float]:
    model = build()
    shard_model(model, "paper")
    optimizer = ECOAdamW(model.parameters(), lr=lr)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    losses = []
    for step in range(6):
        losses += train(model, optimizer, 1, first=step)
        scheduler.step()
    return losses


@pytest.mark.parametrize("lr", [3e-3, 1e-12])
def test_warmup_from_zero_stays_finite(lr: float) -> None:
    for losses in run_ranks(2, warmup_from_zero, lr):
        assert all(map(math.isfinite, losses))
