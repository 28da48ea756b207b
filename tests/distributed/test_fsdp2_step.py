"""Given the same gradients, sharded equals unsharded bit for bit, at every world size."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from eco_dist import ECOSGD, ECOAdamW, Recipe, quantize_weights_, shard_model
from eco_dist.optim import ECOOptimizer
from eco_dist.optim.shard import local
from eco_dist.weights import QuantizedWeight
from tests.distributed.models import Net, build, sharded, single
from tests.distributed.ranks import run_ranks

RECIPES = [
    "fp8",
    "fp8-8bit",
    "fp8-residual-8bit",
    "paper",
    "int4",
    "bf16",
    "fp8-master",
]
STEPS = 3


def gradients_of(model: Net, step: int) -> dict[str, Tensor]:
    """Whole gradients that do not depend on how anything is cut."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) * 0.1 for name, p in model.named_parameters()}


def rows_of(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's rows of a whole tensor, as the parameter's own kind of tensor."""
    if not isinstance(parameter, DTensor):
        return whole
    dim = parameter.device_mesh.ndim - 1
    chunk = -(-whole.shape[0] // parameter.device_mesh.size(dim))
    start = min(chunk * parameter.device_mesh.get_local_rank(dim), whole.shape[0])
    mine = whole[start : start + chunk]
    return DTensor.from_local(
        mine, parameter.device_mesh, parameter.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def step_with_given_gradients(model: Net, optimizer: ECOOptimizer) -> None:
    for step in range(STEPS):
        for (_, parameter), whole in zip(model.named_parameters(), gradients_of(model, step).values(), strict=True):
            parameter.grad = rows_of(parameter, whole)
        optimizer.step()


def contents(model: Net, optimizer: ECOOptimizer) -> dict[str, list[Tensor]]:
    """Local codes, scales and state of every parameter."""
    result = {}
    for name, parameter in model.named_parameters():
        weight = local(parameter)
        stored = [weight.codes, weight.scales] if isinstance(weight, QuantizedWeight) else [weight.detach()]
        state = [local(value) for _, value in sorted(optimizer.state[parameter].items()) if value.ndim]
        result[name] = [tensor.clone() for tensor in (*stored, *state)]
    return result


def optimizer_of(kind: str, model: Net) -> ECOOptimizer:
    if kind == "sgd":
        return ECOSGD(model.parameters(), lr=0.05, weight_decay=0.1, seed=7)
    return ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1, seed=7)


def step_sharded(recipe: Recipe | str, kind: str, rows: int) -> dict[str, list[Tensor]]:
    model = build(width=rows)
    shard_model(model, recipe)
    optimizer = optimizer_of(kind, model)
    step_with_given_gradients(model, optimizer)
    return contents(model, optimizer)


def joined(parts: list[dict[str, list[Tensor]]], name: str, index: int, whole: Tensor) -> Tensor:
    """Shards put together again; what every rank has whole must be equal on all."""
    pieces = [part[name][index] for part in parts]
    if not whole.numel():  # BF16 has no scales
        return whole
    if pieces[0].shape == whole.shape and sum(piece.shape[0] for piece in pieces) != whole.shape[0]:
        assert all(torch.equal(piece, pieces[0]) for piece in pieces)
        return pieces[0]
    return torch.cat([piece for piece in pieces if piece.numel()])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("recipe", RECIPES)
def test_same_gradients_give_the_same_bits(recipe: str, world: int) -> None:
    model = build()
    quantize_weights_(model, recipe)
    optimizer = optimizer_of("adamw", model)
    step_with_given_gradients(model, optimizer)
    expected = contents(model, optimizer)
    parts = run_ranks(world, step_sharded, recipe, "adamw", 37)
    for name, tensors in expected.items():
        for index, whole in enumerate(tensors):
            assert torch.equal(joined(parts, name, index, whole), whole), (name, index)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_ranks_without_rows_take_part(kind: str) -> None:
    """Two rows on four ranks: two shards are empty, for stochastic rounding and for the one scale of `tensor`."""
    for recipe in (Recipe(), Recipe(granularity="tensor"), Recipe(moments="fp8")):
        model = build(width=2)
        quantize_weights_(model, recipe)
        optimizer = optimizer_of(kind, model)
        step_with_given_gradients(model, optimizer)
        parts = run_ranks(4, step_sharded, recipe, kind, 2)
        for name, tensors in contents(model, optimizer).items():
            for index, whole in enumerate(tensors):
                assert torch.equal(joined(parts, name, index, whole), whole), (name, index)


def hsdp_codes() -> list[Tensor]:
    model = build()
    shard_model(model, "fp8", mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    optimizer = ECOAdamW(model.parameters(), lr=3e-3, seed=7)
    step_with_given_gradients(model, optimizer)
    return [local(p).codes.clone() for p in model.parameters() if isinstance(local(p), QuantizedWeight)]


def test_replicas_of_hsdp_stay_bit_equal() -> None:
    """Random bits follow the element, not the rank: ranks 0 and 2, 1 and 3 hold the same rows."""
    codes = run_ranks(4, hsdp_codes)
    for first, second in ((0, 2), (1, 3)):
        assert all(torch.equal(a, b) for a, b in zip(codes[first], codes[second], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(codes[0], codes[1], strict=True))


def train_sharded(recipe: str) -> list[float]:
    return sharded(recipe, steps=6)[2]


@pytest.mark.parametrize("recipe", ["fp8", "fp8-8bit", "int4", "bf16", "fp32-master"])
def test_training_follows_one_process(recipe: str) -> None:
    """With real gradients only the order of the reduction differs: losses agree to a few units in the last place.

    A difference of one ulp in a gradient can flip a stochastic rounding, so quantized runs agree less closely.
    """
    expected = single(recipe, steps=6)[2]
    tolerance = 1e-5 if recipe == "fp32-master" else 5e-3
    for losses in run_ranks(2, train_sharded, recipe):
        assert losses == pytest.approx(expected, abs=tolerance)
        assert losses[0] == pytest.approx(expected[0], abs=1e-6)


def scales_of_cut_groups() -> list[Tensor]:
    model, _, _ = sharded("int4", steps=3)
    return [local(p).scales.clone() for p in model.parameters() if isinstance(local(p), QuantizedWeight)]


def test_owners_of_a_cut_group_agree_on_its_scale() -> None:
    for scales in zip(*run_ranks(3, scales_of_cut_groups), strict=True):
        assert all(torch.equal(scale, scales[0]) for scale in scales)


def refuse_unsupported() -> list[str]:
    messages = []
    model = build()
    for call in (
        lambda: shard_model(model, "fp8", reshard_after_forward=2),  # type: ignore[arg-type]
        lambda: (shard_model(model, "fp8"), quantize_weights_(model, "fp8")),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    dist.barrier()
    return messages


def test_unsupported_requests_are_refused_on_every_rank() -> None:
    for messages in run_ranks(2, refuse_unsupported):
        assert "got 2" in messages[0]
        assert "not sharded yet" in messages[1]
