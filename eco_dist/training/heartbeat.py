"""Which rank is lost when a collective fails or waits too long.

A dead peer shows as "connection closed" and one that hangs as a timeout, both without a name. So every rank beats: once
a second it writes into the store that the ranks met at a number that grows, and how many collectives it has entered. A
rank that waits long listens to the others' beats. The one whose beat stands still is dead or stopped; if all beat, the
one that has entered fewer collectives than the others is what they wait for. gloo then raises an error, to which
`naming_lost_ranks` adds the name; nccl's watchdog ends the process, so the name is printed before.

A rank whose launcher has died ends too, since nothing would restart or stop it any more.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from eco_dist.training.preflight import RankFacts
from eco_dist.training.ranks import Ranks

__all__ = ["Heartbeat", "LostRanksError", "naming_lost_ranks"]

PERIOD_S = 1.0
"""Between two beats, for a timeout of 16 s and more."""
PATIENCE = 4
"""Periods without a beat after which a rank counts as lost."""
ENDED = b"ended"
"""The last beat of a rank that has finished."""


class LostRanksError(RuntimeError):
    """A collective failed because ranks are gone or hang; the message names them.

    Attributes:
        speaks: whether this rank is the one of its node that says so.
    """

    def __init__(self, message: str, *, speaks: bool) -> None:
        """The sentence, and who says it."""
        super().__init__(message)
        self.speaks = speaks


@contextmanager
def naming_lost_ranks(ranks: Ranks, everyone: Sequence[RankFacts], timeout_s: float) -> Iterator[None]:
    """What goes on inside fails with the names of the lost ranks, if it fails because of them; collective.

    Args:
        ranks: this rank.
        everyone: facts of all ranks.
        timeout_s: of collectives.

    Raises:
        LostRanksError: a collective failed and there are ranks that do not beat any more.
    """
    if ranks.world_size == 1:
        yield
        return
    heartbeat = Heartbeat(_own_connection(), ranks.rank, everyone, timeout_s)
    try:
        yield
    except RuntimeError as error:
        lost = heartbeat.find_lost()
        if not lost:
            raise
        raise LostRanksError(
            f"expected all ranks to stay until the end, lost {heartbeat.names(lost)} "
            f"({str(error).splitlines()[0][:200]}); look into its log and start the run again",
            speaks=heartbeat.speaks(lost),
        ) from error
    else:
        heartbeat.end()
    finally:
        heartbeat.stop()


class Heartbeat:
    """Beats for this rank, and knows the others'.

    Two threads do it. One talks to the store, and stays in that call if the process that keeps the store has stopped;
    the other one never does, so that it can tell.

    Args:
        store: where the ranks met; a connection of its own.
        rank: this rank.
        everyone: facts of all ranks.
        timeout_s: of collectives; half of it is a long wait.
    """

    def __init__(self, store: Store, rank: int, everyone: Sequence[RankFacts], timeout_s: float) -> None:
        """Start beating."""
        self._store, self._rank, self._everyone = store, rank, everyone
        self._timeout, self._period = timeout_s, min(PERIOD_S, timeout_s / 16)
        self._launchers = _launchers()
        self._entered, self._entered_at = 0, time.monotonic()
        self._answered = time.monotonic()
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last beat of each rank, and since when it is that
        self._listening, self._stop, self._ended = False, threading.Event(), False
        store.set(_key(rank), "0 0")
        self._talker = threading.Thread(target=self._talk, name="heartbeat", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="heartbeat watcher", daemon=True)
        self._talker.start()
        self._watcher.start()

    def end(self) -> None:
        """Let the last beat say that this rank has finished, so that the others do not miss it."""
        self._ended = True

    def stop(self) -> None:
        """Beat no more."""
        self._stop.set()
        self._watcher.join()
        if self._ended:  # else the store may be gone, and what is to be told would wait for it
            self._talker.join(PATIENCE * self._period)

    def find_lost(self) -> list[int]:
        """Ranks that are lost: at once after a long wait, else after listening for some periods."""
        lost = self._lost()
        if not lost:
            self._listening = True
            time.sleep((PATIENCE + 2) * self._period)
            lost = self._lost()
        return lost

    def names(self, lost: Sequence[int]) -> str:
        """Lost ranks as a user knows them: nodes, where all their ranks are lost."""
        words = []
        for node in sorted({self._everyone[rank].node for rank in lost}):
            members, gone = self._members(node), [rank for rank in lost if self._everyone[rank].node == node]
            host = self._everyone[gone[0]].host
            if len(gone) == len(members):
                words.append(f"node {node} ({host})")
            else:
                words.extend(f"rank {rank} (node {node}, {host})" for rank in gone)
        return ", ".join(words)

    def speaks(self, lost: Sequence[int]) -> bool:
        """Whether this rank is the first of its node that is left."""
        return self._rank == min(rank for rank in self._members(self._everyone[self._rank].node) if rank not in lost)

    def _members(self, node: int) -> list[int]:
        return [rank for rank, facts in enumerate(self._everyone) if facts.node == node]

    def _waited(self) -> float:
        return time.monotonic() - self._entered_at

    def _lost(self) -> list[int]:
        """Ranks lost by what was heard until now."""
        now, patience = time.monotonic(), PATIENCE * self._period
        if now - self._answered > patience:
            # Rank 0 keeps the store, or its launcher does; what became of the others cannot be known.
            return self._members(0) if self._everyone[self._rank].node != 0 else [0] if self._rank != 0 else []
        beats = {rank: beat for rank, beat in self._heard.items() if beat[0] != ENDED}
        silent = [rank for rank, (_, since) in beats.items() if now - since > patience]
        if silent or self._waited() < self._timeout / 2:
            return silent
        entered = {rank: int(beat.split()[1]) for rank, (beat, _) in beats.items()}
        fewest = min(entered.values(), default=self._entered)
        return [rank for rank, count in entered.items() if count == fewest < self._entered]

    def _talk(self) -> None:
        beats, stopped = 0, False
        while not stopped:
            stopped = self._stop.wait(self._period)
            beats += 1
            with suppress(RuntimeError):  # the store is gone, and `_answered` tells
                if not stopped:
                    self._store.set(_key(self._rank), f"{beats} {self._entered}")
                    if self._listening or self._waited() > self._timeout / 4:
                        self._listen()
                elif self._ended:
                    self._store.set(_key(self._rank), ENDED.decode())
                self._answered = time.monotonic()

    def _listen(self) -> None:
        others = [rank for rank in range(len(self._everyone)) if rank != self._rank]
        beats, now = self._store.multi_get([_key(rank) for rank in others]), time.monotonic()
        for rank, beat in zip(others, beats, strict=True):
            if rank not in self._heard or self._heard[rank][0] != beat:
                self._heard[rank] = beat, now

    def _watch(self) -> None:
        announced = False
        while not self._stop.wait(self._period):
            if _launchers() != self._launchers:
                self._say(f"rank {self._rank} ends because its launcher has died")
                os._exit(1)
            entered = _collectives()
            if entered != self._entered:
                self._entered, self._entered_at, announced = entered, time.monotonic(), False
            elif not announced and self._waited() > self._timeout / 2:
                lost = self._lost()
                announced = bool(lost)
                if lost and self.speaks(lost):
                    self._say(
                        f"waiting for {self.names(lost)} for {self._waited():.0f} s; what waits for "
                        f"{self._timeout:g} s fails"
                    )

    def _say(self, sentence: str) -> None:
        print(f"eco-dist: {sentence}", file=sys.stderr, flush=True)


def _own_connection() -> Store:
    """The store the ranks met at, over a connection that no waiting collective holds."""
    store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def _collectives() -> int:
    """How many collectives this rank has entered, of all groups."""
    groups = list(dist.distributed_c10d._world.pg_map)
    with suppress(RuntimeError):  # a backend that does not count
        return sum(group._get_sequence_number_for_group() for group in groups)  # type: ignore[attr-defined]
    return 0


def _launchers() -> list[int]:
    """Processes that this rank ends with: its parent; two generations of it under DeepSpeed's launcher."""
    parents = [os.getppid()]
    stat = Path(f"/proc/{parents[0]}/stat")
    if "CROSS_RANK" in os.environ:
        with suppress(OSError):
            parents.append(int(stat.read_text().rpartition(")")[2].split()[1]))
    return parents


def _key(rank: int) -> str:
    return f"eco_dist/beats/{rank}"
