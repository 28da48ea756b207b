"""How the ranks are arranged: replicas x shards, and the experts' own arrangement inside the shards."""

from __future__ import annotations

import dataclasses

LARGEST_WORLD = 16_384


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mesh:
    """An arrangement of ranks; rank r has position r mod `shards` in its replica.

    Attributes:
        world_size: ranks in all.
        shards: ranks that share one copy of the dense weights (FSDP2, ZeRO); fewer than all of them is HSDP.
        ep: expert parallelism: neighbouring ranks that each hold other experts. The experts of one of them are shared
            by the `edp` = shards / ep ranks that have the same place among their neighbours.

    Raises:
        ValueError: if the numbers do not divide one another.
    """

    world_size: int
    shards: int
    ep: int = 1

    def __post_init__(self) -> None:
        """Refuse arrangements that do not exist."""
        for name in ("world_size", "shards", "ep"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} of 1 or more, got {getattr(self, name)}; give a positive integer")
        if self.world_size > LARGEST_WORLD:
            raise ValueError(f"expected at most {LARGEST_WORLD:,} ranks, got {self.world_size:,}; plan a smaller world")
        if self.world_size % self.shards:
            raise ValueError(
                f"expected shards to divide the world size {self.world_size}, got {self.shards}; "
                "a replica is a whole number of ranks"
            )
        if self.shards % self.ep:
            raise ValueError(
                f"expected ep to divide the {self.shards} ranks that share the weights, got {self.ep}; "
                "every group of expert-parallel ranks is whole"
            )

    @property
    def replicas(self) -> int:
        """Copies of the whole model."""
        return self.world_size // self.shards

    @property
    def edp(self) -> int:
        """Ranks that share the same experts within a replica."""
        return self.shards // self.ep

    def __str__(self) -> str:
        """In words."""
        words = f"{self.world_size:,} ranks" if self.world_size > 1 else "1 rank"
        if self.replicas > 1:
            words += f" = {self.replicas:,} replicas x {self.shards:,} shards"
        if self.ep > 1:
            words += f", experts on {self.ep:,} x {self.edp:,}"
        return words
