"""What users of an engine call: working copies, accumulation, clipping, loss scale, schedulers, parameter access."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eco_dist import ECOAdamW
from tests.distributed.deepspeed_ranks import (
    ODD,
    Probes,
    config,
    contents,
    engine_of,
    masters_config,
    run_ranks,
    train,
    train_probes,
)
from tests.distributed.models import batch, build, loss_of

pytest.importorskip("deepspeed")

COPIES = ["kept", "transient", "replica"]


def losses_of(stage: int, dtype: str, eco: dict[str, Any], extra: dict[str, Any]) -> tuple[list[float], float]:
    engine = engine_of(build(**ODD), config(stage, dtype, eco=eco, **extra))
    return train(engine, 4), float(engine.get_global_grad_norm())


def test_working_copies_and_stages_train_alike() -> None:
    results = [run_ranks(2, losses_of, 2, "bf16", {"working_copy": copy}, {})[0] for copy in COPIES]
    assert results[0] == results[1] == results[2]
    assert run_ranks(2, losses_of, 1, "bf16", {}, {})[0] == results[0]
    accumulated = {"data_types": {"grad_accum_dtype": "fp32"}}
    for stage, extra in ((2, accumulated), (3, accumulated), (3, {})):
        losses, norm = run_ranks(2, losses_of, stage, "bf16", {}, extra)[0]
        assert losses == pytest.approx(results[0][0], abs=1e-2)
        assert norm == pytest.approx(results[0][1], rel=2e-2)


def norm_with_masters(stage: int) -> float:
    engine = engine_of(build(**ODD), masters_config(stage, "fp32", gradient_clipping=0.5))
    train(engine, 1)
    return float(engine.get_global_grad_norm())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_is_global_and_clips(stage: int) -> None:
    """The first gradient of nearly the same model; codes move weights by a few percent."""
    expected = run_ranks(2, norm_with_masters, stage)[0]
    norms = {norm for _, norm in run_ranks(2, first_norm, stage)}
    assert len(norms) == 1
    assert norms.pop() == pytest.approx(expected, rel=0.05)


def first_norm(stage: int) -> tuple[float, float]:
    engine = engine_of(build(**ODD), config(stage, gradient_clipping=0.5))
    return train(engine, 1)[0], float(engine.get_global_grad_norm())


def first_moments(stage: int, clip: float, scale: float) -> tuple[dict[str, Tensor], float]:
    engine = engine_of(Probes(), config(stage, gradient_clipping=clip))
    engine.backward(engine(0) * scale)
    engine.step()
    return {name: part["exp_avg"] for name, part in contents(engine).items()}, float(engine.get_global_grad_norm())


@pytest.mark.parametrize("stage", [2, 3])
def test_clipping_scales_every_gradient_alike(stage: int) -> None:
    """Clipped to norm c, a gradient and its double give the same first moments, to rounding (before injection)."""
    one, norm = run_ranks(2, first_moments, stage, 1.0, 1.0)[0]
    two, double = run_ranks(2, first_moments, stage, 1.0, 2.0)[0]
    assert double == pytest.approx(2 * norm, rel=1e-6)
    for name, moment in one.items():
        if not moment.numel():  # a rank without units of this weight
            continue
        assert float((two[name] - moment).abs().max()) <= 1e-4 * float(moment.abs().max()), name


def accumulate(stage: int, dtype: str, copy: str) -> tuple[list[Tensor], list[Tensor]]:
    """Two micro-batches and one step, against the same step from their average."""
    halves = engine_of(Probes(), config(stage, dtype, gradient_accumulation_steps=2, eco={"working_copy": copy}))
    for _ in range(2):
        halves.backward(halves(0))
        halves.step()
    whole = engine_of(Probes(), config(stage, dtype, eco={"working_copy": copy}))
    train_probes(whole, 1)
    return ([part["codes"] for part in contents(engine).values()] for engine in (halves, whole))  # type: ignore


def accumulated_equals_whole(stage: int, dtype: str, copy: str) -> bool:
    halves, whole = accumulate(stage, dtype, copy)
    return all(torch.equal(left, right) for left, right in zip(halves, whole, strict=True))


@pytest.mark.parametrize(("stage", "copy"), [(1, "replica"), (2, "transient"), (2, "replica"), (3, "replica")])
def test_accumulation_is_the_average(stage: int, copy: str) -> None:
    assert run_ranks(2, accumulated_equals_whole, stage, "fp32", copy) == [True, True]


def everything(engine: Any) -> list[Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    held = [tensor for part in contents(engine).values() for tensor in part.values()]
    return held + [safe_get_full_fp32_param(p) for p in engine.module.parameters()]


def overflow(stage: int, dtype: str, eco: dict[str, Any]) -> tuple[bool, bool, float, float]:
    """An infinite gradient on rank 1 alone; then a step that moves."""
    import torch.distributed as dist

    extra = {} if dtype == "bf16" else {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    json = {**config(stage, dtype, eco=eco), **extra}
    engine = engine_of(build(**ODD), json)
    train(engine, 2)
    before = everything(engine)
    scale = float(engine.optimizer.loss_scale)
    loss = loss_of(engine, batch(5)) * (torch.inf if dist.get_rank() == 1 else 1.0)
    engine.backward(loss)
    engine.step()
    same = all(torch.equal(a, b) for a, b in zip(before, everything(engine), strict=True))
    after = float(engine.optimizer.loss_scale)
    train(engine, 1, first=6)
    moved = not all(torch.equal(a, b) for a, b in zip(before, everything(engine), strict=True))
    return same, moved, scale, after


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_on_one_rank_changes_nothing_on_any(stage: int, dtype: str) -> None:
    for same, moved, scale, after in run_ranks(2, overflow, stage, dtype, {"recipe": "fp8-8bit"}):
        assert same
        assert moved
        assert after == (scale / 2 if dtype == "fp16" else scale)


def grow_scale(stage: int) -> tuple[list[float], list[float]]:
    """Moments of a step in which the loss scale doubles, and of one in which it does not."""
    results = []
    for window in (1, 1000):
        json = config(stage)
        json["fp16"] = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": window}
        engine = engine_of(Probes(), json)
        train_probes(engine, 3)
        results.append(torch.cat([part["exp_avg"].flatten() for part in contents(engine).values()]))
        scale = float(engine.optimizer.loss_scale)
        assert scale > 16 if window == 1 else scale == 16
    return results  # type: ignore[return-value]


@pytest.mark.parametrize("stage", [2, 3])
def test_gradients_are_unscaled_with_the_scale_they_carry(stage: int) -> None:
    """DeepSpeed's own step divides by the new scale when it has just grown."""
    for grown, fixed in run_ranks(1, grow_scale, stage):
        assert torch.equal(grown, fixed)


def no_momentum(stage: int) -> str:
    model = build(**ODD)
    client = ECOAdamW(model.parameters(), lr=1e-3, betas=(0.0, 0.95))
    json = config(stage)
    del json["optimizer"]
    try:
        train(engine_of(model, json, optimizer=client), 1)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("stage", [2, 3])
def test_without_momentum_there_is_nothing_to_carry_the_error(stage: int) -> None:
    assert "expected beta1" in run_ranks(1, no_momentum, stage)[0]


def schedule(kind: str) -> list[float]:
    model = build(**ODD)
    parameters = list(model.parameters())
    json, arguments = config(2), {}
    if kind == "json":
        json["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear"}}
        json["scheduler"]["params"]["warmup_max_lr"] = 4e-3
    else:
        client = ECOAdamW([{"params": parameters[:5]}, {"params": parameters[5:], "lr": 8e-3}], lr=4e-3)
        rule: Callable[[int], float] = lambda step: min(1.0, (step + 1) / 4)  # noqa: E731
        scheduler = torch.optim.lr_scheduler.LambdaLR(client, rule)
        arguments = {"optimizer": client, "lr_scheduler": scheduler}
        if kind == "callable":
            arguments["lr_scheduler"] = lambda o: torch.optim.lr_scheduler.LambdaLR(o, rule)
    engine = engine_of(model, json, **arguments)
    used = []
    for step in range(4):
        train(engine, 1, first=step)
        used.append(engine.optimizer.optimizer.param_groups[0]["lr"])
    assert len({group["lr"] for group in engine.optimizer.optimizer.param_groups}) == (1 if kind == "json" else 2)
    return used


@pytest.mark.parametrize("kind", ["json", "instance", "callable"])
def test_schedulers_reach_every_group(kind: str) -> None:
    used = run_ranks(2, schedule, kind)[0]
    assert used == sorted(used)
    assert used[-1] == pytest.approx(4e-3, rel=0.3)
    assert len(set(used)) >= 3


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.net = build(**ODD)
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.net.embed(tokens)
        for block in self.net.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.net.head(self.net.norm(x))


def checkpointed(stage: int, use_reentrant: bool | None) -> list[float]:
    model = build(**ODD) if use_reentrant is None else Checkpointed(use_reentrant)
    return train(engine_of(model, config(stage, "bf16", eco={"seed": 3, "also_skip": []})), 3)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant: bool) -> None:
    """Names differ by a prefix, so the random bits do: losses agree as two seeds do."""
    expected = run_ranks(2, checkpointed, 2, None)[0]
    got = run_ranks(2, checkpointed, 2, use_reentrant)[0]
    assert got[0] == pytest.approx(expected[0], abs=1e-6)
    assert got == pytest.approx(expected, abs=0.05)


def masters_losses(stage: int) -> list[float]:
    return train(engine_of(build(**ODD), masters_config(stage, "bf16")), 4)


@pytest.mark.parametrize("stage", [2, 3])
def test_without_codes_it_is_deepspeed_with_adamw(stage: int) -> None:
    """High-precision parameters keep DeepSpeed's fp32 partition and take ordinary AdamW."""
    expected = run_ranks(2, masters_losses, stage)[0]
    losses, _ = run_ranks(2, losses_of, stage, "bf16", {"recipe": "fp32-master"}, {})[0]
    assert losses == pytest.approx(expected, abs=2e-3)
