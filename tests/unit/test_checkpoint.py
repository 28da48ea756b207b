"""Checkpoints on one process: exact continuation, refusals that change nothing, every kind of damage noticed."""

import copy
import json
import os
import random
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from eco_dist import ECOSGD, ECOAdamW, quantize_weights_
from eco_dist.checkpoint import AsyncSaver, CheckpointCorruptError, CheckpointError, Manifest, latest, load, save
from eco_dist.checkpoint.manifest import MANIFEST
from eco_dist.checkpoint.write import checkpoints, write_rank
from eco_dist.optim import ECOOptimizer
from eco_dist.recipe import RECIPES, Recipe

RECIPE_NAMES = list(RECIPES)


def build(recipe: str | Recipe = "fp8", seed: int = 0, optimizer: str = "adamw") -> tuple[nn.Module, ECOOptimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(37, 131), nn.BatchNorm1d(131), nn.Linear(131, 5))
    quantize_weights_(model, recipe)
    if optimizer == "sgd":
        return model, ECOSGD(model.parameters(), lr=1e-2, seed=seed)
    groups = [{"params": list(model.parameters())[:2]}, {"params": list(model.parameters())[2:], "lr": 3e-3}]
    return model, ECOAdamW(groups, lr=1e-2, weight_decay=0.1, seed=seed)


def train(model: nn.Module, optimizer: ECOOptimizer, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        inputs = torch.randn(16, 37, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def contents(model: nn.Module, optimizer: ECOOptimizer) -> list[Tensor]:
    tensors: list[Tensor] = []
    for parameter in model.parameters():
        stored = parameter.detach()
        tensors += [stored.codes, stored.scales] if hasattr(stored, "codes") else [stored]
        tensors += [value for _, value in sorted(optimizer.state[parameter].items())]
    return [tensor.clone() for tensor in (*tensors, *model.buffers())]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_a_run_goes_on_bit_for_bit(recipe: str, optimizer: str, tmp_path: Path) -> None:
    """Into a model with other weights, another seed and a fresh optimizer."""
    model, stepper = build(recipe, optimizer=optimizer)
    train(model, stepper, 0, 3)
    save(tmp_path, model, stepper, step=3, extra={"position": 48})
    expected = train(model, stepper, 3, 3), contents(model, stepper)
    other, other_stepper = build(recipe, seed=9, optimizer=optimizer)
    manifest = load(tmp_path, other, other_stepper)
    assert (manifest.step, manifest.extra) == (3, {"position": 48})
    assert train(other, other_stepper, 3, 3) == expected[0]
    assert same(contents(other, other_stepper), expected[1])


def test_options_of_the_groups_come_back(tmp_path: Path) -> None:
    model, optimizer = build()
    optimizer.param_groups[1]["lr"] = 0.123
    save(tmp_path, model, optimizer, step=0)
    other, other_optimizer = build(seed=1)
    load(tmp_path, other, other_optimizer)
    assert [group["lr"] for group in other_optimizer.param_groups] == [1e-2, 0.123]
    assert other_optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert other_optimizer.seed == 0


def test_the_file_is_readable_without_this_package(tmp_path: Path) -> None:
    """Plain tensors: codes as E4M3, one fp32 scale a block; code times scale is the weight."""
    model, optimizer = build()
    train(model, optimizer, 0, 1)
    folder = save(tmp_path, model, optimizer, step=1)
    with safe_open(folder / "rank-00000.safetensors", framework="pt") as file:
        codes, scales = file.get_tensor("0.weight"), file.get_tensor("0.weight_scale")
        assert {"0.weight.exp_avg", "0.weight.exp_avg_sq", "0.bias", "1.running_mean"} <= set(file.keys())
    assert (codes.dtype, tuple(codes.shape), tuple(scales.shape)) == (torch.float8_e4m3fn, (131, 37), (131, 1))
    assert torch.equal(codes.float() * scales, model[0].weight.decode())


def test_bytes_are_the_static_bytes_and_a_manifest(tmp_path: Path) -> None:
    model, optimizer = build("fp8-8bit")
    train(model, optimizer, 0, 1)
    folder = save(tmp_path, model, optimizer, step=1)
    static = sum(tensor.numel() * tensor.element_size() for tensor in contents(model, optimizer) if tensor.ndim)
    with safe_open(folder / "rank-00000.safetensors", framework="pt") as file:
        held = sum(file.get_tensor(key).numel() * file.get_tensor(key).element_size() for key in file.keys())  # noqa: SIM118
        header = (folder / "rank-00000.safetensors").stat().st_size - held
    counters = sum(b.element_size() for b in model.buffers() if b.ndim == 0)
    assert held == static + counters
    assert header < 4096
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, "rank-00000.safetensors"]


# --- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model, optimizer = build()
    train(model, optimizer, 0, 2)
    return save(tmp_path_factory.mktemp("saved"), model, optimizer, step=2)


def assert_refused(
    folder: Path, model: nn.Module, optimizer: ECOOptimizer, sentence: str, kind: type = CheckpointError
) -> None:
    before = contents(*_with_state(model, optimizer)), copy.deepcopy(optimizer.param_groups[0]["lr"])
    with pytest.raises(kind, match=sentence):
        load(folder, model, optimizer)
    assert same(contents(model, optimizer), before[0])
    assert optimizer.param_groups[0]["lr"] == before[1]


def _with_state(model: nn.Module, optimizer: ECOOptimizer) -> tuple[nn.Module, ECOOptimizer]:
    train(model, optimizer, 7, 1)
    return model, optimizer


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_flipped_bit_is_noticed(
    data: st.DataObject, saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / saved.name
    shutil.copytree(saved, folder)
    path = folder / data.draw(st.sampled_from(sorted(os.listdir(saved))))
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    model, optimizer = build(seed=3)
    assert_refused(folder, model, optimizer, "expected", CheckpointCorruptError)


@pytest.mark.parametrize("damage", ["truncate", "delete", "empty", "swap"])
@pytest.mark.parametrize("name", [MANIFEST, "rank-00000.safetensors"])
def test_other_damage_is_noticed(damage: str, name: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / saved.name
    shutil.copytree(saved, folder)
    path = folder / name
    if damage == "truncate":
        path.write_bytes(path.read_bytes()[:-7])
    elif damage == "delete":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        other, optimizer = build(seed=5)
        path.write_bytes((save(tmp_path / "other", other, optimizer, step=2) / name).read_bytes())
    model, optimizer = build(seed=3)
    assert_refused(folder, model, optimizer, str(folder))


def test_a_hostile_manifest_names_no_file_outside(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / saved.name
    shutil.copytree(saved, folder)
    manifest = Manifest.read(folder)
    secret = tmp_path / "secret.safetensors"
    save_file({"x": torch.ones(1)}, secret)
    stored = manifest.files["rank-00000.safetensors"]
    object.__setattr__(manifest, "files", {"../secret.safetensors": stored})
    manifest.write(folder / MANIFEST)
    assert_refused(folder, *build(), r"files inside the checkpoint, got the name '../secret.safetensors'")


def test_a_newer_format_is_refused(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / saved.name
    shutil.copytree(saved, folder)
    content = json.loads((folder / MANIFEST).read_text())
    content["format"] = 99
    (folder / MANIFEST).write_text(json.dumps(content))
    model, optimizer = build()
    with pytest.raises(CheckpointError):
        load(folder, model, optimizer)


@pytest.mark.parametrize(
    ("recipe", "sentence"),
    [
        ("fp8-8bit", "'0.weight' with moments 'fp8' as in the model, got 'fp32'"),
        ("paper", "with granularity 'row'"),
        ("fp32-master", "with format 'fp32'"),
        ("int4", "with format 'int4'"),
        ("fp8-naive", "with compensation 'none'"),
    ],
)
def test_another_recipe_is_refused(recipe: str, sentence: str, saved: Path) -> None:
    assert_refused(saved, *build(recipe), sentence)


def test_other_parameters_and_optimizers_are_refused(saved: Path) -> None:
    assert_refused(saved, *build(optimizer="sgd"), "expected '0.weight.exp_avg_sq'|optimizer state|options")
    model = nn.Sequential(nn.Linear(37, 131), nn.BatchNorm1d(131))
    quantize_weights_(model, "fp8")
    with pytest.raises(CheckpointError, match=r"expected a parameter '2\..*' in the model"):
        load(saved, model, ECOAdamW(model.parameters()))


def test_no_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a checkpoint in .*, found none"):
        load(tmp_path / "nothing", *build())


# --- several checkpoints ---------------------------------------------------------------------------------------------


def test_old_ones_go_and_the_newest_stays(tmp_path: Path) -> None:
    model, optimizer = build()
    for step in (1, 2, 3, 3):
        train(model, optimizer, step, 1)
        newest = save(tmp_path, model, optimizer, step=step, keep=2)
    assert [folder.name for folder in checkpoints(tmp_path)] == ["step-00000003", "step-00000003-1"]
    assert latest(tmp_path) == newest
    shutil.rmtree(newest)
    assert latest(tmp_path) == tmp_path / "step-00000003"
    with pytest.raises(CheckpointError, match="keep >= 1"):
        save(tmp_path, model, optimizer, step=4, keep=0)


def test_a_background_save_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    model, optimizer = build()
    train(model, optimizer, 0, 2)
    expected = contents(model, optimizer)
    saver = AsyncSaver(tmp_path)
    saver.save(model, optimizer, step=2)
    train(model, optimizer, 2, 3)
    folder = saver.wait()
    assert folder == latest(tmp_path)
    other, other_optimizer = build(seed=4)
    load(tmp_path, other, other_optimizer)
    assert same(contents(other, other_optimizer), expected)


def test_waiting_for_a_background_save_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    saver, disk = AsyncSaver(tmp_path), threading.Event()
    module = sys.modules["eco_dist.checkpoint.save"]  # the package has a function of that name
    monkeypatch.setattr(module, "write_rank", lambda *arguments: disk.wait() and write_rank(*arguments))
    saver.save(model, optimizer, step=1)
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        saver.wait(0.01)
    disk.set()
    assert saver.wait() == latest(tmp_path) == tmp_path / "step-00000001"


def test_a_background_failure_is_told_at_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = build()
    saver = AsyncSaver(tmp_path)
    monkeypatch.setenv("ECO_DIST_FAULT", "save:after-data:raise")
    saver.save(model, optimizer, step=1)
    with pytest.raises(CheckpointError, match="no space left"):
        saver.wait()
    monkeypatch.delenv("ECO_DIST_FAULT")
    saver.save(model, optimizer, step=1)
    assert saver.wait() == latest(tmp_path)


def test_the_global_random_generators_stay_as_they_are(tmp_path: Path) -> None:
    model, optimizer = build()
    state = torch.get_rng_state(), random.getstate()
    save(tmp_path, model, optimizer, step=0)
    load(tmp_path, model, optimizer)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert random.getstate() == state[1]
