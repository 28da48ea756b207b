"""Experts are codes in the groups DeepSpeed gives them, in its own MoE layer and in ours; routers are not."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from eco_dist import Recipe
from tests.distributed import test_moe_parallel as moe
from tests.distributed.deepspeed_ranks import config, contents, engine_of, prepare_rank, run_ranks, train
from tests.distributed.models import Block

pytest.importorskip("deepspeed")


class MoENet(nn.Module):
    """Two experts of which `ep_size` ranks hold parts, between an embedding and a head."""

    def __init__(self, ep_size: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(23, 128)
        expert = nn.Sequential(nn.Linear(128, 256, bias=False), nn.SiLU(), nn.Linear(256, 128, bias=False))
        self.blocks = nn.ModuleList([Block(128, 256)])
        self.moe = MoE(128, expert, num_experts=2, ep_size=ep_size, k=1, capacity_factor=4.0, use_rts=False)
        self.head = nn.Linear(128, 23, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(tokens))
        return self.head(x + self.moe(x)[0])


def train_moe(stage: int, ep_size: int, directory: str) -> dict[str, Any]:
    prepare_rank()
    json = config(stage, "bf16", eco={"recipe": "fp8-8bit"})
    engine = engine_of(MoENet(ep_size), json)
    first = train(engine, 3)
    held = contents(engine)
    engine.save_checkpoint(directory)
    expected = train(engine, 2, first=3)
    again = engine_of(MoENet(ep_size), json)
    again.load_checkpoint(directory)
    ids = {shard.plan.name: shard.plan.tensor_id for shard in engine.optimizer.shards.values()}
    return {"losses": first, "names": sorted(held), "ids": ids, "resumed": train(again, 2, first=3) == expected}


@pytest.mark.parametrize(("stage", "ep_size"), [(1, 1), (2, 2)])
def test_experts_are_quantized_and_resume(ep_size: int, stage: int, tmp_path: Path) -> None:
    one, two = run_ranks(2, train_moe, stage, ep_size, str(tmp_path))
    experts = [name for name in one["names"] if "deepspeed_experts" in name]
    assert len(experts) == 4 // ep_size
    assert not any("gate" in name for name in one["names"])
    assert one["resumed"]
    assert two["resumed"]
    same = [one["ids"][name] == two["ids"][name] for name in experts]
    assert not any(same) if ep_size == 2 else all(same)
    assert one["losses"][-1] < one["losses"][0] + 1.0


def train_ours(stage: int, ranks: int, directory: str | None = None) -> list[float]:
    """Losses of all ranks together with the layer of this package, under DeepSpeed or (stage 0) FSDP2."""
    import deepspeed

    from eco_dist import ECOAdamW, shard_model
    from eco_dist.deepspeed import shard_experts

    prepare_rank()
    deepspeed.init_distributed("gloo", dist_init_required=False, verbose=False)
    overrides = {"rounding": "nearest"}
    model = moe.build()
    if stage == 0:
        shard_model(model, Recipe.from_name("fp8").replace(**overrides), expert_parallel=ranks)
        optimizer = ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1, seed=7)
        return [step_of(model, optimizer, step) for step in range(4)]
    json = config(stage, eco={"recipe": "fp8", "overrides": overrides})
    shard_experts(model, ranks)
    engine = engine_of(model, json)
    losses = [step_of(engine, engine, step) for step in range(2)]
    if directory is not None:
        engine.save_checkpoint(directory)
        again = moe.build()
        shard_experts(again, ranks)
        engine = engine_of(again, json)
        engine.load_checkpoint(directory)
    return losses + [step_of(engine, engine, step) for step in range(2, 4)]


def step_of(model: Any, optimizer: Any, step: int) -> float:
    loss = moe.loss_of(model, moe.tokens_of(step, "uneven"))
    total = loss.detach().clone()
    model.backward(loss) if hasattr(model, "backward") else loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return float(total)


def test_our_layer_trains_as_under_fsdp2(tmp_path: Path) -> None:
    """Rounding is to nearest: a part of the experts draws other random bits than the whole."""
    expected = run_ranks(2, train_ours, 0, 2)[0]
    for stage, ranks in ((1, 2), (2, 2), (2, 1)):
        directory = str(tmp_path) if ranks == 2 and stage == 2 else None
        losses = run_ranks(2, train_ours, stage, ranks, directory)
        assert losses[0] == losses[1]
        assert losses[0] == pytest.approx(expected, rel=1e-5), (stage, ranks)
