"""Who holds what: the one interface through which checkpoints see an engine.

An engine's optimizer that is no `ECOOptimizer` (DeepSpeed's ZeRO classes) says it by itself, as a `Holder`: which run
of each parameter this rank has, as codes or in high precision, with its optimizer state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate

from eco_dist.optim import ECOOptimizer
from eco_dist.optim.shard import first_row, is_quantized, local, reshard
from eco_dist.optim.state import allocate_state

_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
"""What activation checkpointing, torch.compile and FSDP1 put into names."""
_OUTER_WRAPPER = "module"
"""What DDP and DeepSpeed's engine put in front of them."""


class Held(Protocol):
    """A run of elements of one parameter, and what belongs to it, on this rank."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape of the parameter."""

    @property
    def start(self) -> int:
        """First element of the run in the flattened parameter: of a row, or of a unit of the engine."""

    @property
    def tensor(self) -> Tensor:
        """The run: a `QuantizedWeight` whose rows are rows or units, or plain elements; detached."""

    @property
    def state(self) -> Mapping[str, Tensor]:
        """Local optimizer state with the keys of `StateKey`; empty for a parameter that is not stepped."""

    @property
    def stream(self) -> int | None:
        """Number of the stream of random bits; None in high precision."""

    @property
    def saved(self) -> bool:
        """Whether this rank writes the run; replicas do not."""


@runtime_checkable
class Holder(Protocol):
    """What knows the runs of all parameters on this rank."""

    def checkpoint_groups(self) -> Sequence[dict[str, Any]]:
        """Parameter groups as the user made them: options, and parameters of the model under `params`."""

    def checkpoint_seed(self) -> int | None:
        """Seed of stochastic rounding."""

    def checkpoint_runs(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Held]:
        """This rank's run of every parameter of the model, by name; an empty run where it has none."""

    def checkpoint_loaded(self, seed: int | None, streams: Sequence[tuple[Tensor, int]]) -> None:
        """The runs were written over: take over the seed and the streams of some parameters, show the weights."""


@runtime_checkable
class Flattened(Protocol):
    """A holder of a model that shows flat parameters in the place of those it was made of."""

    def checkpoint_parameters(self) -> Mapping[str, Tensor]:
        """What stands for those, by name, in groups and runs."""


def holder_of(optimizer: ECOOptimizer | Holder | None, model: nn.Module) -> Holder:
    """The holder of a model's parameters.

    Raises:
        TypeError: for an optimizer that cannot say what it holds.
    """
    if optimizer is None or (isinstance(optimizer, ECOOptimizer) and not isinstance(optimizer, Holder)):
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            given = "no optimizer" if optimizer is None else type(optimizer).__name__
            raise TypeError(
                f"expected what eco_dist.fsdp1.convert returned for a model in FullyShardedDataParallel, got {given}; "
                "FSDP's flat parameters alone are no checkpoint"
            )
        return _Torch(model, optimizer)
    if isinstance(optimizer, Holder):
        return optimizer
    raise TypeError(
        "expected ECOAdamW, ECOSGD, what eco_dist.fsdp1.convert returned, or the `engine.optimizer` of a DeepSpeed "
        f"engine with one, got {type(optimizer).__name__}; for another optimizer use the checkpoints of its own engine"
    )


def named_parameters(model: nn.Module, holder: Holder | Flattened | None = None) -> dict[str, Tensor]:
    """Parameters by name, without what wrappers put into names; the sharded ones, whatever FSDP2 shows just now."""
    if isinstance(holder, Flattened):
        return dict(holder.checkpoint_parameters())
    reshard(model)
    return {clean(name): parameter for name, parameter in model.named_parameters()}


def clean(name: str) -> str:
    """A parameter's name without what wrappers add."""
    parts = [part for part in name.split(".") if part not in _WRAPPERS]
    while parts[0] == _OUTER_WRAPPER and len(parts) > 1:
        del parts[0]
    return ".".join(parts)


def is_first() -> bool:
    """Whether this is rank 0 or the only process."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """A `Held`."""

    shape: tuple[int, ...]
    start: int
    tensor: Tensor
    state: Mapping[str, Tensor]
    stream: int | None
    saved: bool


class _Torch:
    """A model, whole or sharded by FSDP2, whose parameters the optimizer steps themselves."""

    def __init__(self, model: nn.Module, optimizer: ECOOptimizer | None) -> None:
        self._model, self._optimizer = model, optimizer

    def checkpoint_groups(self) -> Sequence[dict[str, Any]]:
        return [] if self._optimizer is None else self._optimizer.param_groups

    def checkpoint_seed(self) -> int | None:
        return None if self._optimizer is None else self._optimizer.seed

    def checkpoint_runs(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Held]:
        stepped = {id(p) for group in self.checkpoint_groups() for p in group["params"]}
        return {name: self._run(p, is_stepped=id(p) in stepped) for name, p in parameters.items()}

    def _run(self, parameter: Tensor, *, is_stepped: bool) -> _Run:
        weight = local(parameter).detach()
        state: dict[str, Tensor] = {}
        if is_stepped:
            assert self._optimizer is not None
            state = cast(dict[str, Tensor], self._optimizer.state[parameter])
            if not state:
                state.update(allocate_state(parameter, second_moment=self._optimizer.has_second_moment))
        stream = None
        if is_quantized(parameter):
            stream = self._optimizer.stream_of(parameter) if state and self._optimizer else cast(Any, weight).tensor_id
        columns = parameter.shape[-1] if parameter.ndim > 1 else 1  # the rows of a vector are its elements
        return _Run(
            shape=tuple(parameter.shape),
            start=first_row(parameter) * columns,
            tensor=weight,
            state={key: local(value) for key, value in state.items()},
            stream=stream,
            saved=_writes(parameter),
        )

    def checkpoint_loaded(self, seed: int | None, streams: Sequence[tuple[Tensor, int]]) -> None:
        parameters: Iterator[Tensor] = self._model.parameters()
        for parameter in parameters:
            torch.autograd.graph.increment_version(local(parameter))
        if self._optimizer is None:
            return
        for parameter, number in streams:
            self._optimizer.set_stream(parameter, number)
        if seed is not None:
            self._optimizer.seed = seed


def _writes(parameter: Tensor) -> bool:
    """Whether this rank writes its part: the first of each set of replicas does."""
    if not isinstance(parameter, DTensor):
        return is_first()
    mesh = parameter.device_mesh
    return all(
        mesh.get_local_rank(dim) == 0
        for dim, placement in enumerate(parameter.placements)
        if isinstance(placement, Replicate)
    )
