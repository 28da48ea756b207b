"""What `ECOAdamW` and `ECOSGD` share: an ordinary `torch.optim.Optimizer` over quantized and other parameters.

It holds no arithmetic: `rules.py` updates, `step.py` rounds and compensates. It decides, for all ranks together,
whether a step happens, and routes every parameter to its shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from eco_dist.numerics import Granularity
from eco_dist.optim.agreement import agree_on_absmax
from eco_dist.optim.gradients import Verdict, examine
from eco_dist.optim.kernels import kernel_for
from eco_dist.optim.rules import Hyper, Rule, Schedule
from eco_dist.optim.shard import Shard, StateKey, check_placements, first_row, is_quantized, local, scale_group
from eco_dist.optim.state import allocate_state, restore_dtypes
from eco_dist.optim.step import PlainTask, StepStats, Task
from eco_dist.recipe import Injection
from eco_dist.weights import QuantizedWeight


class ECOOptimizer(Optimizer):
    """What both optimizers share. Use `ECOAdamW` or `ECOSGD`.

    Attributes:
        skipped_steps: steps that no rank took because a gradient somewhere was not finite.
        grad_norm: global L2 norm of the gradients of the last step before clipping; None without `max_grad_norm`.
        collect_stats: set before a step to have `stats` after it; costs a pass over the weights.
        stats: sums over this rank's quantized weights in the last step; None if it was skipped or not collected.
    """

    _rule: Rule

    _step_supports_amp_scaling = True  # torch.amp.GradScaler leaves unscaling to `step`, see `_loss_scale`

    def __init__(
        self, params: Any, defaults: dict[str, Any], *, seed: int, nonfinite: str, max_grad_norm: float | None = None
    ) -> None:
        """Check arguments and parameters; see the subclasses."""
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"expected max_grad_norm > 0 or None, got {max_grad_norm}")
        if nonfinite not in ("skip", "raise"):
            raise ValueError(f"expected nonfinite to be 'skip' or 'raise', got {nonfinite!r}")
        self.seed = seed
        self.nonfinite = nonfinite
        self.max_grad_norm = max_grad_norm
        self.grad_norm: float | None = None
        self.skipped_steps = 0
        self.collect_stats = False
        self.stats: StepStats | None = None
        self._streams: dict[int, int] = {}
        super().__init__(params, defaults)

    # --- what subclasses say ----------------------------------------------------------------------------------------

    def _scalars(self, group: dict[str, Any]) -> dict[str, float]:
        """Rule-specific fields of `Hyper`."""
        raise NotImplementedError

    @property
    def has_second_moment(self) -> bool:
        """Whether the rule has one (AdamW) or not (SGD)."""
        return self._rule is Rule.ADAMW

    # --- torch.optim.Optimizer --------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; refuses hyper-parameters and layouts the step cannot work with.

        Raises:
            ValueError: for a hyper-parameter out of range, or a quantized weight sharded in an unsupported way.
        """
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            for parameter in self.param_groups[-1]["params"]:
                if is_quantized(parameter):
                    check_placements(parameter)
        except ValueError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or pickle needs; streams are keyed by object and found again."""
        names = ("seed", "nonfinite", "max_grad_norm", "grad_norm", "skipped_steps", "collect_stats", "stats")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}, "_streams": {}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, in the dtypes of each parameter's recipe; on an error nothing is changed.

        Raises:
            ValueError: if the state was saved with another recipe, optimizer or set of parameters.
        """
        before = (self.state, self.param_groups)
        try:
            super().load_state_dict(state_dict)
            for parameter, state in self.state.items():
                restored = restore_dtypes(parameter, state, second_moment=self.has_second_moment)
                self.state[parameter] = restored
        except Exception:
            self.state, self.param_groups = before
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all parameters that have a gradient.

        All ranks that hold a part of these parameters take the step or skip it together. A group with lr == 0 is left
        as it is, bit for bit: no weight, moment or step count changes.

        Args:
            closure: computes the loss again, as in `torch.optim`.

        Returns:
            The closure's loss, or None.

        Raises:
            FloatingPointError: if a gradient on any rank is NaN, infinite or larger than 2^63 and `nonfinite` is
                "raise"; nothing has changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Attributes of a tensor subclass are looked up through Python unless this is off; no step computes with one.
        with torch._C.DisableTorchFunctionSubclass():
            self._step_all()
        return loss

    def _step_all(self) -> None:
        for group in self.param_groups:
            self._check_group(group)
        work = list(self._work())
        self.stats = self.grad_norm = None
        verdict = examine(
            [parameter for parameter, _ in work],
            [parameter for group in self.param_groups for parameter in group["params"]],
            max_norm=self.max_grad_norm,
            loss_scale=self._loss_scale(),
            overflow=getattr(self, "found_inf", None),
        )
        if not self._accepts(verdict):
            return
        self.grad_norm = verdict.norm
        self.stats = StepStats() if self.collect_stats else None
        tasks = [self._task(p, group, local(cast(Tensor, p.grad)), verdict.scale) for p, group in work]
        self._step_tasks([task for task in tasks if task is not None])

    @torch.no_grad()
    def step_parameter(self, parameter: Tensor) -> None:
        """Step one parameter from its gradient: what optimizer-in-backward calls.

        The ranks that hold its shards take or skip it together.
        """
        group = next(group for group in self.param_groups if any(parameter is p for p in group["params"]))
        if self._accepts(examine([parameter], [parameter])):
            task = self._task(parameter, group, local(cast(Tensor, parameter.grad)))
            self._step_tasks([] if task is None else [task])

    # --- inside -----------------------------------------------------------------------------------------------------

    def _check_group(self, group: dict[str, Any]) -> None:
        for name, low, high in (("lr", 0.0, float("inf")), ("weight_decay", 0.0, float("inf"))):
            if not low <= float(group[name]) < high:
                raise ValueError(f"expected {name} >= 0 and finite, got {group[name]}")
        scalars = self._scalars(group)
        for name in ("beta1", "beta2"):
            if not 0.0 <= scalars.get(name, 0.0) < 1.0:
                raise ValueError(f"expected {name} in [0, 1), got {scalars[name]}")
        if not scalars.get("eps", 1.0) > 0.0:
            raise ValueError(f"expected eps > 0, got {scalars['eps']}: a zero gradient would divide 0 by 0")
        if scalars["beta1"] == 0.0 and any(_injects(p) for p in group["params"]):
            raise ValueError(
                "expected beta1 (SGD: momentum) > 0 for compensation 'momentum', got 0: there is no momentum to carry "
                "the rounding error; use compensation 'residual' (recipe 'fp8-residual')"
            )

    def _work(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} does not support sparse gradients; use dense ones")
                yield parameter, group

    def _loss_scale(self) -> float:
        """What `torch.amp.GradScaler` has multiplied the loss with; it sets this attribute for the time of a step."""
        scale = getattr(self, "grad_scale", None)
        return 1.0 if scale is None else float(scale)

    def _accepts(self, verdict: Verdict) -> bool:
        """Whether the step is taken; counts or reports it if not."""
        if verdict.usable:
            return True
        self.skipped_steps += 1
        if self.nonfinite == "raise":
            where = f"{verdict.bad_here} parameters of this rank" if verdict.bad_here else "another rank"
            rank = f" (rank {dist.get_rank()})" if dist.is_initialized() else ""
            raise FloatingPointError(
                f"expected finite gradients below 2^63, got others on {where}{rank}; nothing was changed. "
                "Lower the learning rate or clip gradients, or pass nonfinite='skip' to leave such steps out"
            )
        return False

    def _task(
        self, parameter: Tensor, group: dict[str, Any], grad: Tensor, grad_scale: float = 1.0
    ) -> Task | PlainTask | None:
        """What to do with a parameter, given its local gradient; None leaves it as it is."""
        state = self.state[parameter]
        if not state:
            state.update(allocate_state(parameter, second_moment=self.has_second_moment))
        if float(group["lr"]) == 0.0:
            return None
        hyper = self._hyper(parameter, group, state, grad_scale)
        state[StateKey.STEP].fill_(hyper.step)
        if StateKey.LR_PEAK in state:
            after = hyper.schedule.advance(hyper.lr)
            state[StateKey.LR_PEAK].fill_(after.peak)
            state[StateKey.LR_LAST].fill_(after.last)
        # The kernels write through pointers that autograd does not see.
        torch.autograd.graph.increment_version(parameter)
        if is_quantized(parameter):
            return Task(shard=self._shard(parameter, state), grad=grad, rule=self._rule, hyper=hyper)
        moments = {key: local(value) for key, value in state.items()}
        return PlainTask(weight=local(parameter), grad=grad, state=moments, rule=self._rule, hyper=hyper)

    def _step_tasks(self, tasks: list[Task | PlainTask]) -> None:
        """A call to each device's kernel; owners of a cut scale group agree on its absmax first."""
        by_device: dict[torch.device, list[Task | PlainTask]] = {}
        for task in tasks:
            by_device.setdefault(task.grad.device, []).append(task)
        for device, members in by_device.items():
            kernel = kernel_for(device)
            shards = [task for task in members if isinstance(task, Task)]
            whole = [task for task in shards if task.shard.recipe.granularity is Granularity.TENSOR]
            kernel.measure(whole)
            agree_on_absmax([task for task in whole if task.shard.scale_group is not None])
            kernel.step(shards, self.seed, self.stats)
            kernel.step_plain([task for task in members if isinstance(task, PlainTask)])

    def _hyper(self, parameter: Tensor, group: dict[str, Any], state: dict[str, Tensor], grad_scale: float) -> Hyper:
        weight = local(parameter)
        schedule = Schedule()
        if StateKey.LR_PEAK in state:
            schedule = Schedule(peak=float(state[StateKey.LR_PEAK]), last=float(state[StateKey.LR_LAST]))
        return Hyper(
            lr=float(group["lr"]),
            weight_decay=float(group["weight_decay"]),
            step=int(state[StateKey.STEP]) + 1,
            maximize=group["maximize"],
            grad_scale=grad_scale,
            injection=weight.recipe.injection_in_force if isinstance(weight, QuantizedWeight) else Injection.PAPER,
            schedule=schedule,
            **self._scalars(group),
        )

    def _shard(self, parameter: Tensor, state: dict[str, Tensor]) -> Shard:
        weight = local(parameter)
        assert isinstance(weight, QuantizedWeight)
        return Shard.of(
            weight,
            {key: local(value) for key, value in state.items()},
            first_row=first_row(parameter),
            tensor_id=self.stream_of(parameter),
            scale_group=scale_group(parameter),
        )

    def set_stream(self, parameter: Tensor, number: int) -> None:
        """Go on with the stream of random bits that a checkpoint names."""
        self.stream_of(parameter)
        self._streams[id(parameter)] = number

    def stream_of(self, parameter: Tensor) -> int:
        """Number of the parameter's stream of random bits, unique in this optimizer.

        Models converted block by block repeat names, and equal streams would round all blocks alike.
        """
        if id(parameter) not in self._streams:
            taken: set[int] = set()
            for group in self.param_groups:
                for other in filter(is_quantized, group["params"]):
                    number = cast(QuantizedWeight, local(other)).tensor_id
                    while number in taken:
                        number = (number + 1) & 0x0FFFFFFF
                    taken.add(number)
                    self._streams[id(other)] = number
        return self._streams[id(parameter)]


def _injects(parameter: Tensor) -> bool:
    weight = local(parameter)
    return isinstance(weight, QuantizedWeight) and weight.recipe.injects
