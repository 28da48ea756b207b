"""Experts spread over ranks: the same losses and, given the same gradients, the same bits as all experts everywhere."""

import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from eco_dist import ECOAdamW, Recipe, quantize_weights_, shard_model
from eco_dist.moe import MoEConfig, MoELayer
from eco_dist.moe.parallel import expert_mesh, shard_experts
from eco_dist.optim.shard import first_row, local
from eco_dist.weights import QuantizedWeight
from tests.distributed.ranks import run_ranks

WIDTH, VOCABULARY, STEPS = 64, 17, 4
SHAPE = {"width": WIDTH, "hidden": 20, "experts": 4, "top_k": 2, "backend": "native"}


class Block(nn.Module):
    """x + experts(x), and the two losses with small weights."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.moe = MoELayer(config)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, routing = self.moe(x)
        return x + out, 0.01 * routing.load_balancing_loss + 0.001 * routing.z_loss


class Net(nn.Module):
    """Embedding, two layers of experts, head. A batch may be empty."""

    def __init__(self, **changes: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(MoEConfig(**{**SHAPE, **changes})) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, extra = self.embed(tokens), torch.zeros(())
        for block in self.blocks:
            x, losses = block(x)
            extra = extra + losses
        return self.head(x), extra


def build(**changes: object) -> Net:
    torch.manual_seed(0)
    return Net(**changes)


def tokens_of(step: int, kind: str) -> Tensor:
    """This rank's batch: `uneven` lengths; `empty` on rank 1; `crowded`, one token id, so that few experts are used."""
    rank = dist.get_rank()
    length = {"uneven": 5 + 3 * rank, "empty": 0 if rank == 1 else 6, "crowded": 7}[kind]
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(100 * step + rank))
    return torch.full_like(ids, 3) if kind == "crowded" else ids


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits, extra = model(tokens)
    return nn.functional.cross_entropy(logits, (tokens + 1) % VOCABULARY, reduction="sum") / 8 + extra


def train(
    recipe: Recipe | str, expert_parallel: int, kind: str, changes: dict[str, object], dtype: torch.dtype
) -> list[float]:
    """Losses of all ranks together, and the gradient norm of the last step."""
    model = build(**changes)
    shard_model(model, recipe, expert_parallel=expert_parallel, compute_dtype=dtype)
    optimizer = ECOAdamW(model.parameters(), lr=1e-2, weight_decay=0.1, max_grad_norm=1.0)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, tokens_of(step, kind))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().float().clone()
        dist.all_reduce(total)
        losses.append(float(total))
    assert optimizer.grad_norm is not None
    return [*losses, optimizer.grad_norm]


def curve(world: int, *arguments: object) -> list[float]:
    results = run_ranks(world, train, *arguments)
    assert all(result == results[0] for result in results)
    return results[0]


@pytest.mark.parametrize("kind", ["uneven", "empty", "crowded"])
@pytest.mark.parametrize("world", [2, 4])
def test_same_losses_as_a_full_replica(world: int, kind: str) -> None:
    expected = curve(world, "fp32-master", 1, kind, {}, torch.float32)
    for expert_parallel in (2, 4)[: world // 2]:
        losses = curve(world, "fp32-master", expert_parallel, kind, {}, torch.float32)
        assert losses == pytest.approx(expected, rel=1e-6), expert_parallel


@pytest.mark.parametrize("recipe", ["fp32-master", "fp8"])
def test_more_ranks_than_experts(recipe: str) -> None:
    """Two ranks have half of each expert's hidden features."""
    changes: dict[str, object] = {"experts": 2, "top_k": 2, "shared_hidden": 24}
    expected = curve(4, recipe, 1, "uneven", changes, torch.float32)
    losses = curve(4, recipe, 4, "uneven", changes, torch.float32)
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses[:-1] == pytest.approx(expected[:-1], rel=1e-6 if recipe == "fp32-master" else 5e-3)


def served(ranks: int, changes: dict[str, object]) -> tuple[Tensor, float, list[Tensor]]:
    """Outputs, share of dropped rows and expert gradients of this rank's tokens, or with one rank of everyone's."""
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(**{**SHAPE, **changes}))
    everyone = [torch.randn(5 + 3 * rank, WIDTH, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    x = torch.cat(everyone)
    if ranks > 1:
        shard_experts(layer, expert_mesh(ranks, "cpu"))
        x = everyone[dist.get_rank()]
    y, routing = layer(x)
    y.square().sum().backward()
    gradients = [local(parameter.grad) * ranks for parameter in layer.experts.parameters()]
    return y.detach(), float(routing.dropped), gradients


@pytest.mark.parametrize("changes", [{"capacity_factor": 1.0}, {"capacity_factor": 0.6, "experts": 2, "hidden": 24}])
def test_a_capacity_drops_what_one_process_would(changes: dict[str, object]) -> None:
    whole, dropped, expected = run_ranks(4, served, 1, changes)[0]
    parts = run_ranks(4, served, 4, changes)
    assert dropped > 0.05
    assert [part[1] for part in parts] == [pytest.approx(dropped)] * 4
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), whole, rtol=1e-5, atol=1e-7)
    for index, gradient in enumerate(expected):
        torch.testing.assert_close(torch.cat([part[2][index] for part in parts]), gradient, rtol=1e-5, atol=1e-7)


def test_two_matrix_experts_a_shared_expert_and_sigmoid_scores() -> None:
    changes: dict[str, object] = {"glu": False, "activation": "gelu", "shared_hidden": 24, "score": "sigmoid"}
    expected = curve(4, "fp32-master", 1, "uneven", changes, torch.float32)
    assert curve(4, "fp32-master", 2, "uneven", changes, torch.float32) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_train_the_same_on_any_split(dtype: torch.dtype) -> None:
    """A difference of one unit in the last place of a gradient can flip a stochastic rounding, hence the tolerance."""
    expected = curve(4, "fp8", 1, "uneven", {}, dtype)
    for expert_parallel in (2, 4):
        losses = curve(4, "fp8", expert_parallel, "uneven", {}, dtype)
        assert losses[0] == pytest.approx(expected[0], rel=1e-6)
        assert losses[:-1] == pytest.approx(expected[:-1], rel=5e-3)


def test_fp8_wire_gives_the_same_losses_on_any_split() -> None:
    expected = curve(4, "fp32-master", 1, "uneven", {"wire": "fp8"}, torch.float32)
    for expert_parallel in (2, 4):
        losses = curve(4, "fp32-master", expert_parallel, "uneven", {"wire": "fp8"}, torch.float32)
        assert losses == pytest.approx(expected, rel=1e-5)
    full = curve(4, "fp32-master", 1, "uneven", {}, torch.float32)
    assert full != expected
    assert expected[:-1] == pytest.approx(full[:-1], rel=1e-2)


def gradient(name: str, step: int, shape: torch.Size) -> Tensor:
    seed = sum(map(ord, name)) * 100 + step
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def stepped(recipe: str, expert_parallel: int | None) -> dict[str, tuple[int, list[Tensor]]]:
    """First row and tensors of this rank's part of every expert parameter, after steps with given gradients."""
    model = build(hidden=21)
    if expert_parallel is None:
        quantize_weights_(model, recipe)
    else:
        shard_model(model, recipe, expert_parallel=expert_parallel)
    optimizer = ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1, seed=7)
    for step in range(3):
        for name, parameter in model.named_parameters():
            whole = gradient(name, step, parameter.shape)
            if isinstance(parameter, DTensor):
                start = first_row(parameter)
                mine = whole[start : start + local(parameter).shape[0]]
                whole = DTensor.from_local(
                    mine,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=whole.shape,
                    stride=whole.stride(),
                )
            parameter.grad = whole
        optimizer.step()
    result = {}
    for name, parameter in model.named_parameters():
        weight = local(parameter)
        if isinstance(weight, QuantizedWeight):
            state = [local(value) for _, value in sorted(optimizer.state[parameter].items()) if value.ndim]
            tensors = [tensor.clone() for tensor in (weight.codes, weight.scales, *state)]
            result[name] = (first_row(parameter), tensors)
    return result


@pytest.mark.parametrize("recipe", ["fp8", "fp8-8bit", "paper", "fp8-residual-8bit"])
def test_same_gradients_give_the_same_bits_on_any_split(recipe: str) -> None:
    """Rows of experts are 4 x 21: with two or four ranks FSDP2's cuts of them are uneven."""
    expected = stepped(recipe, None)
    for world, expert_parallel in ((2, 2), (4, 1), (4, 2), (4, 4)):
        parts = run_ranks(world, stepped, recipe, expert_parallel)
        for name, (_, tensors) in expected.items():
            pieces = sorted((part[name] for part in parts), key=lambda piece: piece[0])
            for index, whole in enumerate(tensors):
                together = torch.cat([piece[1][index] for piece in pieces])
                assert torch.equal(together, whole), (name, index, world, expert_parallel)


def gathered() -> list[bool]:
    """The whole weight of every expert parameter, put together again by DTensor."""
    model, plain = build(), build()
    quantize_weights_(plain, "fp8")
    shard_model(model, "fp8", expert_parallel=2)
    whole = dict(plain.named_parameters())
    return [torch.equal(p.full_tensor().decode(), whole[n].decode()) for n, p in model.named_parameters() if "mlp" in n]


def test_a_sharded_expert_is_still_all_experts() -> None:
    for equal in run_ranks(4, gathered):
        assert equal == [True] * 6


def native_and_megablocks() -> list[float]:
    losses = []
    for backend in ("native", "megablocks"):
        losses += train("fp8", 2, "uneven", {"backend": backend, "hidden": 32}, torch.float32)
    return losses


@pytest.mark.skipif(importlib.util.find_spec("megablocks") is None, reason="megablocks is not installed")
def test_megablocks_exchanges_the_same_tokens() -> None:
    for losses in run_ranks(2, native_and_megablocks):
        assert losses[: len(losses) // 2] == losses[len(losses) // 2 :]


def without_an_engine() -> tuple[list[Tensor], list[Tensor]]:
    """Codes of this rank's experts after a step, sharded by hand and whole; all ranks have the same batch."""
    results = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        layer = MoELayer(MoEConfig(**SHAPE))
        quantize_weights_(layer, "fp8")
        if by_hand:
            shard_experts(layer, expert_mesh(2, "cpu"))
        optimizer = ECOAdamW(layer.parameters(), lr=1e-2)
        layer(torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(1)))[0].square().sum().backward()
        optimizer.step()
        results.append([local(p).codes.clone() for p in layer.experts.parameters()])
    return results[0], results[1]


def test_experts_can_be_sharded_without_an_engine() -> None:
    """Two ranks with the same tokens: an expert's gradient is the mean over both, that of one process."""
    ranks = run_ranks(2, without_an_engine)
    for index, whole in enumerate(ranks[0][1]):
        assert torch.equal(torch.cat([mine[index] for mine, _ in ranks]), whole)
