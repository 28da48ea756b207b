"""Nodes that do not fit together, or hold too little, are told so in one sentence, the same on every rank."""

import dataclasses
import socket
from pathlib import Path

import pytest
import torch

from eco_dist.memory import plan
from eco_dist.training import preflight
from eco_dist.training.config import EngineConfig, RunConfig, TrainConfig
from eco_dist.training.preflight import RankFacts, check_memory, check_nodes, facts_of
from eco_dist.training.ranks import Ranks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told(Ranks):
    """A rank whose peers have said this."""

    answers: tuple[object, ...] = ()

    def gather(self, value):
        return list(self.answers) or [value]


def facts(**changes) -> RankFacts:
    own = RankFacts(host="alpha", node=0, local_world_size=2, versions={"torch": "2.13.0"}, config="abc")
    return dataclasses.replace(own, **changes)


def among(*everyone: RankFacts) -> Told:
    return Told(rank=0, world_size=len(everyone), device=torch.device("cpu"), answers=everyone)


def test_equal_ranks_pass() -> None:
    everyone = [facts(), facts(host="beta", node=1)]
    assert check_nodes(among(*everyone), everyone[0]) == everyone


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"versions": {"torch": "2.11.0"}}, "same version of torch on every rank, got 2.11.0 on rank 2 .node 1, beta."),
        ({"config": "xyz"}, "same configuration on every rank, got xyz on rank 2"),
        ({"local_world_size": 1}, "same number of ranks a node on every rank, got 1 on rank 2"),
    ],
)
def test_the_odd_one_is_named(changes: dict[str, object], sentence: str) -> None:
    other = facts(host="beta", node=1, **changes)
    with pytest.raises(ValueError, match=sentence):
        check_nodes(among(facts(), facts(), other), facts())


def test_the_directory_may_differ_but_nothing_else() -> None:
    base = facts_of(TrainConfig())
    assert facts_of(TrainConfig(run=RunConfig(directory="elsewhere"))).config == base.config
    assert facts_of(TrainConfig(engine=EngineConfig(timeout_s=7))).config != base.config
    assert base.versions["torch"] == torch.__version__


def test_a_deepspeed_json_is_compared_by_what_it_says(tmp_path: Path) -> None:
    texts = {"a": "{}", "b": "{}", "c": '{"wall_clock_breakdown": true}'}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    engines = [EngineConfig(name="deepspeed", json=tmp_path / name) for name in texts]
    same, equal, other = (facts_of(TrainConfig(engine=engine)).config for engine in engines)
    assert same == equal != other


def test_a_node_with_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(torch.nn.Linear(1024, 1024), "fp8", engine="single", world_size=1)
    alone = Told(rank=0, world_size=1, device=torch.device("cpu"))
    check_memory(alone, planned)
    monkeypatch.setattr(preflight, "_free_bytes", lambda device: 2**20)
    with pytest.raises(
        ValueError, match=rf"GiB of free memory for the static memory of {socket.gethostname()}, got 0.00"
    ):
        check_memory(alone, planned)
    monkeypatch.setattr(preflight, "_free_bytes", lambda device: None)
    check_memory(alone, planned)
