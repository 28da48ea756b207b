"""What would fit: the smallest world, the largest batch."""

from __future__ import annotations

from collections.abc import Callable

from eco_dist.memory.mesh import LARGEST_WORLD
from eco_dist.memory.report import MemoryReport

_LARGEST_BATCH = 1 << 16


def smallest_world(build: Callable[[int], MemoryReport], *, start: int = 1) -> int | None:
    """The smallest world in which the plan fits its budget, out of `start` times powers of two; None if none does.

    Args:
        build: plan of a world size; it has a budget.
        start: smallest world to try, such as `ep`.
    """
    world = start
    while world <= LARGEST_WORLD:
        if build(world).fits:
            return world
        world *= 2
    return None


def largest_batch(build: Callable[[int], MemoryReport]) -> int:
    """The largest number of sequences a rank and micro-batch with which the plan fits its budget; 0 if none does.

    Args:
        build: plan of a number of sequences; it has a budget.
    """
    if not build(1).fits:
        return 0
    low, high = 1, 2
    while high <= _LARGEST_BATCH and build(high).fits:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if build(middle).fits else (low, middle)
    return low


def parse_bytes(text: str) -> int:
    """Bytes of a size such as ``80GiB`` or ``512 MiB``.

    Raises:
        ValueError: it is no number with a binary unit.
    """
    units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "B": 1}
    compact = text.replace(" ", "")
    for unit, factor in units.items():
        if compact.endswith(unit):
            try:
                count = float(compact[: -len(unit)])
            except ValueError:
                break
            if count > 0:
                return int(count * factor)
    raise ValueError(f"expected a positive size with a unit out of B, KiB, MiB, GiB, TiB such as 80GiB, got '{text}'")
