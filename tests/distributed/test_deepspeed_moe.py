"""DeepSpeed's own MoE layer: experts are codes in the groups DeepSpeed gives them, its router is not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
