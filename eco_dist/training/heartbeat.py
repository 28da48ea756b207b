"""Which node is lost when a collective fails.

A dead peer shows as "connection closed" or as a timeout, with no name. So the first rank of every node counts up a
number in the store that the ranks met at; when a collective fails, the nodes whose number stands still are the lost
ones. A rank whose launcher has died ends too, since nothing would restart or stop it any more.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from eco_dist.training.preflight import RankFacts
from eco_dist.training.ranks import Ranks

__all__ = ["Heartbeat", "LostNodeError", "naming_lost_nodes"]

PERIOD_S = 1.0
PATIENCE = 4
"""Periods without a beat after which a node counts as lost."""


class LostNodeError(RuntimeError):
    """A collective failed because nodes are gone; the message names them."""


@contextmanager
def naming_lost_nodes(ranks: Ranks, everyone: Sequence[RankFacts]) -> Iterator[None]:
    """What goes on inside fails with the names of the lost nodes, if it fails because of them; collective.

    Raises:
        LostNodeError: a collective failed and nodes do not beat any more.
    """
    if ranks.world_size == 1:
        yield
        return
    beat = Heartbeat(_own_connection(), ranks.rank, everyone)
    try:
        yield
    except RuntimeError as error:
        lost = beat.lost()
        if not lost:
            raise
        raise LostNodeError(
            f"expected all nodes to stay until the end, lost {', '.join(lost)} "
            f"({str(error).splitlines()[0][:200]}); look into its log and start the run again"
        ) from error
    finally:
        beat.stop()


class Heartbeat:
    """Beats for this node, and knows the others'.

    Args:
        store: where the ranks met.
        rank: this rank.
        everyone: facts of all ranks.
    """

    def __init__(self, store: Store, rank: int, everyone: Sequence[RankFacts]) -> None:
        """Start beating; the first rank of a node does it for all of them."""
        self._store = store
        self._hosts = {facts.node: facts.host for facts in everyone}
        self._node = everyone[rank].node
        self._beats = rank == min(r for r, facts in enumerate(everyone) if facts.node == self._node)
        self._parent = os.getppid()
        self._rank = rank
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Beat no more."""
        self._stop.set()
        self._thread.join()

    def lost(self) -> list[str]:
        """Names of the nodes that do not beat any more; takes `PATIENCE` periods."""
        try:
            before = self._counts()
            time.sleep(PATIENCE * PERIOD_S)
            after = self._counts()
        except (RuntimeError, dist.DistError):
            # The store lives with the first node's launcher.
            return [f"node 0 ({self._hosts[0]})"] if self._node != 0 else []
        still = [node for node in self._hosts if node != self._node and before[node] == after[node]]
        return [f"node {node} ({self._hosts[node]})" for node in still]

    def _counts(self) -> dict[int, int]:
        self._store.set_timeout(timedelta(seconds=PATIENCE * PERIOD_S))
        return {node: self._store.add(_key(node), 0) for node in self._hosts}

    def _beat(self) -> None:
        while not self._stop.wait(PERIOD_S):
            if os.getppid() != self._parent:
                print(f"eco-dist: rank {self._rank} ends because its launcher has died", file=sys.stderr, flush=True)
                os._exit(1)
            if self._beats:
                # If the store is gone the next collective will tell; the launcher is watched all the same.
                with suppress(RuntimeError, dist.DistError):
                    self._store.add(_key(self._node), 1)


def _own_connection() -> Store:
    """The store the ranks met at, over a connection that no waiting collective holds."""
    store: Store = dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]
    return store


def _key(node: int) -> str:
    return f"eco_dist/beats/{node}"
