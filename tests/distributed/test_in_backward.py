"""Optimizer-in-backward: the same bits as stepping after backward, with no gradient left behind."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

from eco_dist import ECOAdamW, quantize_weights_, shard_model, step_in_backward
from eco_dist.optim.shard import local
from tests.distributed.models import Net, batch, build, loss_of, train
from tests.distributed.ranks import run_ranks

STEPS = 4


def losses(recipe: str, in_backward: bool, offload: bool = False) -> list[float]:
    model = build()
    shard_model(model, recipe, offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else None)
    optimizer = ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    if in_backward:
        step_in_backward(model, optimizer)
    return train(model, optimizer, STEPS)


@pytest.mark.parametrize("recipe", ["fp8", "fp8-8bit", "fp32-master"])
def test_losses_are_bit_equal(recipe: str) -> None:
    assert run_ranks(2, losses, recipe, True) == run_ranks(2, losses, recipe, False)


def test_losses_are_bit_equal_with_cpu_offload() -> None:
    assert run_ranks(2, losses, "fp8", True, True) == run_ranks(2, losses, "fp8", False, True)


def gradients_left() -> tuple[int, int]:
    model = build()
    shard_model(model, "fp8")
    optimizer = ECOAdamW(model.parameters(), lr=3e-3)
    live = []
    handle = step_in_backward(model, optimizer)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: live.append(sum(p.grad is not None for p in model.parameters()))
        )
    loss_of(model, batch(0)).backward()
    after = sum(p.grad is not None for p in model.parameters())
    optimizer.step()
    handle.remove()
    loss_of(model, batch(1)).backward()
    return after, sum(p.grad is not None for p in model.parameters())


def test_no_gradient_is_left_and_remove_brings_them_back() -> None:
    for left, after_removal in run_ranks(2, gradients_left):
        assert left == 0
        assert after_removal == len(list(build().parameters()))


def bad_gradient() -> tuple[bool, int]:
    """A hook before ours spoils one gradient on one rank: both ranks keep that weight."""
    import torch.distributed as dist

    model = build()
    shard_model(model, "fp8")
    optimizer = ECOAdamW(model.parameters(), lr=3e-3)
    target = model.blocks[0].up.weight
    if dist.get_rank() == 1:
        target.register_post_accumulate_grad_hook(lambda p: local(p.grad).fill_(torch.nan))
    step_in_backward(model, optimizer)
    before = local(target).codes.clone()
    loss_of(model, batch(0)).backward()
    return torch.equal(before, local(target).codes), optimizer.skipped_steps


def test_ranks_skip_a_parameter_together() -> None:
    assert run_ranks(2, bad_gradient) == [(True, 1), (True, 1)]


def alone(recipe: str = "fp8") -> tuple[Net, ECOAdamW]:
    model = build()
    quantize_weights_(model, recipe)
    return model, ECOAdamW(model.parameters(), lr=3e-3)


def test_one_process_is_bit_equal_too() -> None:
    model, optimizer = alone()
    expected = train(model, optimizer, STEPS)
    model, optimizer = alone()
    step_in_backward(model, optimizer)
    assert train(model, optimizer, STEPS) == expected


def test_clipping_and_accumulation_are_refused() -> None:
    model, optimizer = alone()
    with pytest.raises(ValueError, match="max_grad_norm=None"):
        step_in_backward(model, optimizer, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="accumulate=1"):
        step_in_backward(model, optimizer, accumulate=2)
    step_in_backward(model, optimizer)
    loss_of(model, batch(0)).backward()
    with pytest.raises(RuntimeError, match="second backward"):
        loss_of(model, batch(1)).backward()


def test_a_parameter_the_optimizer_does_not_have_is_refused() -> None:
    model, _ = alone()
    with pytest.raises(ValueError, match=r"'embed.weight' in the optimizer"):
        step_in_backward(model, ECOAdamW(model.blocks.parameters(), lr=1e-3))
    assert isinstance(model, nn.Module)


def cut_scale() -> str:
    model = build()
    shard_model(model, "int4")
    try:
        step_in_backward(model, ECOAdamW(model.parameters(), lr=1e-3))
    except ValueError as error:
        return str(error)
    return ""


def test_one_scale_for_a_sharded_tensor_is_refused() -> None:
    assert all("granularity 'tensor'" in message for message in run_ranks(2, cut_scale))
