"""Timing a step beside a copy of the same bytes, in turn, with the device's own clock."""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable

import torch

from eco_dist.bench.gpu.contenders import Contender, Size, Step

Clock = Callable[[Step], float]
"""Milliseconds that one call takes on the device."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One contender at one size.

    Attributes:
        name: the contender.
        elements, tensors: of the size.
        milliseconds: median time of a step; None if there was none.
        copy_milliseconds: median time of copying as many bytes as the step reads and writes.
        bandwidth_share: median over rounds of the copy's time divided by the step's.
        reason: why there is no time.
    """

    name: str
    elements: int
    tensors: int
    milliseconds: float | None = None
    copy_milliseconds: float | None = None
    bandwidth_share: float | None = None
    reason: str = ""


def cuda_clock(step: Step) -> float:
    """Time between two events around the call; host work counts where the device waits for it."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    step()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds


def measure(
    contender: Contender, size: Size, device: torch.device, *, clock: Clock, free_bytes: int, rounds: int = 7
) -> Measurement:
    """Time a contender; whatever keeps it from running is the reason given."""
    needed = int((contender.resident + contender.traffic + 4) * size.elements)
    if needed > free_bytes:
        return _without(contender, size, f"needs about {needed / 2**30:.0f} GiB, {free_bytes / 2**30:.0f} GiB are free")
    try:
        return _timed(contender, size, device, clock, rounds)
    except ImportError as error:
        return _without(contender, size, f"not installed ({error})")
    except Exception as error:
        # Of another package's step, anything: the rest of the table is still wanted.
        return _without(contender, size, f"{type(error).__name__}: {str(error).splitlines()[:1]}")
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _timed(contender: Contender, size: Size, device: torch.device, clock: Clock, rounds: int) -> Measurement:
    step = contender.build(size, device)
    for _ in range(3):
        step()
    source = torch.zeros(int(contender.traffic * size.elements) // 2, dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    times = [(clock(step), clock(lambda: target.copy_(source))) for _ in range(rounds)]
    return Measurement(
        name=contender.name,
        elements=size.elements,
        tensors=size.tensors,
        milliseconds=statistics.median(own for own, _ in times),
        copy_milliseconds=statistics.median(copy for _, copy in times),
        bandwidth_share=statistics.median(copy / own for own, copy in times),
    )


def _without(contender: Contender, size: Size, reason: str) -> Measurement:
    return Measurement(name=contender.name, elements=size.elements, tensors=size.tensors, reason=reason)
