"""Reading and writing parameters of an engine: DeepSpeed's tools, `zero.Init`, `GatheredParameters`, `state_dict`."""

import pytest
import torch

from tests.distributed.deepspeed_ranks import ODD, config, contents, engine_of, prepare_rank, run_ranks, train
from tests.distributed.models import batch, build, loss_of

pytest.importorskip("deepspeed")


def access(stage: int, recipe: str) -> dict[str, bool]:
    from deepspeed.utils import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
    )

    engine = engine_of(build(**ODD), config(stage, "bf16", eco={"recipe": recipe}))
    train(engine, 2)
    parameter = engine.module.blocks[0].up.weight
    weight = safe_get_full_fp32_param(parameter)
    ok = {"shape": weight.shape == (131, 37)}
    safe_set_full_fp32_param(parameter, weight)
    ok["unchanged"] = bool((safe_get_full_fp32_param(parameter) - weight).abs().max() <= weight.abs().max() * 1e-6)
    target = torch.linspace(-1, 1, weight.numel()).view_as(weight)
    safe_set_full_fp32_param(parameter, target)
    ok["weight"] = bool(
        (safe_get_full_fp32_param(parameter) - target).abs().max() <= (0.1 if recipe == "int4" else 0.04)
    )
    moment = torch.full_like(weight, 0.5)
    safe_set_full_optimizer_state(parameter, moment, "exp_avg_sq")
    ok["moment"] = torch.allclose(safe_get_full_optimizer_state(parameter, "exp_avg_sq"), moment, rtol=0.15)
    norm = engine.module.norm.weight
    safe_set_full_fp32_param(norm, torch.full((37,), 0.25))
    ok["plain"] = bool((safe_get_full_fp32_param(norm) == 0.25).all())
    loss = loss_of(engine, batch(3))
    ok["finite"] = bool(torch.isfinite(loss))
    engine.backward(loss)
    grad = safe_get_full_grad(parameter)
    ok["grad"] = grad.shape == weight.shape and bool(grad.abs().sum() > 0)
    engine.step()
    return ok


@pytest.mark.parametrize("recipe", ["fp8-8bit", "int4"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_can_be_read_and_written(stage: int, recipe: str) -> None:
    for ok in run_ranks(2, access, stage, recipe):
        assert all(ok.values()), ok


def zero_init() -> tuple[list[float], list[float], bool]:
    import deepspeed

    json = config(3, "bf16", eco={"recipe": "fp8-8bit"})
    expected = train(engine_of(build(**ODD), json), 3)
    prepare_rank()
    with deepspeed.zero.Init(config_dict_or_path=json):
        model = build(**ODD)
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
        for parameter, source in zip(model.parameters(), build(**ODD).parameters(), strict=True):
            parameter.copy_(source)
    engine = engine_of(model, json)
    codes = [part["codes"] for part in contents(engine).values()]
    with torch.no_grad(), deepspeed.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
        engine.module.blocks[0].up.weight[0, 0] = engine.module.blocks[0].up.weight[0, 0]
    kept = all(torch.equal(a, part["codes"]) for a, part in zip(codes, contents(engine).values(), strict=True))
    return expected, train(engine, 3), kept


def test_zero_init_and_gathered_parameters() -> None:

    for expected, losses, kept in run_ranks(2, zero_init):
        assert losses == pytest.approx(expected, abs=2e-2)
        assert kept


def gathered_write() -> float:
    import deepspeed

    engine = engine_of(build(**ODD), config(3, "bf16"))
    parameter = engine.module.blocks[1].down.weight
    with torch.no_grad(), deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
        if torch.distributed.get_rank() == 0:
            parameter.fill_(0.5)
    with deepspeed.zero.GatheredParameters(parameter):
        return float((parameter.float() - 0.5).abs().max())


def test_a_write_under_gathered_parameters_is_quantized() -> None:
    assert run_ranks(2, gathered_write) == [0.0, 0.0]


def nan_outside(copy: str) -> tuple[bool, str]:
    engine = engine_of(build(**ODD), config(2, "bf16", eco={"working_copy": copy}))
    train(engine, 1)
    message = ""
    try:
        state = engine.module.state_dict()
        assert all(bool(torch.isfinite(value).all()) for value in state.values())
    except RuntimeError as error:
        message = str(error)
    return bool(engine.module.blocks[0].up.weight.isnan().all()), message


def test_what_is_not_there_cannot_be_taken_for_a_weight() -> None:
    assert run_ranks(2, nan_outside, "replica") == [(True, "")] * 2
    assert run_ranks(2, nan_outside, "kept") == [(False, "")] * 2
    for is_nan, message in run_ranks(2, nan_outside, "transient"):
        assert is_nan
        assert "engine.save_checkpoint" in message
