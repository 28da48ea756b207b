"""Stage 0 with an optimizer that shards by itself: the same bits, and what is said where the engine cannot work."""

import argparse
import tempfile
import warnings
from json import dumps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eco_dist import ECOAdamW
from eco_dist.checkpoint import load, save
from eco_dist.checkpoint.reader import CheckpointReader
from tests.distributed.deepspeed_ranks import (
    EVEN,
    ODD,
    Probes,
    config,
    contents,
    engine_of,
    prepare_rank,
    run_ranks,
    train,
    train_probes,
)
from tests.distributed.models import batch, build, loss_of
from tests.distributed.test_deepspeed_checkpoint import all_equal
from tests.distributed.test_deepspeed_layout import RECIPES, STEPS, assert_equal_bits, one_process

pytest.importorskip("deepspeed")


def fallback(model: nn.Module, dtype: str = "fp32", eco: dict[str, Any] | None = None, **extra: Any) -> Any:
    """An engine of a JSON for stage 2, but for the one key."""
    return engine_of(model, config(2, dtype, eco={"recipe": "fp8", **(eco or {}), "fallback": True}, **extra))


def hold(recipes: list[str]) -> dict[str, Any]:
    held = {}
    for recipe in recipes:
        engine = fallback(Probes(), eco=RECIPES[recipe])
        assert type(engine.optimizer).__name__ == "FallbackOptimizer"
        train_probes(engine, STEPS)
        held[recipe] = contents(engine)
        for name, parameter in engine.module.named_parameters():
            if name in held[recipe] and torch.distributed.get_world_size() == 1:
                stored = engine.optimizer.shards[id(parameter)].weight.decode()
                assert torch.equal(parameter.detach().flatten(), stored.flatten()), name
    return held


@pytest.mark.parametrize(("world", "recipes"), [(1, ["fp8"]), (2, list(RECIPES)), (3, ["fp8-8bit", "changed"])])
def test_any_number_of_ranks_holds_the_bits_of_one_process(world: int, recipes: list[str]) -> None:
    """For which stage 1, 2, 3 and FSDP2 are tested as well."""
    parts = run_ranks(world, hold, recipes)
    for recipe in recipes:
        assert_equal_bits([part[recipe] for part in parts], one_process(RECIPES[recipe]))


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 6}}


def resume(directory: str) -> tuple[bool, list[float], list[float]]:
    eco = {"recipe": "fp8-8bit"}
    engine = fallback(build(**ODD), "bf16", eco, scheduler=WARMUP, gradient_clipping=1.0)
    train(engine, 3)
    engine.save_checkpoint(directory)
    saved = contents(engine)
    expected = train(engine, 3, first=3)
    again = fallback(build(seed=1, **ODD), "bf16", eco, scheduler=WARMUP, gradient_clipping=1.0)
    again.load_checkpoint(directory)
    return all_equal(saved, contents(again)), expected, train(again, 3, first=3)


def weights_alone(directory: str) -> float:
    """Loaded without optimizer state, weights are encoded again, and forward reads what is stored; how far that is."""
    engine = fallback(build(seed=2, **ODD), "bf16")
    engine.load_checkpoint(directory, load_optimizer_states=False)
    wanted = {name: value.clone() for name, value in engine.module.state_dict().items()}
    loss_of(engine, batch(0))
    got = engine.module.state_dict()
    return max(float((got[name] - value).abs().max() / value.abs().max()) for name, value in wanted.items())


def test_a_resume_is_exact_on_as_many_ranks(tmp_path: Path) -> None:
    for restored, expected, losses in run_ranks(2, resume, str(tmp_path)):
        assert restored
        assert losses == expected
    assert all(0 < error <= 0.04 for error in run_ranks(2, weights_alone, str(tmp_path)))
    assert "expected the state of 1 ranks of the fallback, got 2" in run_ranks(1, load_on_another, str(tmp_path))[0]


def load_on_another(directory: str) -> str:
    engine = fallback(build(**ODD), "bf16", {"recipe": "fp8-8bit"})
    try:
        engine.load_checkpoint(directory)
    except ValueError as error:
        return str(error)
    return "loaded"


def exchange(fallback_first: bool, root: str) -> None:
    """Save with one, load with the other."""
    for number, is_fallback in enumerate((fallback_first, not fallback_first)):
        engine = fallback(Probes(seed=number)) if is_fallback else engine_of(Probes(seed=number), config(2))
        if number:
            load(f"{root}/0", engine, engine.optimizer)
        train_probes(engine, STEPS, first=number * STEPS)
        save(f"{root}/{number}", engine, engine.optimizer, step=STEPS)


def test_checkpoints_go_to_other_engines_and_come_from_them(tmp_path: Path) -> None:
    """Each way ends with the same bits."""
    for first in (True, False):
        run_ranks(2, exchange, first, str(tmp_path / str(first)))
    one, other = (CheckpointReader(tmp_path / str(first) / "1") for first in (True, False))
    assert one.manifest.tensors.keys() == other.manifest.tensors.keys()
    for name in one.manifest.tensors:
        assert torch.equal(one.tensor(name).view(torch.uint8), other.tensor(name).view(torch.uint8)), name


def overflow() -> tuple[bool, int, float]:
    engine = fallback(build(**ODD), "bf16")
    train(engine, 1)
    before, shown = contents(engine), engine.module.state_dict()["blocks.0.up.weight"].clone()
    next(iter(engine.module.parameters())).register_hook(
        lambda grad: grad * float("nan") if torch.distributed.get_rank() == 1 else grad
    )
    train(engine, 1, first=1)
    same = all_equal(before, contents(engine)) and torch.equal(shown, engine.module.state_dict()["blocks.0.up.weight"])
    return same, engine.skipped_steps, engine.optimizer.optimizer.client.skipped_steps


def test_a_nan_on_one_rank_skips_the_step_on_all() -> None:
    assert run_ranks(2, overflow) == [(True, 1, 1)] * 2


def resident() -> float:
    """Bytes a quantized parameter on this rank between steps, the model's included."""
    from eco_dist.deepspeed import measure

    engine = fallback(build(**EVEN), "bf16", {"recipe": "fp8-8bit"})
    train(engine, 2)
    report = measure(engine, strict=True)
    rank = report.ranks[torch.distributed.get_rank()]
    names = {shard.plan.name: shard.plan.elements for shard in engine.optimizer.shards.values()}
    return sum(entry.bytes for entry in rank.holding.tensors if entry.name in names) / sum(names.values())


def test_bytes_between_steps() -> None:
    """The model in bf16, a share of codes, scales and moments, and no master."""
    for count in run_ranks(2, resident, fresh=True):
        assert count == pytest.approx(2 + 3.09 / 2, abs=0.05)


def refused(extra: dict[str, Any]) -> str:
    try:
        fallback(build(**ODD), **{"dtype": "fp32", **extra})
    except ValueError as error:
        return str(error)
    return "accepted"


def sentences() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fallback(build(**ODD))
    said = [str(warning.message) for warning in caught if "stage 0" in str(warning.message)]
    return [*said, refused({"dtype": "fp16"}), refused({"checkpoint": {"load_universal": True}})]


def test_it_says_so_and_what_it_cannot_do() -> None:
    said, fp16, universal = run_ranks(1, sentences)[0]
    assert "every rank keeps the whole model" in said
    assert fp16.endswith("use bf16")
    assert "take_over(path, engine, engine.optimizer)" in universal


def broken_contract() -> tuple[str, str, str]:
    """As with a DeepSpeed whose stage 3 has changed: refused, unless the JSON asks for the fallback."""
    prepare_rank()
    import deepspeed

    import eco_dist.deepspeed  # noqa: F401
    from eco_dist.checkpoint import take_over
    from eco_dist.engines.deepspeed import contract
    from eco_dist.engines.deepspeed.install import install

    saved, where = contract.SIGNATURES, "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.step"
    contract.SIGNATURES = {where: ("self", "loss"), "deepspeed.gone:step": ("self",)}
    try:
        install(take_over)
        message = "accepted"
        try:
            engine_of(build(**ODD), config(2))
        except ImportError as error:
            message = str(error)
        engine = fallback(build(**ODD), "bf16")
        assert all(loss == loss for loss in train(engine, 2))
        model = build(**ODD)
        client = ECOAdamW(model.parameters(), lr=1e-3)
        json = {key: value for key, value in config(3, "bf16").items() if key != "optimizer"}
        json["eco"] = {"fallback": True}
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(dumps(json))
            file.flush()
            args = argparse.Namespace(deepspeed_config=file.name)
            own = deepspeed.initialize(args=args, model=model, optimizer=client)[0]
        others = {key: value for key, value in json.items() if key != "eco"}
        plain = build(**ODD)
        torch_adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3)
        other = deepspeed.initialize(model=plain, optimizer=torch_adamw, config={**others, "zero_optimization": {}})[0]
        return message, type(own.optimizer).__name__, type(other.basic_optimizer).__name__
    finally:
        contract.SIGNATURES = saved
        install(take_over)


def test_a_broken_contract_is_refused_with_the_list_and_the_way_out() -> None:
    for message, own, other in run_ranks(2, broken_contract):
        sentence, *missing = message.split("\n  ")
        assert "'fallback': true in the 'eco' section" in sentence
        assert any("Stage3.step has the parameters self, closure, expected self, loss" in line for line in missing)
        assert "deepspeed.gone:step does not exist" in missing
        assert (own, other) == ("FallbackOptimizer", "AdamW")
