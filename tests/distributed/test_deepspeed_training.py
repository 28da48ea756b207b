"""The training program under DeepSpeed: the data, metrics and memory report of any other run, and its checkpoints."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from eco_dist import ECOAdamW, Recipe
from eco_dist.engines.fsdp2 import shard_model
from eco_dist.optim.shard import local
from eco_dist.training import Summary, load_config, train
from eco_dist.training.dry_run import dry_run
from eco_dist.training.metrics import read_metrics
from eco_dist.weights import QuantizedWeight
from tests.distributed import ranks
from tests.distributed.deepspeed_ranks import (
    Probes,
    config,
    contents,
    engine_of,
    forget_groups,
    prepare_rank,
    run_ranks,
    train_probes,
)

pytest.importorskip("deepspeed")

STEPS = 6
TEXT = "".join(f"{i} green bottles hanging on the wall, and if one should fall\n" for i in range(300))
# DeepSpeed's own F.linear would stay in a worker that other tests use.
SETTINGS = {"zero_optimization": {"memory_efficient_linear": False}}


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("text")
    (folder / "song.txt").write_text(TEXT)
    (folder / "settings.json").write_text(json.dumps(SETTINGS))
    return [
        f"data.path={folder / 'song.txt'}",
        f"engine.json={folder / 'settings.json'}",
        "engine=deepspeed",
        "model=nano",
        "data.seq_len=32",
        "data.batch=8",
        "optimizer.lr=5e-3",
        f"run.steps={STEPS}",
        "run.log_every=2",
        "run.eval_every=3",
        "run.plot=false",
    ]


def one_run(overrides: list[str], fault: str = "") -> Summary | str:
    """A run of this rank and its peers, or what stopped it."""
    prepare_rank()
    os.environ["ECO_DIST_FAULT"] = fault
    try:
        return train(load_config(None, overrides))
    except (OSError, ValueError) as error:
        return str(error)
    finally:
        del os.environ["ECO_DIST_FAULT"]


def by_category(report: dict[str, Any]) -> dict[int, dict[str, int]]:
    """Bytes of every rank."""
    runs = [(first, last, held["by_category"]) for held in report["holdings"] for first, last in held["ranks"]]
    return {rank: held for first, last, held in runs for rank in range(first, last + 1)}


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        (1, ["recipe=fp32-master"]),
        (2, ["recipe=fp8", "run.accumulate=2"]),
        (2, ["recipe=fp8-8bit", "engine.working_copy=kept", "optimizer.clip=null"]),
        (3, ["recipe=fp8"]),
    ],
)
def test_a_run_has_what_a_run_has(stage: int, options: list[str], common: list[str], tmp_path: Path) -> None:
    """Loss falls, predicted memory is measured on every rank, and every file is there."""
    overrides = [*common, f"zero={stage}", f"run.directory={tmp_path}", *options]
    summary, _ = run_ranks(2, one_run, overrides)
    assert isinstance(summary, Summary), summary
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 6]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    assert all(line["grad_norm"] > 0 for line in lines)
    assert (lines[-1]["moved_share"] is None) == ("recipe=fp32-master" in options)
    assert (summary.engine, summary.world_size) == (f"zero{stage}", 2)
    memory = json.loads((tmp_path / "memory.json").read_text())
    assert by_category(memory["measured"]) == by_category(memory["planned"])
    assert summary.measured_static_bytes == summary.planned_static_bytes
    weights = load_file(tmp_path / "weights.safetensors")
    assert sum(weight.numel() for weight in weights.values()) == summary.parameters


def test_stages_and_micro_batches_train_alike(common: list[str], tmp_path: Path) -> None:
    """Equal data: losses differ by the order in which bf16 gradients are summed."""
    losses = []
    for name, options in {"2": ["zero=2"], "3": ["zero=3"], "parts": ["zero=2", "data.micro_batch=1"]}.items():
        summary, _ = run_ranks(2, one_run, [*common, *options, f"run.directory={tmp_path / name}"])
        losses.append(summary.val_loss)
    assert losses == pytest.approx([losses[0]] * 3, abs=0.02)


@pytest.mark.parametrize(("stage", "recipe"), [(2, "fp8"), (3, "fp8-8bit"), (2, "fp32-master")])
def test_a_run_that_broke_off_goes_on_to_the_same_end(
    stage: int, recipe: str, common: list[str], tmp_path: Path
) -> None:
    options = [*common, f"zero={stage}", f"recipe={recipe}", "run.save_every=2", "run.resume=true"]
    whole, _ = run_ranks(2, one_run, [*options, f"run.directory={tmp_path / 'whole'}"])
    broken = [*options, f"run.directory={tmp_path / 'broken'}"]
    assert "no space left" in run_ranks(2, one_run, broken, "train:step-4:raise")[0]
    again, _ = run_ranks(2, one_run, broken)
    assert again.val_loss == whole.val_loss
    first, second = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "broken"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(list((tmp_path / "broken" / "checkpoints").glob("step-*"))) == 2


def test_another_engine_goes_on_from_a_checkpoint(common: list[str], tmp_path: Path) -> None:
    """Stage 3 on two ranks, then stage 2 on one: the same codes, so the same loss but for the order of sums."""
    options = [*common, "zero=3", "run.save_every=3", "run.resume=true", f"run.directory={tmp_path}"]
    whole, _ = run_ranks(2, one_run, [*options, f"run.directory={tmp_path / 'whole'}"])
    assert "no space left" in run_ranks(2, one_run, options, "train:step-4:raise")[0]
    other = run_ranks(1, one_run, [*options, "zero=2"])[0]
    assert isinstance(other, Summary), other
    assert other.val_loss == pytest.approx(whole.val_loss, abs=0.02)
    assert "expected checkpoints with DeepSpeed's masters" in run_ranks(1, one_run, [*options, "recipe=fp32-master"])[0]


def test_mistakes_are_one_sentence(common: list[str], tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    for settings, message in {
        '{"gradient_clipping": 0.5}': "expected gradient_clipping 1.0, as the run's configuration says, got 0.5",
        '{"scheduler": {"type": "WarmupLR"}}': "expected the learning rate from the run's schedule",
        '{"zero_optimization": {"stage": 3}}': "expected stage 2",
    }.items():
        file.write_text(settings)
        fresh = [*common, f"engine.json={file}", f"run.directory={tmp_path / 'fresh'}"]
        assert message in run_ranks(2, one_run, fresh)[0]


# --- the same gradients, the same codes ------------------------------------------------------------------------------


def hold_fsdp2(recipe: str) -> dict[str, dict[str, Tensor]]:
    """Codes, scales and moments of whole weights after two steps under `fully_shard`."""
    model = Probes()
    shard_model(model, Recipe.from_name(recipe), blocks=list(model.probes.values()))
    optimizer = ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1, seed=7)
    for step in range(2):
        model(step).backward()
        optimizer.step()
        optimizer.zero_grad()
    held = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        weight = local(parameter)
        if isinstance(weight, QuantizedWeight):
            state = {key: local(value).clone() for key, value in optimizer.state[parameter].items()}
            held[name] = {"codes": weight.codes.clone(), "scales": weight.scales.clone(), **state}
    return held


def hold_zero(stage: int, recipe: str) -> dict[str, dict[str, Tensor]]:
    engine = engine_of(Probes(), config(stage, eco={"recipe": recipe}))
    train_probes(engine, 2)
    return contents(engine)


def whole(parts: list[dict[str, dict[str, Tensor]]], name: str, key: str) -> Tensor:
    """A tensor of all ranks, in the order of elements."""
    ordered = sorted(
        (part[name] for part in parts if part[name]["codes"].numel()), key=lambda t: int(t.get("first", 0))
    )
    pieces = [part[key].flatten() for part in ordered]
    return pieces[0] if pieces[0].numel() < 2 and key != "codes" else torch.cat(pieces)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-8bit"])
def test_fsdp2_and_every_stage_hold_the_same_bits(recipe: str) -> None:
    sharded = ranks.run_ranks(2, hold_fsdp2, recipe)
    names = list(sharded[0])
    assert len(names) >= 5
    for stage in (1, 2, 3):
        held = run_ranks(2, hold_zero, stage, recipe)
        for name in names:
            for key in sharded[0][name]:
                assert torch.equal(whole(sharded, name, key), whole(held, name, key)), (stage, name, key)


# --- configurations --------------------------------------------------------------------------------------------------


def accepted(cases: list[tuple[Path, list[str], int]]) -> list[dict[str, Any] | None]:
    """DeepSpeed JSONs of dry runs on so many ranks."""
    torch.distributed.destroy_process_group()  # a dry run has a fake one
    linear = torch.nn.functional.linear
    results = []
    for file, overrides, world in cases:
        forget_groups()
        results.append(dry_run(load_config(file, overrides), world).deepspeed)
    torch.nn.functional.linear = linear  # stage 3 has replaced it
    return results


def test_every_deepspeed_json_is_that_of_its_yaml_and_accepted() -> None:
    """DeepSpeed's engine is built with each on a fake group of as many ranks as its name says."""
    files = sorted(Path("configs/deepspeed").glob("*.json"))
    assert len(files) == 8
    cases = []
    for file in files:
        size, world = re.fullmatch(r"(paper-\w+)-(\d+)-gpus", file.stem).groups()
        stage = json.loads(file.read_text())["zero_optimization"]["stage"]
        overrides = ["engine=deepspeed", f"zero={stage}"]
        cases.append((Path(f"configs/{size}.yaml"), overrides, int(world)))
    for file, settings in zip(files, run_ranks(1, accepted, cases)[0], strict=True):
        assert settings == json.loads(file.read_text()), f"{file}: eco-dist train --dry-run prints what it should be"
