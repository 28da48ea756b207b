"""What forward and backward read at stage 1 and 2, where every rank needs whole weights.

| mode | between steps | from forward to step | decodes a step |
|---|---|---|---|
| `kept` | 16 bits a parameter | the same | one |
| `transient` | nothing | 16 bits a parameter | one |
| `replica` | codes of all ranks, 1 byte | and 16 bits of the layer at work | two |

A parameter that is not filled shows NaN in its own shape and dtype and takes no memory: whoever reads it outside the
model's forward sees it at once.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eco_dist.engines.deepspeed.replicas import Replicas
from eco_dist.engines.deepspeed.saved_weights import SavedWeights
from eco_dist.engines.fsdp2 import default_blocks

Decode = Callable[[nn.Parameter, Tensor], None]


class WorkingCopy(abc.ABC):
    """The parameters' `data`: filled from the codes of all ranks, and released again.

    Attributes:
        parameters: the quantized parameters.
        replicas: the codes, one entry for each process group.
        is_stale: set when codes were changed outside the step, on all ranks; the next forward brings them to all.
    """

    def __init__(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], replicas: Sequence[Replicas], decode: Decode
    ) -> None:
        """Release every parameter and install hooks.

        Args:
            module: the model.
            parameters: its quantized parameters.
            replicas: the codes, one entry for each process group.
            decode: writes a parameter's stored values over a tensor, from gathered codes.
        """
        self.parameters = tuple(parameters)
        self.replicas = replicas
        self._decode = decode
        self._filled: set[int] = set()
        for parameter in self.parameters:
            self._release_one(parameter)
        self.is_stale = False
        module.register_state_dict_pre_hook(lambda *_: self.before_state_dict())
        module.register_forward_pre_hook(lambda *_: self._before_forward(), prepend=True)
        self._install(module)

    @abc.abstractmethod
    def after_update(self) -> None:
        """The codes of this rank have changed. Collective."""

    @abc.abstractmethod
    def before_state_dict(self) -> None:
        """Someone is about to read all parameters, perhaps on one rank only."""

    def _install(self, module: nn.Module) -> None:  # noqa: B027
        """Install hooks of the mode, if it needs any."""

    def _before_forward(self) -> None:
        if self.is_stale:
            self.after_update()

    @abc.abstractmethod
    def rest(self) -> None:
        """Someone has read or written all parameters; leave what is to be there between steps."""

    def before_load(self) -> None:
        """Someone is about to write all parameters, on every rank alike. Collective."""
        self.gather_and_fill()

    def filled(self) -> list[nn.Parameter]:
        """Parameters that show their values."""
        return [parameter for parameter in self.parameters if id(parameter) in self._filled]

    @property
    def is_filled(self) -> bool:
        """Whether every parameter shows its values."""
        return len(self._filled) == len(self.parameters)

    def gather_and_fill(self) -> None:
        """Show the values of all parameters. Collective."""
        if self.is_stale:
            self.after_update()
        if not self.is_filled:
            for replica in self.replicas:
                replica.gather()
            self.fill(self.parameters)
            for replica in self.replicas:
                replica.drop()

    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        """Decode those that are not filled."""
        for parameter in parameters:
            if id(parameter) not in self._filled:
                data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                self._decode(parameter, data)
                parameter.data = data
                self._filled.add(id(parameter))

    def release(self, parameters: Iterable[nn.Parameter] | None = None) -> None:
        """Free parameters (default: all)."""
        for parameter in self.parameters if parameters is None else parameters:
            if id(parameter) in self._filled:
                self._release_one(parameter)

    def _release_one(self, parameter: nn.Parameter) -> None:
        nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
        parameter.data = nothing.expand(parameter.shape)
        self._filled.discard(id(parameter))


class Kept(WorkingCopy):
    """Always filled."""

    def after_update(self) -> None:
        """Decode everything again."""
        self.is_stale = False
        self.release()
        self.gather_and_fill()

    def before_state_dict(self) -> None:
        """Nothing to do."""

    def rest(self) -> None:
        """Nothing to do."""


class Transient(WorkingCopy):
    """Filled by the model's forward, released by the step."""

    def _before_forward(self) -> None:
        self.gather_and_fill()

    def after_update(self) -> None:
        """Free everything."""
        self.is_stale = False
        self.release()

    def rest(self) -> None:
        """Free everything."""
        self.release()

    def before_state_dict(self) -> None:
        """Refuse: gathering here would hang if one rank alone asks.

        Raises:
            RuntimeError: if the parameters are not filled.
        """
        if not self.is_filled:
            raise RuntimeError(
                "expected the working copy to be there, got state_dict() between step and forward with "
                "eco.working_copy 'transient'; use engine.save_checkpoint or engine.save_16bit_model, or set "
                "working_copy to 'replica' or 'kept'"
            )


class Replica(WorkingCopy):
    """Filled layer by layer from resident codes of all ranks."""

    def _install(self, module: nn.Module) -> None:
        self._saved = SavedWeights(self._decode)
        module.register_state_dict_post_hook(lambda *_: self.release())
        mine = {id(parameter) for parameter in self.parameters}
        taken: set[int] = set()
        blocks = default_blocks(module)
        for unit, recurse in [(block, True) for block in blocks] + [(other, False) for other in module.modules()]:
            parameters = [p for p in unit.parameters(recurse=recurse) if id(p) in mine]
            if not recurse:
                parameters = [p for p in parameters if id(p) not in taken]
            if parameters:
                taken |= {id(parameter) for parameter in parameters} if recurse else set()
                self._install_unit(unit, parameters)

    def _install_unit(self, unit: nn.Module, parameters: list[nn.Parameter]) -> None:
        def before(*_: Any) -> None:
            self.fill(parameters)
            self._saved.enter(parameters)

        def after(*_: Any) -> None:
            self._saved.leave()
            self.release(parameters)

        unit.register_forward_pre_hook(before, prepend=True)
        unit.register_forward_hook(after, always_call=True)

    def after_update(self) -> None:
        """Collect the codes of all ranks."""
        self.is_stale = False
        self.release()
        for replica in self.replicas:
            replica.gather()

    def before_state_dict(self) -> None:
        """Decode everything; released after `state_dict()`."""
        self.fill(self.parameters)

    def rest(self) -> None:
        """Free everything."""
        self.release()


MODES: dict[str, type[WorkingCopy]] = {"kept": Kept, "transient": Transient, "replica": Replica}
