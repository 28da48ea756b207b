"""Saving, resuming exactly, taking over checkpoints with masters, and the tools that read DeepSpeed's files."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.deepspeed_ranks import EVEN, ODD, config, contents, engine_of, masters_config, run_ranks, train
from tests.distributed.models import build

pytest.importorskip("deepspeed")


def all_equal(left: dict[str, dict[str, Tensor]], right: dict[str, dict[str, Tensor]]) -> bool:
    return all(torch.equal(value, right[name][key]) for name, part in left.items() for key, value in part.items())


def resume(stage: int, eco: dict[str, Any], directory: str) -> tuple[bool, list[float], list[float]]:
    json = config(stage, "bf16", eco=eco, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 6}})
    engine = engine_of(build(**ODD), json)
    train(engine, 3)
    engine.save_checkpoint(directory)
    saved = contents(engine)
    expected = train(engine, 3, first=3)
    again = engine_of(build(seed=1, **ODD), json)
    again.load_checkpoint(directory)
    restored = all_equal(saved, contents(again))
    return restored, expected, train(again, 3, first=3)


@pytest.mark.parametrize(
    ("stage", "eco"),
    [
        (1, {"recipe": "fp8", "working_copy": "kept"}),
        (2, {"recipe": "fp8-8bit", "working_copy": "transient"}),
        (2, {"recipe": "fp8-residual-8bit", "working_copy": "replica"}),
        (2, {"recipe": "int4"}),
        (3, {"recipe": "fp8-8bit"}),
        (3, {"recipe": "int4"}),
    ],
)
def test_resume_is_exact(stage: int, eco: dict[str, Any], tmp_path: Path) -> None:
    for restored, expected, losses in run_ranks(2, resume, stage, eco, str(tmp_path)):
        assert restored
        assert losses == expected


def stored_weights(engine: Any) -> dict[str, Tensor]:
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def export(stage: int, sizes: dict[str, int], directory: str) -> dict[str, Tensor]:
    engine = engine_of(build(**sizes), config(stage, "bf16"))
    train(engine, 2)
    engine.save_checkpoint(directory)
    return stored_weights(engine)


@pytest.mark.parametrize("sizes", [EVEN, ODD])
@pytest.mark.parametrize("stage", [2, 3])
def test_zero_to_fp32_gives_the_stored_weights(stage: int, sizes: dict[str, int], tmp_path: Path) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    expected = run_ranks(2, export, stage, sizes, str(tmp_path))[0]
    got = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert set(got) == set(expected)
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def save_half(stage: int, directory: str) -> dict[str, Tensor]:
    json = config(stage, "bf16", zero={"stage3_gather_16bit_weights_on_model_save": True})
    engine = engine_of(build(**ODD), json)
    train(engine, 2)
    engine.save_16bit_model(directory)
    losses = train(engine, 1, first=2)
    assert losses[0] == losses[0]
    return {}


@pytest.mark.parametrize("stage", [2, 3])
def test_save_16bit_model(stage: int, tmp_path: Path) -> None:
    run_ranks(2, save_half, stage, str(tmp_path))
    saved = torch.load(tmp_path / "pytorch_model.bin")
    shapes = {name: p.shape for name, p in build(**ODD).named_parameters()}
    assert {name: value.shape for name, value in saved.items()} == shapes
    assert all(value.dtype is torch.bfloat16 and bool(torch.isfinite(value).all()) for value in saved.values())


def take_over(stage: int, directory: str) -> tuple[float, float, float, list[float]]:
    """Masters saved by DeepSpeed's own AdamW; how far the codes are from them, and the loss before and after."""
    engine = engine_of(build(**ODD), masters_config(stage, "bf16"))
    before = train(engine, 6)
    engine.save_checkpoint(directory)
    masters = stored_weights(engine)
    from deepspeed.utils import safe_get_full_optimizer_state

    moments = {n: safe_get_full_optimizer_state(p, "exp_avg") for n, p in engine.module.named_parameters()}
    again = engine_of(build(seed=1, **ODD), config(stage, "bf16"))
    again.load_checkpoint(directory)
    got = stored_weights(again)
    error = max(float((got[name] - value).abs().max() / value.abs().max()) for name, value in masters.items())
    names = dict(again.module.named_parameters())
    moved = max(float((safe_get_full_optimizer_state(names[n], "exp_avg") - m).abs().max()) for n, m in moments.items())
    return error, moved, before[-1], train(again, 2, first=6)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_checkpoint_with_masters_is_taken_over(stage: int, tmp_path: Path) -> None:
    for error, moved, before, after in run_ranks(2, take_over, stage, str(tmp_path)):
        assert error < 2**-4 + 1e-6  # half a step of E4M3 at the largest magnitude of a block
        assert moved == 0.0
        assert after[0] < before + 0.5


def module_only(directory: str) -> tuple[bool, bool]:
    """Weights alone: what the checkpoint's 16 bits say, rounded once more."""
    engine = engine_of(build(**ODD), config(2, "bf16"))
    train(engine, 2)
    engine.save_checkpoint(directory)
    expected = stored_weights(engine)
    again = engine_of(build(seed=1, **ODD), config(2, "bf16"))
    again.load_checkpoint(directory, load_module_only=True)
    got = stored_weights(again)
    close = all(float((got[n] - v).abs().max()) <= 0.04 * float(v.abs().max()) for n, v in expected.items())
    before = contents(again)
    again.module.load_state_dict(again.module.state_dict())
    return close, all_equal(before, contents(again))


def test_weights_alone_can_be_loaded(tmp_path: Path) -> None:
    """And loading what is there already changes no code."""
    assert run_ranks(2, module_only, str(tmp_path)) == [(True, True)] * 2


def load_other_recipe(directory: str) -> str:
    engine = engine_of(build(**ODD), config(2, "bf16"))
    engine.save_checkpoint(directory)
    again = engine_of(build(**ODD), config(2, "bf16", eco={"recipe": "fp8-8bit"}))
    before = contents(again)
    try:
        again.load_checkpoint(directory)
    except ValueError as error:
        return str(error) if all_equal(before, contents(again)) else "changed"
    return "accepted"


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    for message in run_ranks(2, load_other_recipe, str(tmp_path)):
        assert "load with the recipe and the number of ranks that saved them" in message


def save_masters(stage: int, directory: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What DeepSpeed's own AdamW with masters holds after some steps."""
    from deepspeed.utils import safe_get_full_optimizer_state

    engine = engine_of(build(**ODD), masters_config(stage, "bf16"))
    train(engine, 3)
    engine.save_checkpoint(directory)
    parameters = dict(engine.module.named_parameters())
    return stored_weights(engine), {n: safe_get_full_optimizer_state(p, "exp_avg") for n, p in parameters.items()}


def start_from(where: str | dict[str, Tensor], stage: int) -> tuple[int, dict[str, Tensor], dict[str, Tensor]]:
    from deepspeed.utils import safe_get_full_optimizer_state

    from eco_dist.checkpoint import take_over

    engine = engine_of(build(seed=1, **ODD), config(stage, "bf16"))
    steps = take_over(where, engine, engine.optimizer)
    parameters = dict(engine.module.named_parameters())
    moments = {n: safe_get_full_optimizer_state(p, "exp_avg") for n, p in parameters.items()}
    held = stored_weights(engine)
    assert all(loss == loss for loss in train(engine, 1, first=3))
    return steps, held, moments


@pytest.mark.parametrize("stage", [2, 3])
def test_another_number_of_ranks_starts_from_masters(stage: int, tmp_path: Path) -> None:
    """By way of DeepSpeed's own tools: a universal checkpoint, with moments, and zero_to_fp32, without."""
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    masters, moments = run_ranks(2, save_masters, stage, str(tmp_path / "saved"))[0]
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "saved"))
    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": False}
    folders = {"input_folder": str(tmp_path / "saved" / "global_step3"), "output_folder": str(tmp_path / "universal")}
    ds_to_universal.main(SimpleNamespace(**options, **folders, inject_missing_state=True))
    weights = {name: tensor.detach() for name, tensor in weights.items()}
    for where, steps in ((str(tmp_path / "universal"), 3), (weights, 0)):
        taken, got, first = run_ranks(1, start_from, where, 5 - stage)[0]
        assert taken == steps
        for name, value in masters.items():
            assert float((got[name] - value).abs().max()) <= 2**-4 * float(value.abs().max()), name
            assert torch.equal(first[name], moments[name] if steps else torch.zeros_like(value)), name
