"""What people do with `fully_shard`, done with quantized weights on two gloo ranks."""

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from eco_dist import ECOAdamW, QuantizedWeight, measure, plan, quantize_weights_, shard_model
from eco_dist.optim.shard import local
from tests.distributed.models import Net, batch, build, loss_of, sharded, train
from tests.distributed.ranks import run_ranks

STEPS = 4


def on_two_ranks(function):
    """Run a module-level function on two ranks and hand both results to the test."""
    return run_ranks(2, function)


def optimizer_for(model: nn.Module, **options: float) -> ECOAdamW:
    return ECOAdamW(model.parameters(), lr=3e-3, **options)


# --- forward is that of a dequantized twin -------------------------------------------------------------------------


def twin_difference() -> float:
    """Largest difference to a bf16 FSDP2 model that holds the dequantized values."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    twin = build()
    quantize_weights_(twin, "fp8")
    for module in twin.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, QuantizedWeight):
                setattr(module, name, nn.Parameter(parameter.decode()))
    model = build()
    quantize_weights_(model, "fp8")
    outputs = []
    for net in (model, twin):
        for block in net.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
        outputs.append(net(batch(0)))
    return (outputs[0] - outputs[1]).abs().max().item()


def test_output_is_bit_equal_to_a_dequantized_twin_in_bf16() -> None:
    assert on_two_ranks(twin_difference) == [0.0, 0.0]


def own_fully_shard_calls() -> list[float]:
    model = build()
    quantize_weights_(model, "fp8")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return train(model, ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1), STEPS)


def shard_model_call() -> list[float]:
    return sharded("fp8", steps=STEPS)[2]


def test_own_fully_shard_calls_equal_shard_model() -> None:
    assert on_two_ranks(own_fully_shard_calls) == on_two_ranks(shard_model_call)


# --- training features ---------------------------------------------------------------------------------------------


def losses_with_checkpointing(recompute: bool) -> list[float]:
    model = build()
    if recompute:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
    # Names choose random bits, and the wrapper renames: give both models the same streams.
    quantize_weights_(model, "fp8-naive")
    for number, weight in enumerate(p for p in model.parameters() if isinstance(p, QuantizedWeight)):
        weight.tensor_id = number
    shard_model(model, "fp8-naive")
    return train(model, optimizer_for(model), STEPS)


def test_activation_checkpointing_changes_no_bit() -> None:
    assert run_ranks(2, losses_with_checkpointing, True) == run_ranks(2, losses_with_checkpointing, False)


def gradients_accumulated(mode: str) -> list[torch.Tensor]:
    model = build()
    shard_model(model, "fp8")
    halves = batch(0, size=4).chunk(2)
    if mode == "whole":
        loss_of(model, batch(0, size=4)).backward()
    else:
        for index, half in enumerate(halves):
            model.set_requires_gradient_sync(mode == "sync" or index == len(halves) - 1)
            (loss_of(model, half) / len(halves)).backward()
    return [local(p.grad).clone() for p in model.parameters()]


@pytest.mark.parametrize("mode", ["sync", "no_sync"])
def test_gradient_accumulation(mode: str) -> None:
    for accumulated, whole in zip(
        run_ranks(2, gradients_accumulated, mode), run_ranks(2, gradients_accumulated, "whole"), strict=True
    ):
        for a, b in zip(accumulated, whole, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def clipped(foreach: bool | None) -> tuple[float, float, float]:
    model = build()
    shard_model(model, "fp8")
    alone = build()
    quantize_weights_(alone, "fp8")
    for net in (model, alone):
        loss_of(net, batch(0)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=foreach).full_tensor()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    after = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
    return norm.item(), expected.item(), after.item()


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_uses_the_global_norm(foreach: bool | None) -> None:
    for norm, expected, after in run_ranks(2, clipped, foreach):
        assert norm == pytest.approx(expected, rel=1e-5)
        assert after == pytest.approx(0.01, rel=1e-3)


def clipped_inside() -> tuple[float, float]:
    """The norm the step clips by, and the one of the whole model; one parameter has no gradient on any rank."""
    model = build()
    shard_model(model, "fp8")
    alone = build()
    quantize_weights_(alone, "fp8")
    for net in (model, alone):
        loss_of(net, batch(0)).backward()
        next(net.parameters()).grad = None
    optimizer = optimizer_for(model, max_grad_norm=0.01)
    optimizer.step()
    expected = nn.utils.get_total_norm([p.grad for p in alone.parameters() if p.grad is not None])
    assert optimizer.grad_norm is not None
    return optimizer.grad_norm, expected.item()


def test_clipping_inside_the_step_uses_the_global_norm() -> None:
    for world in (2, 3):
        for norm, expected in run_ranks(world, clipped_inside):
            assert norm == pytest.approx(expected, rel=1e-5)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def tied() -> tuple[list[float], list[int]]:
    torch.manual_seed(0)
    model = Tied()
    planned = plan(model, "fp8", engine="fsdp2", world_size=2, plain="bf16")
    shard_model(model, "fp8", plain="bf16")  # the tied matrix becomes codes too, as BF16
    optimizer = optimizer_for(model)
    losses = train(model, optimizer, STEPS)
    measured = measure(model, optimizer)
    assert model.head.weight is model.embed.weight
    return losses, [measured.static_bytes(rank) - planned.static_bytes(rank) for rank in range(2)]


def test_tied_weights_stay_tied_and_are_stored_once() -> None:
    first, second = on_two_ranks(tied)
    assert first == second
    losses, differences = first
    assert losses[-1] != losses[0]
    assert differences == [0, 0]


def frozen() -> tuple[bool, bool, list[int]]:
    model = build()
    model.blocks[0].requires_grad_(False)
    planned = plan(model, "fp8", engine="fsdp2", world_size=2)
    shard_model(model, "fp8")
    optimizer = ECOAdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    before = [local(p).codes.clone() for p in (model.blocks[0].up.weight, model.blocks[1].up.weight)]
    train(model, optimizer, STEPS)
    after = [local(p).codes for p in (model.blocks[0].up.weight, model.blocks[1].up.weight)]
    measured = measure(model, optimizer)
    differences = [measured.static_bytes(rank) - planned.static_bytes(rank) for rank in range(2)]
    return torch.equal(before[0], after[0]), torch.equal(before[1], after[1]), differences


def test_frozen_layers_stay_and_hold_no_moments() -> None:
    assert on_two_ranks(frozen) == [(True, False, [0, 0])] * 2


def offloaded(offload: bool) -> list[float]:
    model = build()
    shard_model(model, "fp8", offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else None)
    return train(model, optimizer_for(model), STEPS)


def test_cpu_offload_unpinned_changes_no_bit() -> None:
    assert run_ranks(2, offloaded, True) == run_ranks(2, offloaded, False)


def compiled(backend: str | None) -> list[float]:
    model = build()
    if backend:
        for block in model.blocks:
            block.compile(backend=backend)
    shard_model(model, "fp8")
    return train(model, optimizer_for(model), STEPS)


def test_compiled_layers_give_the_same_losses() -> None:
    for eager, traced in zip(run_ranks(2, compiled, None), run_ranks(2, compiled, "aot_eager"), strict=True):
        assert traced == pytest.approx(eager, abs=5e-3)
        assert traced[0] == pytest.approx(eager[0], abs=1e-6)


def replicated() -> list[float]:
    model = build()
    quantize_weights_(model, "fp8")
    for block in model.blocks:
        replicate(block)
    replicate(model)
    return train(model, optimizer_for(model), STEPS)


def test_replicate_trains_replicas_bit_equal() -> None:
    first, second = on_two_ranks(replicated)
    assert first == second


def from_meta() -> tuple[int, list[float]]:
    with torch.device("meta"):
        model = Net()
    shard_model(model, "fp8")
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else nn.init.ones_(parameter)
    return sum(isinstance(local(p), QuantizedWeight) for p in model.parameters()), train(model, optimizer_for(model), 2)


def test_meta_device_initialization() -> None:
    for quantized, losses in on_two_ranks(from_meta):
        assert quantized == 4
        assert all(torch.isfinite(torch.tensor(losses)))
