"""Before training: whether the nodes of a run fit together and hold what is planned. One sentence on every rank if not.

What differs between nodes (a package, the configuration, the number of ranks) would otherwise show as a hang in the
first collective, or as a run that is silently wrong.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import socket
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from eco_dist.memory import MemoryReport
from eco_dist.training.config import TrainConfig
from eco_dist.training.overrides import to_plain
from eco_dist.training.ranks import Ranks

__all__ = ["RankFacts", "check_memory", "check_nodes", "facts_of"]

PACKAGES = ("torch", "eco-dist", "numpy", "deepspeed", "megablocks", "triton")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What a rank is and has.

    Attributes:
        host: name of its node.
        node: number of its node.
        local_world_size: ranks of its node.
        versions: of Python and of the packages that matter; "none" where one is missing.
        config: hash of its configuration, the directory left out.
    """

    host: str
    node: int
    local_world_size: int
    versions: dict[str, str]
    config: str


def facts_of(config: TrainConfig) -> RankFacts:
    """The facts of this rank, from its environment as torchrun, DeepSpeed's launcher and our Slurm script set it."""
    local = _local_world_size()
    plain = to_plain(config)
    plain["run"].pop("directory")
    if config.engine.json is not None and config.engine.json.is_file():
        plain["engine"]["json"] = config.engine.json.read_text(encoding="utf-8")  # what it says, wherever it lies
    return RankFacts(
        host=socket.gethostname(),
        node=int(os.environ.get("GROUP_RANK", os.environ.get("CROSS_RANK", "0"))),
        local_world_size=local,
        versions={"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        config=hashlib.blake2s(json.dumps(plain, sort_keys=True, default=str).encode(), digest_size=6).hexdigest(),
    )


def check_nodes(ranks: Ranks, facts: RankFacts) -> list[RankFacts]:
    """Compare the facts of all ranks; collective. Returns them in the order of ranks.

    Raises:
        ValueError: versions, configuration or ranks a node differ; the same sentence on every rank.
    """
    everyone = ranks.gather(facts)
    for name in facts.versions:
        _same(everyone, f"version of {name}", [item.versions[name] for item in everyone], "install the same one")
    advice = "start every node with the same file and overrides"
    _same(everyone, "configuration", [item.config for item in everyone], advice)
    advice = "give every node the same number of ranks"
    _same(everyone, "number of ranks a node", [str(item.local_world_size) for item in everyone], advice)
    return everyone


def check_memory(ranks: Ranks, planned: MemoryReport) -> None:
    """Compare what each node's ranks will hold between steps with what is free there; collective.

    Raises:
        ValueError: some rank has less than its static memory; the same sentence on every rank.
    """
    needed = planned.static_bytes(ranks.rank)
    sharing = 1 if ranks.device.type == "cuda" else _local_world_size()
    answers = ranks.gather((socket.gethostname(), needed * sharing, _free_bytes(ranks.device)))
    short = [(need - free, host, need, free) for host, need, free in answers if free is not None and need > free]
    if short:
        _, host, need, free = max(short)
        raise ValueError(
            f"expected {need / 2**30:.2f} GiB of free memory for the static memory of {host}, got "
            f"{free / 2**30:.2f} GiB; use more ranks or a recipe with fewer bytes a parameter"
        )


def _same(everyone: Sequence[RankFacts], what: str, values: Sequence[str], advice: str) -> None:
    if len(set(values)) == 1:
        return
    usual = Counter(values).most_common(1)[0][0]
    odd, value = next((rank, value) for rank, value in enumerate(values) if value != usual)
    raise ValueError(
        f"expected the same {what} on every rank, got {value} on rank {odd} (node {everyone[odd].node}, "
        f"{everyone[odd].host}) and {usual} on most; {advice}"
    )


def _local_world_size() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _free_bytes(device: torch.device) -> int | None:
    """Free memory where weights will lie; None where it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if not info.exists():
        return None
    available = next((line for line in info.read_text().splitlines() if line.startswith("MemAvailable:")), None)
    return int(available.split()[1]) * 1024 if available else None
