"""Checkpoints across ranks: every world size to every other, replicas, and refusals that all ranks make together."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from eco_dist import ECOAdamW, quantize_weights_, shard_model
from eco_dist.checkpoint import AsyncSaver, load, save
from eco_dist.optim.shard import local
from tests.distributed.models import Net, batch, build, train
from tests.distributed.ranks import run_ranks

Saved = tuple[Path, dict[str, Tensor], list[float]]
WORLDS = (1, 2, 3, 4)
RECIPES = ("fp8", "fp8-8bit", "int4")
RESHARDINGS = [("fp8-8bit", before, after) for before in WORLDS for after in WORLDS]
RESHARDINGS += [(recipe, before, before % 4 + 1) for recipe in ("fp8", "int4") for before in WORLDS]


def prepared(recipe: str, seed: int, replicas: int = 1) -> tuple[Net, ECOAdamW]:
    """A model of prime sizes over all ranks; one rank is not sharded at all."""
    model = build(seed=seed)
    world = torch.distributed.get_world_size()
    if world == 1:
        quantize_weights_(model, recipe)
    elif replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
        shard_model(model, recipe, mesh=mesh)
    else:
        shard_model(model, recipe)
    return model, ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1, seed=seed)


def whole(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A state tensor gathered to its global shape, dimension 0 cut as the parameter is."""
    if not isinstance(parameter, DTensor) or local(tensor).ndim == 0:
        return local(tensor).detach().clone()
    mesh, dim = parameter.device_mesh, parameter.device_mesh.ndim - 1
    parts: list[Tensor | None] = [None] * mesh.size(dim)
    torch.distributed.all_gather_object(parts, local(tensor).detach().clone(), group=mesh.get_group(dim))
    return torch.cat([part for part in parts if part is not None])


def contents(model: Net, optimizer: ECOAdamW) -> dict[str, Tensor]:
    result = {}
    for name, parameter in model.named_parameters():
        weight = local(parameter).detach()
        if hasattr(weight, "codes"):
            result[name] = whole(weight.codes, parameter)
            one = weight.scales.numel() == 1 and weight.scales.ndim == 2 and weight.recipe.granularity.value == "tensor"
            result[f"{name} scale"] = weight.scales.clone() if one else whole(weight.scales, parameter)
        else:
            result[name] = whole(weight, parameter)
        for key, value in optimizer.state[parameter].items():
            result[f"{name} {key}"] = whole(value, parameter)
    return result


def save_here(recipe: str, root: str) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = prepared(recipe, seed=0)
    train(model, optimizer, 2)
    with torch.no_grad():
        model(batch(9))  # a validation leaves parameters of FSDP2's root unsharded
    save(root, model, optimizer, step=2)
    held = contents(model, optimizer)
    return held, train(model, optimizer, 3, first=2)


def load_here(recipe: str, root: str, replicas: int = 1) -> tuple[dict[str, Tensor], list[float]]:
    model, optimizer = prepared(recipe, seed=5, replicas=replicas)
    load(root, model, optimizer)
    held = contents(model, optimizer)
    return held, train(model, optimizer, 3, first=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Saved]:
    found = {}
    for recipe in RECIPES:
        for world in WORLDS:
            root = tmp_path_factory.mktemp(f"{recipe}-{world}")
            held, losses = run_ranks(world, save_here, recipe, str(root))[0]
            found[recipe, world] = (root, held, losses)
    return found


@pytest.mark.parametrize(("recipe", "before", "after"), RESHARDINGS)
def test_every_world_size_loads_every_other(recipe: str, before: int, after: int, saved) -> None:
    """Bit for bit; the next steps too, where adding up gradients rounds alike: not on three ranks."""
    root, held, losses = saved[recipe, before]
    for got, continued in run_ranks(after, load_here, recipe, str(root)):
        assert got.keys() == held.keys()
        for name, tensor in held.items():
            assert torch.equal(got[name], tensor), name
        if 3 not in (before, after):
            assert continued == losses


def test_replicas_write_once_and_all_load(saved) -> None:
    root, held, losses = saved["fp8", 4]
    for got, continued in run_ranks(4, load_here, "fp8", str(root), 2):
        assert all(torch.equal(got[name], tensor) for name, tensor in held.items())
        assert continued == losses


def save_replicated(root: str) -> int:
    model, optimizer = prepared("fp8", seed=0, replicas=2)
    train(model, optimizer, 1)
    folder = save(root, model, optimizer, step=1)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_bytes_of_replicas_are_written_once(tmp_path: Path, saved) -> None:
    sizes = run_ranks(4, save_replicated, str(tmp_path))
    single = sum(file.stat().st_size for file in saved["fp8", 1][0].rglob("*.safetensors"))
    assert sizes[0] < single + 4 * 8192  # a header a file


def try_load(root: str, recipe: str = "fp8") -> tuple[str, bool]:
    """What a load says, and whether it left everything as it was."""
    model, optimizer = prepared(recipe, seed=5)
    train(model, optimizer, 1)
    before = contents(model, optimizer)
    try:
        load(root, model, optimizer)
    except ValueError as error:
        after = contents(model, optimizer)
        return f"{type(error).__name__}: {error}", all(
            torch.equal(after[name], value) for name, value in before.items()
        )
    return "loaded", False


@pytest.mark.parametrize("damage", ["flip", "swap", "delete"])
def test_damage_is_told_by_all_ranks_alike(damage: str, saved, tmp_path: Path) -> None:
    shutil.copytree(saved["fp8", 2][0], tmp_path / "run")
    files = sorted((tmp_path / "run").rglob("*.safetensors"))
    if damage == "flip":
        content = bytearray(files[1].read_bytes())
        content[len(content) // 2] ^= 4
        files[1].write_bytes(content)
    elif damage == "swap":
        first, second = (file.read_bytes() for file in files)
        files[0].write_bytes(second)
        files[1].write_bytes(first)
    else:
        files[0].unlink()
    answers = run_ranks(3, try_load, str(tmp_path / "run"))
    assert len({answer for answer, _ in answers}) == 1
    assert "CheckpointCorruptError" in answers[0][0]
    assert "rank-0000" in answers[0][0]
    assert all(unchanged for _, unchanged in answers)


def test_another_recipe_is_refused_by_all_ranks(saved) -> None:
    answers = run_ranks(2, try_load, str(saved["fp8", 2][0]), "fp8-8bit")
    assert all("with moments 'fp8' as in the model, got 'fp32'" in answer and same for answer, same in answers)


def full_disk(root: str) -> tuple[str, float]:
    """Rank 1 meets a full disk; all ranks are told, and training goes on."""
    model, optimizer = prepared("fp8", seed=0)
    os.environ["RANK"] = str(torch.distributed.get_rank())
    os.environ["ECO_DIST_FAULT"] = "save:after-data:raise:1"
    try:
        save(root, model, optimizer, step=9)
        said = "saved"
    except ValueError as error:
        said = str(error)
    finally:
        del os.environ["ECO_DIST_FAULT"], os.environ["RANK"]
    return said, train(model, optimizer, 1)[0]


def test_a_full_disk_on_one_rank_leaves_the_checkpoint_before(saved, tmp_path: Path) -> None:
    shutil.copytree(saved["fp8", 2][0], tmp_path / "run")
    for said, loss in run_ranks(2, full_disk, str(tmp_path / "run")):
        assert "rank 1: [Errno 28] no space left" in said
        assert loss > 0
    held, _ = run_ranks(2, load_here, "fp8", str(tmp_path / "run"))[0]
    assert all(torch.equal(held[name], tensor) for name, tensor in saved["fp8", 2][1].items())


def background(root: str) -> bool:
    model, optimizer = prepared("fp8", seed=0)
    train(model, optimizer, 2)
    expected = contents(model, optimizer)
    saver = AsyncSaver(root)
    saver.save(model, optimizer, step=2)
    train(model, optimizer, 3, first=2)
    saver.wait()
    other, other_optimizer = prepared("fp8", seed=3)
    load(root, other, other_optimizer)
    got = contents(other, other_optimizer)
    return all(torch.equal(got[name], value) for name, value in expected.items())


def test_a_background_save_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    assert run_ranks(2, background, str(tmp_path)) == [True, True]
