"""Optimizer-in-backward: each parameter is stepped, and its gradient freed, as soon as backward has it.

Peak memory loses the gradients of the whole model: 4 bytes a parameter, more than the codes themselves. Works on one
process and under FSDP2, which calls these hooks after its reduce-scatter.
"""

from __future__ import annotations

from torch import Tensor, nn

from eco_dist.optim import ECOOptimizer
from eco_dist.optim.shard import scale_group


class StepInBackward:
    """Handle of an installed optimizer-in-backward; `remove()` takes it out again."""

    def __init__(self, optimizer: ECOOptimizer, parameters: list[Tensor]) -> None:
        """Install the hooks; called by `step_in_backward`."""
        self._optimizer = optimizer
        self._stepped: set[int] = set()
        self._handles = [p.register_post_accumulate_grad_hook(self._step) for p in parameters]
        self._handles.append(optimizer.register_step_post_hook(lambda *_: self._stepped.clear()))

    def remove(self) -> None:
        """Take the hooks out: backward leaves gradients again."""
        for handle in self._handles:
            handle.remove()

    def _step(self, parameter: Tensor) -> None:
        if id(parameter) in self._stepped:
            raise RuntimeError(
                "expected optimizer.step() after each backward with step_in_backward, got a second backward: "
                "gradients cannot accumulate when each one is used up at once. Accumulate without step_in_backward"
            )
        self._stepped.add(id(parameter))
        self._optimizer.step_parameter(parameter)
        parameter.grad = None


def step_in_backward(
    model: nn.Module,
    optimizer: ECOOptimizer,
    *,
    max_grad_norm: float | None = None,
    accumulate: int = 1,
) -> StepInBackward:
    """Step parameters inside backward. Call it after sharding; keep calling `optimizer.step()` once an iteration.

    That call marks the iteration's end (and runs step hooks and schedulers' expectations); it finds no gradients left.
    The ranks that hold a parameter still skip it together when its gradient is not finite, but parameters stepped
    before it in the same backward stay stepped; `optimizer.skipped_steps` counts skipped parameters.

    Args:
        model: the model, sharded or not.
        optimizer: the optimizer of all its trainable parameters.
        max_grad_norm: must be None: the global norm is known only when the last gradient is.
        accumulate: must be 1.

    Returns:
        A handle whose `remove()` undoes this.

    Raises:
        ValueError: for clipping, accumulation, a trainable parameter the optimizer does not have, or a sharded weight
            with one scale for the whole tensor.
    """
    clip = optimizer.max_grad_norm if max_grad_norm is None else max_grad_norm
    if clip is not None:
        raise ValueError(
            f"expected max_grad_norm=None with step_in_backward, got {clip}: clipping by global norm needs "
            "all gradients before the first step. Clip per parameter, or step after backward"
        )
    if accumulate != 1:
        raise ValueError(
            f"expected accumulate=1 with step_in_backward, got {accumulate}: each gradient is used up at once. "
            "Use a larger batch, or step after backward"
        )
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) not in known:
            raise ValueError(f"expected '{name}' in the optimizer, got an optimizer without it; pass all parameters")
        if scale_group(parameter) is not None:
            raise ValueError(
                f"expected row or block scales with step_in_backward, got granularity 'tensor' for the sharded "
                f"'{name}': its ranks would have to agree on the scale inside backward"
            )
        parameters.append(parameter)
    return StepInBackward(optimizer, parameters)
