"""FSDP1 features on converted models: accumulation, clipping, skipped steps, schedulers, state dicts, refusals."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    StateDictType,
)

from eco_dist import ECOAdamW, step_in_backward
from eco_dist.checkpoint.holders import holder_of
from eco_dist.engines.fsdp1.optimizer import FlatOptimizer
from eco_dist.fsdp1 import convert
from tests.distributed.fsdp1_models import BF16, contents, converted, wrap
from tests.distributed.models import Block, Net, batch, build, loss_of, single
from tests.distributed.ranks import run_ranks


def train(model: nn.Module, optimizer: Any, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def stored_weights(model: FullyShardedDataParallel) -> dict[str, Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in model.named_parameters()}


def same(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> bool:
    return all(torch.equal(value, other[name][key]) for name, kinds in one.items() for key, value in kinds.items())


def same_weights(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def clipped(use_orig_params: bool) -> dict[str, Any]:
    """The same norm by FSDP's clipping and by ours, and the same bits."""
    model, optimizer = converted(build(), "fp8", use_orig_params=use_orig_params)
    other, inside = converted(build(), "fp8", use_orig_params=use_orig_params, max_grad_norm=1e-2)
    norms = []
    for step in range(2):
        loss_of(model, batch(step)).backward()
        norms.append(float(model.clip_grad_norm_(1e-2)))
        optimizer.step()
        optimizer.zero_grad()
        loss_of(other, batch(step)).backward()
        inside.step()
        inside.zero_grad()
        norms.append(inside.grad_norm)
    one, two = stored_weights(model), stored_weights(other)
    return {"norms": norms, "difference": max(float((one[name] - two[name]).abs().max()) for name in one)}


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_clipping_before_and_inside_of_the_step_agree(use_orig_params: bool) -> None:
    for answer in run_ranks(3, clipped, use_orig_params):
        assert answer["norms"][0] == pytest.approx(answer["norms"][1], rel=1e-5)
        assert answer["norms"][2] == pytest.approx(answer["norms"][3], rel=1e-2)
        assert answer["difference"] < 2e-2


def left_alone(use_orig_params: bool) -> dict[str, Any]:
    """What a NaN on one rank, no gradient and lr 0 change, and what a scheduler of the client does."""
    wrapped = wrap(build(), {Block}, use_orig_params=use_orig_params, mixed_precision=BF16)
    client = ECOAdamW(wrapped.parameters(), lr=3e-3, seed=7)
    optimizer = convert(wrapped, client, recipe="fp8-8bit")
    scheduler = torch.optim.lr_scheduler.LambdaLR(client, lambda step: 1.0 if step < 2 else 0.0)
    train(wrapped, optimizer, 1)
    scheduler.step()
    before, answers = contents(optimizer), {}
    loss = loss_of(wrapped, batch(5))
    (loss * math.nan if dist.get_rank() == 1 else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    answers["a NaN on a rank"] = same(before, contents(optimizer)) and optimizer.skipped_steps == 1
    train(wrapped, optimizer, 1, first=1)
    scheduler.step()
    moved = contents(optimizer)
    answers["a step moves"] = not same(before, moved)
    train(wrapped, optimizer, 1, first=2)
    answers["lr 0"] = same(moved, contents(optimizer)) and optimizer.param_groups[0]["lr"] == 0.0
    return answers


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_must_change_nothing_changes_nothing(use_orig_params: bool) -> None:
    for answers in run_ranks(2, left_alone, use_orig_params):
        assert answers == dict.fromkeys(answers, True)


def shown(use_orig_params: bool, mixed: bool) -> dict[str, Any]:
    """Weights as FSDP shows them, against the codes of all ranks; then written from outside."""
    options = {"use_orig_params": use_orig_params, "mixed_precision": BF16 if mixed else None}
    model, optimizer = converted(build(), "fp8", **options)
    train(model, optimizer, 2)
    answers: dict[str, Any] = {}
    weights = stored_weights(model)
    plain = build()
    plain.load_state_dict(weights)
    tokens = batch(9)
    model.eval()
    with torch.no_grad():
        expected = (plain.bfloat16() if mixed else plain)(tokens)
        answers["forward computes with them"] = torch.equal(model(tokens), expected)
    config = FullStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
        answers["state dict"] = same_weights(dict(state), weights)
        before = contents(optimizer)
        model.load_state_dict(state)
        answers["loaded as it was"] = same(before, contents(optimizer))
        changed = {name: value.clone() for name, value in state.items()}
        changed["blocks.1.up.weight"] += 0.5
        changed["head.weight"] += 0.5
        model.load_state_dict(changed)
    loaded = stored_weights(model)
    near = {name: float((loaded[name] - changed[name]).abs().max()) for name in loaded}
    answers["only the weight that differs is encoded"] = [name for name, value in near.items() if value] == [
        "blocks.1.up.weight"
    ]
    answers["near"] = near["blocks.1.up.weight"] < 0.05
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        sharded = model.state_dict()
        model.load_state_dict(sharded)
    answers["sharded state dict"] = same_weights(loaded, stored_weights(model))
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        dict(model.named_parameters())["blocks.0.down.weight" if use_orig_params else first_name(model)].zero_()
    answers["written while summoned"] = sum(not value.any() for value in stored_weights(model).values()) == 1
    model.train()
    train(model, optimizer, 1, first=3)
    answers["trains on"] = not same_weights(loaded, stored_weights(model))
    return answers


def first_name(model: nn.Module) -> str:
    return next(name for name, _ in model.named_parameters() if name.endswith("blocks.0.down.weight"))


@pytest.mark.parametrize(("use_orig_params", "mixed"), [(False, True), (True, False)])
def test_fsdp_shows_and_takes_the_stored_weights(use_orig_params: bool, mixed: bool) -> None:
    for answers in run_ranks(3, shown, use_orig_params, mixed):
        assert answers == dict.fromkeys(answers, True)


def refusals() -> dict[str, str]:
    def message(function: Callable[[], Any]) -> str:
        try:
            function()
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    def ready(model: Net | None = None, **options: Any) -> tuple[FullyShardedDataParallel, ECOAdamW]:
        wrapped = wrap(model or build(), {Block}, **options)
        return wrapped, ECOAdamW(wrapped.parameters(), lr=1e-3)

    model, client = ready()
    bad = build()
    with torch.no_grad():
        bad.blocks[0].up.weight[0, 0] = math.nan
    answers = {
        "not FSDP": message(lambda: convert(build(), client, recipe="fp8")),
        "not ECO": message(lambda: convert(model, torch.optim.SGD(model.parameters()), recipe="fp8")),
        "no codes": message(lambda: convert(model, client, recipe="fp32-master")),
        "strangers": message(lambda: convert(model, ECOAdamW(build().parameters()), recipe="fp8")),
        "NaN": message(lambda: convert(*ready(bad), recipe="fp8")),
        "offload": message(lambda: convert(*ready(cpu_offload=CPUOffload(offload_params=True)), recipe="fp8")),
    }
    optimizer = convert(model, client, recipe="fp8")
    assert isinstance(optimizer, FlatOptimizer)
    answers["twice"] = message(lambda: convert(model, ECOAdamW(model.parameters()), recipe="fp8"))
    answers["client"] = message(client.step)
    answers["in backward"] = message(lambda: step_in_backward(model, optimizer))
    answers["client's checkpoint"] = message(lambda: holder_of(client, model))
    answers["no momentum"] = message(
        lambda: convert(ready()[0], ECOAdamW(wrap(build(), {Block}).parameters(), betas=(0.0, 0.9)), recipe="fp8")
    )
    answers["frozen"] = message(lambda: convert(*ready(build().requires_grad_(False)), recipe="fp8"))
    answers["state"] = message(optimizer.state_dict)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        answers["local"] = message(model.state_dict)
    with model.no_sync():
        loss_of(model, batch(0)).backward()
    answers["no_sync"] = message(optimizer.step)
    return answers


def test_what_does_not_work_is_refused_in_a_sentence() -> None:
    for answers in run_ranks(2, refusals):
        for case, words in {
            "not FSDP": "TypeError: expected a model in torch.distributed.fsdp.FullyShardedDataParallel, got Net",
            "not ECO": "TypeError: expected ECOAdamW or ECOSGD over model.parameters(), got SGD",
            "no codes": "ValueError: expected a recipe that stores weights as codes, got 'fp32-master'",
            "strangers": "ValueError: expected an optimizer of the FSDP model's parameters",
            "NaN": "ValueError: expected",
            "offload": "ValueError: expected FSDP without cpu_offload",
            "twice": "ValueError: expected a plain FSDP model",
            "client": "RuntimeError: expected a step of the optimizer that eco_dist.fsdp1.convert returned",
            "in backward": "ValueError: expected '",
            "client's checkpoint": "TypeError: expected what eco_dist.fsdp1.convert returned",
            "no momentum": "ValueError: expected beta1",
            "frozen": "ValueError: expected an optimizer with parameters that train",
            "state": "NotImplementedError: expected eco_dist.checkpoint.save",
            "local": "NotImplementedError: expected FULL_STATE_DICT or SHARDED_STATE_DICT",
            "no_sync": "RuntimeError: expected reduced gradients",
        }.items():
            assert answers[case].startswith(words), (case, answers[case])


def losses_of(variants: tuple[str, ...]) -> dict[str, list[float]]:
    """Losses of the same training with other features of FSDP."""
    result = {}
    for variant in variants:
        model, options = build(), dict(OPTIONS.get(variant, {}))
        if variant == "bf16 model":
            model = model.bfloat16()
        wrapped = wrap(model, {Block}, use_orig_params=variant == "compiled", **options)
        if variant == "activation checkpointing":
            apply_activation_checkpointing(wrapped, check_fn=lambda module: isinstance(module, Block))
        optimizer = convert(wrapped, ECOAdamW(wrapped.parameters(), lr=3e-3, seed=7), recipe="fp8")
        called = torch.compile(wrapped, backend="aot_eager") if variant == "compiled" else wrapped
        result[variant] = []
        for step in range(4):
            loss = loss_of(called, batch(step % 2))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result[variant].append(loss.item())
    return result


OPTIONS = {
    "prefetch": {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    "bf16 gradients": {
        "mixed_precision": MixedPrecision(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, keep_low_precision_grads=True
        )
    },
}


def test_features_of_fsdp_train_alike() -> None:
    exact, near = ("activation checkpointing", "prefetch", "compiled"), ("bf16 gradients", "bf16 model")
    expected = single("fp8", steps=1)[2]
    for losses in run_ranks(2, losses_of, ("plain", *exact, *near)):
        assert losses["plain"][0] == pytest.approx(expected[0], rel=1e-6)
        assert losses["plain"][-1] < losses["plain"][0] - 0.05
        for variant in exact:
            assert losses[variant] == losses["plain"], variant
        for variant in near:
            assert losses[variant] == pytest.approx(losses["plain"], abs=0.02), variant
