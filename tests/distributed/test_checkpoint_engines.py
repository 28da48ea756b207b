"""A checkpoint goes from every engine and number of ranks to every other, and the run goes on bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from eco_dist import ECOAdamW, quantize_weights_, shard_model
from eco_dist.checkpoint import CheckpointError, load, save
from eco_dist.checkpoint.reader import CheckpointReader
from tests.distributed import deepspeed_ranks, ranks
from tests.distributed.deepspeed_ranks import Probe, Probes, config, engine_of
from tests.distributed.fsdp1_models import converted

pytest.importorskip("deepspeed")

STEPS = 2
SAVED_ON = {"single": 1, "fsdp2": 2, "fsdp1": 3, "fsdp1-originals": 2, "zero1": 3, "zero2": 2, "zero3": 3}
LOADED_ON = {"single": 1, "fsdp2": 3, "fsdp1": 2, "fsdp1-originals": 3, "zero1": 2, "zero2": 3, "zero3": 2}
RECIPES = {
    "fp8-8bit": {"recipe": "fp8-8bit"},
    "int4": {"recipe": "int4"},
    "tensor": {"recipe": "fp8", "overrides": {"granularity": "tensor", "injection": "auto"}},
}


def prepared(kind: str, recipe: str, seed: int) -> tuple[nn.Module, Any, Any]:
    """A model, its optimizer, and what takes a step of a number."""
    torch.manual_seed(seed)
    model, eco = Probes(seed=seed), RECIPES[recipe]
    options = {"lr": 3e-3 * (seed + 1), "weight_decay": 0.1, "seed": 7 + seed}
    if kind.startswith("zero"):
        json = config(int(kind[-1]), eco=eco, optimizer={"type": "ECOAdamW", "params": options})
        engine = engine_of(model, json)
        return engine, engine.optimizer, engine
    changed = deepspeed_ranks.recipe_of(eco)
    if kind.startswith("fsdp1"):
        flat, optimizer = converted(model, changed, {Probe}, use_orig_params=kind == "fsdp1-originals", **options)
        return flat, optimizer, None
    (shard_model if kind == "fsdp2" else quantize_weights_)(model, changed)
    return model, ECOAdamW(model.parameters(), **options), None


def train(model: nn.Module, optimizer: Any, engine: Any, first: int) -> None:
    for step in range(first, first + STEPS):
        if engine is not None:
            engine.backward(engine(step))
            engine.step()
            continue
        if isinstance(model, FullyShardedDataParallel):
            model(step).backward()
        else:
            for parameter, gradient in zip(model.parameters(), model.gradients(step), strict=True):
                parameter.grad = gradient
                if isinstance(parameter, DTensor):
                    parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizer.step()
        optimizer.zero_grad()


def save_here(kind: str, recipe: str, root: str) -> None:
    model, optimizer, engine = prepared(kind, recipe, seed=0)
    train(model, optimizer, engine, 0)
    save(root, model, optimizer, step=STEPS)


def load_here(kind: str, recipe: str, sources: dict[str, str], target: str) -> None:
    """Load each checkpoint into the same model, write it out at once, and again after more steps."""
    model, optimizer, engine = prepared(kind, recipe, seed=1)
    for name, root in sources.items():
        load(root, model, optimizer)
        save(f"{target}/{name}", model, optimizer, step=STEPS)
        train(model, optimizer, engine, STEPS)
        save(f"{target}/{name}", model, optimizer, step=2 * STEPS)


def on_ranks(kind: str, worlds: dict[str, int], function: Any, *args: Any) -> None:
    run = deepspeed_ranks.run_ranks if kind.startswith("zero") else ranks.run_ranks
    run(worlds[kind], function, kind, *args)


def stored(folder: Path) -> dict[str, Any]:
    reader = CheckpointReader(folder)
    manifest = reader.manifest
    tensors = {name: reader.tensor(name).view(torch.uint8) for name in manifest.tensors}
    options = {name: {k: v for k, v in g.items() if k != "params"} for g in manifest.groups for name in g["params"]}
    return {**tensors, "records": manifest.parameters, "seed": manifest.seed, "options": options}


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value) if isinstance(value, Tensor) else got[name] == value, name


SOME = ("single", "fsdp2", "fsdp1", "zero2", "zero3")


@pytest.mark.parametrize(("recipe", "kinds"), [("fp8-8bit", tuple(SAVED_ON)), ("int4", SOME), ("tensor", SOME)])
def test_every_engine_loads_every_other(recipe: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    sources = {kind: str(tmp_path / "saved" / kind) for kind in kinds}
    for kind, root in sources.items():
        on_ranks(kind, SAVED_ON, save_here, recipe, root)
    begun = stored(tmp_path / "saved" / "single")
    for root in sources.values():
        assert_same(stored(Path(root)), begun)
    on_ranks("single", LOADED_ON, load_here, recipe, {"single": sources["single"]}, str(tmp_path / "expected"))
    ended = stored(tmp_path / "expected" / "single")
    for kind in kinds:
        on_ranks(kind, LOADED_ON, load_here, recipe, sources, str(tmp_path / kind))
        for source in sources:
            assert_same(stored(tmp_path / kind / source / f"step-{STEPS:08d}"), begun)
            assert_same(stored(tmp_path / kind / source / f"step-{2 * STEPS:08d}"), ended)


def refused(kind: str, root: str) -> str:
    """Into another recipe; on all ranks alike, and nothing is changed."""
    model, optimizer, engine = prepared(kind, "int4", seed=1)
    train(model, optimizer, engine, 0)
    save(f"{root}/before", model, optimizer, step=1)
    try:
        load(f"{root}/other", model, optimizer)
    except CheckpointError as error:
        save(f"{root}/after", model, optimizer, step=1)
        return str(error)
    return "loaded"


@pytest.mark.parametrize("kind", ["zero2", "zero3"])
def test_another_recipe_is_refused(kind: str, tmp_path: Path) -> None:
    save_here("single", "fp8-8bit", str(tmp_path / "other"))
    answers = deepspeed_ranks.run_ranks(2, refused, kind, str(tmp_path))
    assert len(set(answers)) == 1
    assert "convert the model with the recipe of the checkpoint" in answers[0]
    assert_same(stored(tmp_path / "after"), stored(tmp_path / "before"))
