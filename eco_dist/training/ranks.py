"""The ranks of a run: one process, or those torchrun started, and the few things they say to each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from eco_dist.training.config import EngineConfig

__all__ = ["Ranks", "check_world", "limit_waiting", "open_ranks"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among its peers.

    Attributes:
        rank, world_size: as torch.distributed counts.
        device: where this rank computes.
    """

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that prints and writes."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over ranks, in fp64; collective."""
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        if self.world_size > 1:
            dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank; collective."""
        if self.world_size == 1:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return [item for item in values if item is not None]

    def on_first(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 and give its result to all; its user error (ValueError, OSError) is raised on all."""
        answer: list[T | Exception | None] = [None]
        if self.is_first:
            try:
                answer[0] = work()
            except (ValueError, OSError) as error:
                answer[0] = error
        if self.world_size > 1:
            dist.broadcast_object_list(answer, src=0)
        if isinstance(answer[0], (ValueError, OSError)):
            # raised anew so that the traceback ends here, on rank 0 as on the others
            raise type(answer[0])(*answer[0].args)
        return answer[0]  # type: ignore[return-value]


@contextmanager
def open_ranks(engine: EngineConfig) -> Iterator[Ranks]:
    """Join the ranks of this run (gloo on CPU, nccl on CUDA) and leave them at the end.

    A process group that is already there is used and left alone. ``engine.name=single`` opens none.

    Raises:
        ValueError: the world is not the one ``engine`` asks for, or CUDA is asked for and missing.
    """
    opened = engine.name != "single" and not dist.is_initialized()
    if dist.is_initialized():
        world_size, rank = dist.get_world_size(), dist.get_rank()
    else:
        world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    check_world(engine, world_size)
    device = _device(engine)
    if opened:
        _join(engine, device, rank, world_size)
    try:
        yield Ranks(rank=rank, world_size=world_size, device=device)
    finally:
        if opened:
            dist.destroy_process_group()


def check_world(engine: EngineConfig, world_size: int) -> None:
    """Refuse a world that is not the one ``engine`` asks for.

    Raises:
        ValueError: says which one it is.
    """
    if engine.name == "single" and world_size > 1:
        raise ValueError(
            f"expected one process for engine.name=single, got {world_size} ranks; "
            "set engine.name=fsdp2 or deepspeed, or start without torchrun"
        )
    if engine.ranks is not None and engine.ranks != world_size:
        raise ValueError(
            f"expected {engine.ranks} ranks (engine.ranks), got {world_size}; start with "
            f"torchrun --nproc-per-node={engine.ranks} -m eco_dist train, or set engine.ranks={world_size}"
        )


def limit_waiting(engine: EngineConfig) -> None:
    """Give the groups made by FSDP2's meshes and by DeepSpeed ``engine.timeout_s``; torch gives them half an hour."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=engine.timeout_s), group)


def _device(engine: EngineConfig) -> torch.device:
    available = torch.cuda.is_available()
    if engine.device == "cuda" and not available:
        raise ValueError("expected a CUDA device for engine.device=cuda, found none; set engine.device=cpu")
    if engine.device == "cpu" or not available:
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _store_of_attempt(timeout: timedelta) -> PrefixStore | None:
    """A place of its own for each restart of torchrun on one node; None leaves the meeting to torch.

    torchrun keeps its store over restarts, and torch (2.13) expects a new one each time: restarted ranks may read the
    addresses of those that died. The count of restarts tells attempts apart where there is one launcher; for several
    nodes launchers/torchrun.sh asks torchrun for a new store.
    """
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or environment.get("GROUP_WORLD_SIZE") != "1":
        return None
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    attempt = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"attempt-{attempt}", TCPStore(host, port, is_master=False, timeout=timeout))


def _join(engine: EngineConfig, device: torch.device, rank: int, world_size: int) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=engine.timeout_s)
    if "MASTER_ADDR" in os.environ:
        try:
            store = _store_of_attempt(timeout)
            dist.init_process_group(backend, store=store, timeout=timeout, rank=rank, world_size=world_size)
        except (dist.DistError, RuntimeError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT', '')}"
            raise ValueError(
                f"expected {world_size} ranks to meet at {where} within {engine.timeout_s} s, got rank {rank} alone "
                f"there ({str(error).splitlines()[0]}); start every node, with the same address"
            ) from error
    else:
        # one rank without torchrun needs no port and no file to meet at
        dist.init_process_group(backend, timeout=timeout, store=HashStore(), rank=rank, world_size=world_size)
