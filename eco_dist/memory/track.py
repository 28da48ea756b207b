"""Measured transients: torch's memory trackers over one step of the live model.

[Note: three traps of the trackers, torch 2.13]
A parameter that takes no gradient crashes them; everything allocated inside `optimizer.step()` is booked as optimizer
state; and the first iteration of a run lacks the optimizer's state altogether. So a model with frozen parameters is
refused in a sentence, what a step allocates beyond its state is counted as temporaries, and whoever tracks must have
taken a step before.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker, _FSDPRefType
from torch.distributed._tools.mem_tracker import MemTracker, _MemRefType
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from eco_dist.memory.categories import Category
from eco_dist.memory.report import Moment

_POINTS = 24
"""Moments kept of each phase: the highest of as many equal stretches."""

_KINDS: dict[object, Category | None] = {
    _FSDPRefType.UNSHARDED_PARAM: Category.UNSHARDED,
    _FSDPRefType.SHARDED_GRAD: Category.GRADIENTS,
    _FSDPRefType.UNSHARDED_GRAD: Category.GRADIENTS,
    _FSDPRefType.ACT: Category.ACTIVATIONS,
    _FSDPRefType.TEMP: Category.TEMPORARIES,
    _FSDPRefType.ALL_GATHER: Category.COMMUNICATION,
    _FSDPRefType.REDUCE_SCATTER: Category.COMMUNICATION,
    _FSDPRefType.INP: Category.ACTIVATIONS,
    _MemRefType.GRAD: Category.GRADIENTS,
    _MemRefType.ACT: Category.ACTIVATIONS,
    _MemRefType.TEMP: Category.TEMPORARIES,
    _MemRefType.OTH: Category.TEMPORARIES,
}
"""What the trackers call transient; everything else is static, and its growth within a step a temporary."""


class StepTracker:
    """Context manager around one whole step: forward, backward, `optimizer.step()`.

    Attributes:
        timeline: transient bytes over the step, once it is over.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Prepare.

        Args:
            model: the live model.
            optimizer: its optimizer, which must have taken a step.

        Raises:
            ValueError: for a model with frozen parameters, which torch's trackers cannot follow, or an optimizer that
                has not taken a step.
        """
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        if frozen:
            raise ValueError(
                f"expected every parameter to take gradients, got the frozen '{frozen[0]}', which torch's memory "
                "trackers cannot follow; measure without a timeline"
            )
        if not optimizer.state:
            raise ValueError("expected an optimizer that has taken a step, got a fresh one; track a later step")
        self._begin()
        self._hooks += [
            optimizer.register_step_pre_hook(lambda *_: self._set_stepping(True)),
            optimizer.register_step_post_hook(lambda *_: self._set_stepping(False)),
        ]
        if isinstance(model, FSDPModule):
            self._tracker = _sampling(FSDPMemTracker, self._sample)(model, optimizer)
            self._tracker.track_inputs(())
        else:
            self._tracker = _sampling(MemTracker, self._sample)()
            self._tracker.track_external(model, optimizer)

    @classmethod
    def of_tensors(cls, tensors: Iterable[Tensor]) -> StepTracker:
        """A tracker for an engine that owns its tensors, as `HoldsMemory` lists them.

        Args:
            tensors: everything that is static; what the step adds to it is its transients.
        """
        tracker = cls.__new__(cls)
        tracker._begin()
        tracker._is_owned = True
        tracker._tracker = _sampling(MemTracker, tracker._sample)()
        tracker._tracker.track_external(*tensors)
        return tracker

    def _begin(self) -> None:
        self.timeline: tuple[Moment, ...] = ()
        self._samples: list[tuple[str, int, dict[object, int]]] = []
        self._stepping = False
        self._is_owned = False  # by an engine: no optimizer says when it steps
        self._hooks: list[Any] = []

    def __enter__(self) -> StepTracker:
        """Begin the step."""
        self._tracker.__enter__()
        self._sample()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self._tracker.__exit__(kind, error, trace)
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            self.timeline = tuple(self._moments())

    def _set_stepping(self, stepping: bool) -> None:
        self._stepping = stepping

    def _sample(self) -> None:
        snapshot = self._tracker.get_tracker_snapshot("current")
        kinds: dict[object, int] = {}
        for device in snapshot.values():
            for kind, count in device.items():
                if kind != "Total":
                    kinds[kind] = kinds.get(kind, 0) + count
        in_backward = torch._C._current_graph_task_id() != -1
        if self._is_owned and not in_backward and self._samples and self._samples[-1][0] != "forward":
            self._stepping = True  # an engine reduces and steps once backward is over
        phase = "optimizer step" if self._stepping else "backward" if in_backward else "forward"
        self._samples.append((phase, sum(kinds.values()), kinds))

    def _moments(self) -> list[Moment]:
        """The highest sample of each stretch of each phase, in order; static bytes are those of the lowest sample.

        An engine's are those of the first, since its tensors were all named.
        """
        static_kinds = {kind for _, _, kinds in self._samples for kind in kinds if kind not in _KINDS}
        static = min(sum(kinds.get(kind, 0) for kind in static_kinds) for _, _, kinds in self._samples)
        if self._is_owned:
            static = self._samples[0][1]
        moments = []
        for phase in ("forward", "backward", "optimizer step"):
            samples = [sample for sample in self._samples if sample[0] == phase]
            length = max(1, -(-len(samples) // _POINTS))
            stretches = [samples[start : start + length] for start in range(0, len(samples), length)]
            for number, stretch in enumerate(stretches, start=1):
                _, total, kinds = max(stretch, key=lambda sample: sample[1])
                moments.append(_moment(f"{phase} {number}/{len(stretches)}", kinds, total - static))
        return moments


def _moment(name: str, kinds: dict[object, int], transient: int) -> Moment:
    counts: dict[Category, int] = {}
    for kind, count in kinds.items():
        category = _KINDS.get(kind)
        if category is not None:
            counts[category] = counts.get(category, 0) + count
    beyond = transient - sum(counts.values())
    counts[Category.TEMPORARIES] = counts.get(Category.TEMPORARIES, 0) + beyond
    return Moment(name=name, bytes={category: count for category, count in counts.items() if count})


def _sampling(tracker: type[Any], sample: Any) -> type[Any]:
    """A tracker that says when something has changed."""

    class Sampling(tracker):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = super().__torch_dispatch__(func, types, args, kwargs)
            sample()
            return result

    return Sampling
