"""A checkpoint goes between FSDP1, FSDP2 and one process, and the run goes on bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor, distribute_tensor

from eco_dist import ECOAdamW, Recipe, quantize_weights_, shard_model
from eco_dist.checkpoint import CheckpointError, load, save
from eco_dist.checkpoint.dcp import dcp_state
from eco_dist.checkpoint.reader import CheckpointReader
from tests.distributed.deepspeed_ranks import Probe, Probes
from tests.distributed.fsdp1_models import converted
from tests.distributed.ranks import run_ranks

STEPS = 2
SAVED_ON = {"single": 1, "fsdp1": 3, "fsdp1-originals": 2, "fsdp2": 2}
LOADED_ON = {"single": 1, "fsdp1": 2, "fsdp1-originals": 3, "fsdp2": 3}
RECIPES = {
    "fp8-8bit": Recipe.from_name("fp8-8bit"),
    "tensor": Recipe.from_name("fp8").replace(granularity="tensor", injection="auto"),
}


def prepared(kind: str, recipe: str, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model, options = Probes(seed=seed), {"lr": 3e-3 * (seed + 1), "weight_decay": 0.1, "seed": 7 + seed}
    if kind.startswith("fsdp1"):
        return converted(model, RECIPES[recipe], {Probe}, use_orig_params=kind == "fsdp1-originals", **options)
    (shard_model if kind == "fsdp2" else quantize_weights_)(model, RECIPES[recipe])
    return model, ECOAdamW(model.parameters(), **options)


def train(kind: str, model: nn.Module, optimizer: Any, first: int) -> None:
    for step in range(first, first + STEPS):
        if kind.startswith("fsdp1"):
            model(step).backward()
        else:
            for parameter, gradient in zip(model.parameters(), model.gradients(step), strict=True):
                parameter.grad = gradient
                if isinstance(parameter, DTensor):
                    parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizer.step()
        optimizer.zero_grad()


def save_here(kind: str, recipe: str, root: str) -> None:
    model, optimizer = prepared(kind, recipe, seed=0)
    train(kind, model, optimizer, 0)
    save(root, model, optimizer, step=STEPS)


def load_here(kind: str, recipe: str, sources: dict[str, str], target: str) -> None:
    """Load each checkpoint into the same model, write it out at once, and again after more steps."""
    model, optimizer = prepared(kind, recipe, seed=1)
    for name, root in sources.items():
        load(root, model, optimizer)
        save(f"{target}/{name}", model, optimizer, step=STEPS)
        train(kind, model, optimizer, STEPS)
        save(f"{target}/{name}", model, optimizer, step=2 * STEPS)


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


@pytest.mark.parametrize(("recipe", "kinds"), [("fp8-8bit", tuple(SAVED_ON)), ("tensor", ("single", "fsdp1"))])
def test_every_kind_loads_every_other(recipe: str, kinds: tuple[str, ...], tmp_path: Path) -> None:
    sources = {kind: str(tmp_path / "saved" / kind) for kind in kinds}
    for kind, root in sources.items():
        run_ranks(SAVED_ON[kind], save_here, kind, recipe, root)
    begun = stored(tmp_path / "saved" / "single")
    for root in sources.values():
        assert_same(stored(Path(root)), begun)
    run_ranks(1, load_here, "single", recipe, {"single": sources["single"]}, str(tmp_path / "expected"))
    ended = stored(tmp_path / "expected" / "single")
    for kind in kinds:
        run_ranks(LOADED_ON[kind], load_here, kind, recipe, sources, str(tmp_path / kind))
        for source in sources:
            assert_same(stored(tmp_path / kind / source / f"step-{STEPS:08d}"), begun)
            assert_same(stored(tmp_path / kind / source / f"step-{2 * STEPS:08d}"), ended)


def frozen_and_replicated(root: str) -> dict[str, str]:
    """Replicas write once, a frozen weight comes along, and what does not fit is refused."""
    model = Probes()
    model.probes["odd"].requires_grad_(False)
    wrapped, optimizer = converted(model, "fp8", {Probe}, sharding_strategy=ShardingStrategy.NO_SHARD)
    save(root, wrapped, optimizer, step=0)
    answers = {}
    for name, attempt in {
        "recipe": lambda: load(root, *converted(Probes(), "int4", {Probe})),
        "DCP": lambda: dcp_state(wrapped, optimizer),
    }.items():
        try:
            attempt()
        except (CheckpointError, TypeError) as error:
            answers[name] = str(error)
    return answers


def test_replicas_frozen_weights_and_refusals(tmp_path: Path) -> None:
    for answers in run_ranks(2, frozen_and_replicated, str(tmp_path)):
        assert "convert the model with the recipe of the checkpoint" in answers["recipe"]
        assert "use eco_dist.checkpoint.save" in answers["DCP"]
    reader = CheckpointReader(tmp_path)
    assert torch.equal(reader.tensor("probes.odd.weight"), Probes().probes["odd"].weight)
    assert all(len(tensor.runs) == 1 for tensor in reader.manifest.tensors.values())
