"""Real ranks over gloo for tests: one set of worker processes for the whole session.

`run_ranks(world, function, *args)` runs a module-level function on `world` ranks and returns their results. Every call
has a process group of its own, rendezvous through a file and a timeout, so one failure cannot leak into the next.
"""

import atexit
import datetime
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GROUP_TIMEOUT = datetime.timedelta(seconds=60)
CALL_TIMEOUT_SECONDS = 200
PROCESSES = multiprocessing.get_context("forkserver")
"""Processes of tests. What every one of them needs is imported once, in the process that they are forked from."""
PROCESSES.set_forkserver_preload(["torch.distributed.tensor", "torch.testing", "eco_dist.cli", "eco_dist.training"])
CROWDED = 150
"""Threads of a worker after which the next module gets new ones: DeepSpeed keeps groups of engines that are gone, whose
threads poll."""


def _work(pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    is_first = True
    while True:
        job = pipe.recv()
        if job is None:
            return
        rank, world, rendezvous, function, args = job
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world, timeout=GROUP_TIMEOUT
            )
            pipe.send(("ok", function(*args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # Groups that cycles of dead engines still hold keep threads that poll; hundreds of them fill a processor.
            gc.collect()
            if is_first:
                gc.freeze()  # modules, which need not be looked at again
            is_first = False


class Ranks:
    """Worker processes, started when first needed and replaced after a death or a hang."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []
        self._calls = 0
        self._directory = tempfile.TemporaryDirectory(prefix="eco-dist-ranks-")
        atexit.register(self.stop)

    def run(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        while len(self._workers) < world:
            ours, theirs = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()  # or the end of the worker would not close the pipe
            self._workers.append((process, ours))
        self._calls += 1
        rendezvous = Path(self._directory.name) / f"call-{self._calls}"
        pipes = [pipe for _, pipe in self._workers[:world]]
        for rank, pipe in enumerate(pipes):
            pipe.send((rank, world, str(rendezvous), function, args))
        results = [self._receive(pipe) for pipe in pipes]
        failures = [f"rank {rank}: {text}" for rank, (status, text) in enumerate(results) if status != "ok"]
        if failures:
            raise AssertionError("\n".join(failures))
        return [value for _, value in results]

    def _receive(self, pipe: Connection) -> tuple[str, Any]:
        try:
            if pipe.poll(CALL_TIMEOUT_SECONDS):
                return pipe.recv()
            self.stop()
            return "hung", "no answer in time"
        except (EOFError, OSError) as error:
            self.stop()
            return "died", repr(error)

    def stop(self) -> None:
        for process, _ in self._workers:
            process.kill()
        self._workers.clear()

    @property
    def is_crowded(self) -> bool:
        tasks = [Path(f"/proc/{process.pid}/task") for process, _ in self._workers]
        return any(folder.exists() and len(list(folder.iterdir())) > CROWDED for folder in tasks)


_POOLS: dict[str, Ranks] = {}


def run_ranks(
    world: int, function: Callable[..., Any], *args: Any, pool: str = "torch", fresh: bool = False
) -> list[Any]:
    """Results of `function(*args)` on each of `world` ranks; AssertionError with the tracebacks if one raises.

    What changes its process for good, as DeepSpeed does, runs in a pool of workers of its own; what must find nothing
    that others have left behind, in fresh ones.
    """
    if fresh and pool in _POOLS:
        _POOLS[pool].stop()
    return _POOLS.setdefault(pool, Ranks()).run(world, function, *args)


def end_crowded_workers() -> None:
    """Between modules: workers with many threads are replaced when they are needed again."""
    for pool in _POOLS.values():
        if pool.is_crowded:
            pool.stop()
