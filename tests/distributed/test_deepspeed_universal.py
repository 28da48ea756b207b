"""Universal checkpoints of DeepSpeed: its own into our engines, ours into its engines and back."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eco_dist import ECOAdamW
from eco_dist.checkpoint import export, save, take_over
from eco_dist.checkpoint.reader import CheckpointReader
from tests.distributed.deepspeed_ranks import ODD, config, contents, engine_of, masters_config, run_ranks, train
from tests.distributed.models import build
from tests.distributed.test_deepspeed_checkpoint import all_equal, stored_weights

pytest.importorskip("deepspeed")

STEPS = 3
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 9, "warmup_type": "linear"}}
UNIVERSAL = {"checkpoint": {"load_universal": True}, "scheduler": WARMUP}


def to_universal(folder: Path) -> None:
    """DeepSpeed's own conversion of what was saved into a folder."""
    from deepspeed.checkpoint import ds_to_universal

    options = {"num_extract_workers": 1, "num_merge_workers": 1, "keep_temp_folder": False, "strict": False}
    folders = {"input_folder": str(folder / f"global_step{STEPS}"), "output_folder": str(folder / "universal")}
    ds_to_universal.main(SimpleNamespace(**options, **folders, inject_missing_state=True))


def save_masters(stage: int, folder: str) -> None:
    engine = engine_of(build(**ODD), masters_config(stage, "bf16", scheduler=WARMUP))
    train(engine, STEPS)
    engine.save_checkpoint(folder)


def load_both_ways(stage: int, folder: str) -> tuple[bool, list[tuple[float, float]], list[float]]:
    """By DeepSpeed's switch and by `take_over`: whether the shards are the same; learning rates and decay; losses."""
    engine = engine_of(build(seed=1, **ODD), config(stage, "bf16", **UNIVERSAL))
    engine.load_checkpoint(folder)
    other = engine_of(build(seed=2, **ODD), config(stage, "bf16"))
    assert take_over(f"{folder}/universal", other, other.optimizer) == STEPS
    same = all_equal(contents(other), contents(engine)) and engine.global_steps == STEPS
    weights, expected = stored_weights(engine), stored_weights(other)
    same &= all(torch.equal(weights[name], value) for name, value in expected.items())
    options = [(group["lr"], group["weight_decay"]) for group in engine.optimizer.optimizer.param_groups]
    return same, options, train(engine, 2, first=STEPS)


@pytest.fixture(scope="module")
def masters(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, list[float]]]:
    """Universal checkpoints of runs with masters, by stage, and the losses with which they go on."""
    folders = {}
    for stage in (2, 3):
        folder = tmp_path_factory.mktemp(f"masters{stage}")
        run_ranks(2, save_masters, stage, str(folder))
        to_universal(folder)
        folders[stage] = (folder, run_ranks(2, go_on, stage, str(folder))[0][0])
    return folders


@pytest.mark.parametrize(("saved", "stage", "world"), [(2, 1, 3), (2, 2, 1), (2, 3, 1), (3, 3, 3), (3, 2, 1)])
def test_a_run_with_masters_is_taken_over(saved: int, stage: int, world: int, masters: Any) -> None:
    folder, losses = masters[saved]
    for same, options, went_on in run_ranks(world, load_both_ways, stage, str(folder)):
        assert same
        assert all(option == pytest.approx((5e-3 * (STEPS - 1) / 9, 0.1)) for option in options)
        assert went_on == pytest.approx(losses, abs=0.02)


def without_moments(folder: str) -> tuple[bool, float]:
    """Whether codes are those of a load with moments, and how large the moments are."""
    engine, other = (engine_of(build(seed=seed, **ODD), config(2, "bf16", **UNIVERSAL)) for seed in (1, 2))
    engine.load_checkpoint(folder, load_optimizer_states=False)
    other.load_checkpoint(folder)
    got, expected = contents(engine), contents(other)
    same = all(torch.equal(got[name]["codes"], part["codes"]) for name, part in expected.items())
    return same, max(float(part[key].abs().max()) for part in got.values() for key in ("exp_avg", "exp_avg_sq", "step"))


def test_weights_alone_can_be_loaded(masters: Any) -> None:
    assert run_ranks(1, without_moments, str(masters[2][0])) == [(True, 0.0)]


def refused(stage: int, folder: str) -> tuple[str, str]:
    """An ordinary checkpoint in its place, and an optimizer with other groups; nothing is changed."""
    said = []
    for tag, cut in ((f"global_step{STEPS}", None), ("universal", 1)):
        model = build(seed=1, **ODD)
        parameters = list(model.parameters())
        groups = [{"params": part} for part in (parameters[:cut], parameters[cut:] if cut else []) if part]
        json = config(stage, "bf16", **UNIVERSAL)
        options = json.pop("optimizer")["params"]
        engine = engine_of(model, json, optimizer=ECOAdamW(groups, **options))
        before = contents(engine)
        try:
            engine.load_checkpoint(folder, tag=tag)
            said.append("loaded")
        except ValueError as error:
            said.append(str(error) if all_equal(before, contents(engine)) else "changed")
    return said[0], said[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_what_does_not_fit_is_refused(stage: int, masters: Any) -> None:
    ordinary, groups = run_ranks(1, refused, stage, str(masters[stage][0]))[0]
    assert "make one with DeepSpeed's ds_to_universal" in ordinary
    assert "expected a universal checkpoint with 2 parameter groups as in the optimizer, got 1" in groups


def go_on(stage: int, folder: str) -> tuple[list[float], dict[str, Tensor], float]:
    """DeepSpeed's own engine with masters from a universal checkpoint: losses, weights as loaded, learning rate."""
    engine = engine_of(build(seed=1, **ODD), masters_config(stage, "bf16", **UNIVERSAL))
    engine.load_checkpoint(folder)
    weights = stored_weights(engine)
    return train(engine, 2, first=STEPS), weights, engine.get_lr()[0]


def save_ours(recipe: str, folder: str) -> list[float]:
    engine = engine_of(build(**ODD), config(2, "bf16", eco={"recipe": recipe}, scheduler=WARMUP))
    train(engine, STEPS)
    save(f"{folder}/ours", engine, engine.optimizer, step=STEPS)
    return train(engine, 2, first=STEPS)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """Our own run in that form, and the losses with which it went on."""
    folder = tmp_path_factory.mktemp("ours")
    losses = run_ranks(2, save_ours, "fp8-8bit", str(folder))[0]
    export(folder / "ours", folder / "universal", format="universal")
    return folder, losses


@pytest.mark.parametrize(("stage", "world"), [(1, 1), (2, 3), (3, 2)])
def test_deepspeed_goes_on_from_our_run_with_masters(stage: int, world: int, exported: Any) -> None:
    folder, losses = exported
    reader = CheckpointReader(folder / "ours")
    for went_on, weights, lr in run_ranks(world, go_on, stage, str(folder / "universal")):
        assert all(torch.equal(value, reader.weight(name)) for name, value in weights.items())
        assert lr == pytest.approx(5e-3 * (STEPS + 1) / 9)
        assert went_on == pytest.approx(losses, abs=0.02)


def load_ours(recipe: str, stage: int, folder: str) -> None:
    json = config(stage, "bf16", eco={"recipe": recipe}, **UNIVERSAL)
    engine = engine_of(build(seed=1, **ODD), json)
    engine.load_checkpoint(f"{folder}/universal")
    save(f"{folder}/again", engine, engine.optimizer, step=STEPS)


@pytest.mark.parametrize(("recipe", "stage"), [("fp8-8bit", 3), ("int4", 1), ("paper", 2)])
def test_our_run_comes_back_with_the_same_codes(recipe: str, stage: int, exported: Any, tmp_path: Path) -> None:
    """And scales, moments and steps; learning rates seen are those of the schedule from then on."""
    folder = exported[0]
    if recipe != "fp8-8bit":
        folder = tmp_path
        run_ranks(2, save_ours, recipe, str(folder))
        export(folder / "ours", folder / "universal", format="universal")
    run_ranks(1, load_ours, recipe, stage, str(folder))
    before, after = CheckpointReader(folder / "ours"), CheckpointReader(folder / "again")
    assert before.manifest.tensors.keys() == after.manifest.tensors.keys()
    for name in before.manifest.tensors:
        assert torch.equal(before.tensor(name).view(torch.uint8), after.tensor(name).view(torch.uint8)), name
    for name, record in before.manifest.parameters.items():
        assert after.manifest.parameters[name].scalars["step"] == record.scalars["step"] > 0


def save_as_deepspeed(stage: int, folder: str) -> None:
    engine = engine_of(build(**ODD), config(stage, "bf16"))
    train(engine, STEPS)
    engine.save_checkpoint(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_conversion_of_our_engines_files_says_what_to_do(stage: int, tmp_path: Path) -> None:
    run_ranks(2, save_as_deepspeed, stage, str(tmp_path))
    with pytest.raises(AssertionError, match=r"got a checkpoint of codes.*eco-dist export --format universal"):
        to_universal(tmp_path)
