"""The optimizer of a converted FSDP1 model: it owns codes, scales, moments and high-precision elements."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.engines.fsdp1.contents import Contents
from eco_dist.engines.fsdp1.exchange import Exchange
from eco_dist.engines.fsdp1.geometry import Geometry
from eco_dist.engines.fsdp1.hollow import HollowHandle
from eco_dist.engines.fsdp1.originals import Originals
from eco_dist.optim import ECOOptimizer
from eco_dist.optim.agreement import device_of
from eco_dist.optim.gradients import CLIP_EPSILON, Verdict
from eco_dist.optim.kernels import kernel_for
from eco_dist.optim.state import allocate_state
from eco_dist.optim.step import GRADIENT_LIMIT, StepStats
from eco_dist.weights import ConversionReport


class FlatOptimizer(Contents):
    """What `convert` returns. Step it in the place of the optimizer you made, whose schedulers may stay where they are.

    Its groups are those of that optimizer and show the parameters before FSDP flattened them, on the meta device.

    Attributes:
        conversion: what became codes, what did not, and why.
    """

    def __init__(
        self,
        client: ECOOptimizer,
        handles: Sequence[HollowHandle],
        *,
        untouched: Sequence[tuple[Any, Geometry, int]],
        group: dist.ProcessGroup | None,
        writes: bool,
        originals: Originals,
        conversion: ConversionReport,
    ) -> None:
        """Allocate moments, and take the client's place.

        Args:
            client: the optimizer the user made.
            handles: see `Contents`.
            untouched: see `Contents`.
            group: ranks that hold the other chunks; None if this rank has all.
            writes: see `Contents`.
            originals: see `Contents`.
            conversion: what became codes.
        """
        self.handles, self.untouched, self.writes = tuple(handles), tuple(untouched), writes
        self.originals, self.conversion = originals, conversion
        self._group = group
        self._exchange = None if group is None else Exchange([handle.chunk for handle in handles], group)
        shown: list[list[Tensor]] = [[] for _ in client.param_groups]
        for member in (member for handle in handles for member in handle.chunk.geometry.members):
            if member.group is not None:
                shown[member.group].append(originals.named[member.name])
        super().__init__(client, [({**g, "params": own}, g) for g, own in zip(client.param_groups, shown, strict=True)])
        self.nonfinite, self.max_grad_norm = client.nonfinite, client.max_grad_norm
        for handle in handles:
            self._allocate(handle)
        # Kernels write through pointers: stepping a hollow parameter would write past its one element.
        client.step = types.MethodType(_refuse_step, client)  # type: ignore[method-assign]
        client.step_parameter = types.MethodType(_refuse_step, client)  # type: ignore[method-assign]

    def _allocate(self, handle: HollowHandle) -> None:
        """Fresh state of a flat parameter's members."""
        chunk = handle.chunk
        for number, member in enumerate(chunk.geometry.members):
            if number in chunk.shards:
                self.adopt(chunk.shards[number])
            elif member.group is not None:
                tensor = chunk.plain[number]
                self.state[tensor] = allocate_state(tensor, second_moment=self.has_second_moment)
        if self._exchange is not None:
            handle.on_write = self._exchange.share_codes

    # --- torch.optim.Optimizer --------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the model."""
        for handle in self.handles:
            flat = handle.handle.flat_param
            if not set_to_none and flat.grad is not None:
                flat.grad.zero_()  # what the parameters show are views
                continue
            for parameter in (flat, *(flat._params or ())):
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Refused: codes and moments of one rank are no checkpoint.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected eco_dist.checkpoint.save(folder, model, optimizer, step=...) for a converted FSDP1 model: codes "
            "are in its optimizer, and a state_dict of one rank's part could not be loaded on another number of ranks"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Refused, as `state_dict`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "expected eco_dist.checkpoint.load(folder, model, optimizer) for a converted FSDP1 model, whose optimizer "
            "holds the codes too"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step, or none on any rank if a gradient anywhere is not finite; see `ECOOptimizer.step`. Collective.

        Raises:
            FloatingPointError: for such a gradient, if the client was made with nonfinite="raise".
            RuntimeError: if gradients were accumulated under `no_sync()` and not reduced.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.client._opt_called = True  # type: ignore[attr-defined]  # else its scheduler warns that it was not stepped
        with torch._C.DisableTorchFunctionSubclass():
            self._step_all()
        return loss

    def _step_all(self) -> None:
        self.follow_client()
        self.stats = self.grad_norm = None
        grads = [_gradient_of(handle) for handle in self.handles]
        stepped, verdict = self._examine(grads)
        if not self._accepts(verdict):
            return
        self.grad_norm = verdict.norm
        self.stats = StepStats() if self.collect_stats else None
        tails: list[dict[int, list[Tensor]]] = [{} for _ in self.handles]
        if self._exchange is not None:
            tails = self._exchange.collect_gradients(grads)
        for handle, grad, of_others, members in zip(self.handles, grads, tails, stepped, strict=True):
            self._step_handle(handle, grad, of_others, members, verdict.scale)
        self.weights_changed()

    def _step_handle(
        self, handle: HollowHandle, grad: Tensor, tails: dict[int, list[Tensor]], stepped: Sequence[bool], scale: float
    ) -> None:
        """Step one flat parameter's members, group by group."""
        work: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for number, member in enumerate(handle.chunk.geometry.members):
            if member.group is not None and stepped[number]:
                pair = (_tensor_of(handle, number), handle.chunk.gradient(number, grad, tails))
                work.setdefault(member.group, []).append(pair)
        for group, pairs in work.items():
            self.step_tensors(pairs, self.param_groups[group], scale)

    def _examine(self, grads: Sequence[Tensor]) -> tuple[list[list[bool]], Verdict]:
        """Which members are stepped, and whether their gradients can be used: one all-reduce, one answer for all."""
        present = [handle.stepped() for handle in self.handles]
        kernel, squares_here = kernel_for(grads[0].device), 0.0
        if self.max_grad_norm is None:
            bad_here = sum(not bool(kernel.is_steppable(grad)) for grad in grads)
        else:
            norms = [float(kernel.norm(grad)) for grad in grads]
            bad_here = sum(not norm < GRADIENT_LIMIT for norm in norms)
            squares_here = sum(norm**2 for norm in norms)
        numbers = [bad_here, squares_here, *(flag for flags in present for flag in flags)]
        together = torch.tensor(numbers, dtype=torch.float64)
        if self._group is not None:
            together = together.to(device_of(self._group))
            dist.all_reduce(together, group=self._group)
        bad, squares, *counts = together.tolist()
        agreed = iter(counts)
        stepped = [[next(agreed) > 0 for _ in flags] for flags in present]
        if bad:
            return stepped, Verdict(usable=False, bad_here=bad_here)
        if self.max_grad_norm is None:
            return stepped, Verdict(usable=True)
        norm = math.sqrt(squares)
        return stepped, Verdict(usable=True, scale=min(1.0, self.max_grad_norm / (norm + CLIP_EPSILON)), norm=norm)

    def weights_changed(self) -> None:
        """Bring up to date what was made of the codes: borrowed units, and what is unsharded. Collective."""
        if self._exchange is not None:
            self._exchange.share_codes()
        for handle in self.handles:
            handle.free_unsharded()


def _tensor_of(handle: HollowHandle, number: int) -> Tensor:
    """What the optimizer steps of a member."""
    chunk = handle.chunk
    return chunk.plain[number] if number in chunk.plain else chunk.shards[number].weight


def _gradient_of(handle: HollowHandle) -> Tensor:
    """Gradient of a chunk, zeros where there is none."""
    grad, flat = handle.gradient, handle.handle.flat_param
    return torch.zeros(flat._sharded_size, device=flat.device) if grad is None else grad


def _refuse_step(self: ECOOptimizer, argument: Any = None) -> NoReturn:
    raise RuntimeError(
        "expected a step of the optimizer that eco_dist.fsdp1.convert returned, got one of the optimizer it was made "
        "of, whose parameters hold no weights any more"
    )
