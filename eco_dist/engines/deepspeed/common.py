"""What the ECO subclasses of all ZeRO stages share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eco_dist.optim.kernels import kernel_for


def is_bad(grad: Tensor) -> Tensor:
    """Whether a gradient has an element that is not finite or too large to step with, as a bool tensor."""
    good = kernel_for(grad.device).is_steppable(grad if grad.dtype is not torch.float16 else grad.float())
    return ~torch.as_tensor(good, device=grad.device)


def clip_factor(norm: Any, loss_scale: float, clip_grad: float) -> float:
    """What gradients are multiplied with: 1 / loss scale, and less where their norm exceeds the clipping norm.

    Args:
        norm: global norm of the scaled gradients; None if it was not asked for.
        loss_scale: what they were scaled with.
        clip_grad: clipping norm; 0 does not clip.
    """
    if clip_grad > 0 and norm is not None:
        return 1.0 / (loss_scale * max(1.0, (float(norm) / loss_scale + 1e-6) / clip_grad))
    return 1.0 / loss_scale


def refuse_moving(*_: Any, **__: Any) -> None:
    """In the place of DeepSpeed's `offload_states` and `reload_states`.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "ECO optimizers do not move their states between devices yet; leave out offload_states, or save a checkpoint "
        "and build the engine again"
    )


def report_bad_gradients(zero: Any) -> None:
    """Count a skipped step; raise if the client's optimizer says so and no loss scale explains it.

    Raises:
        FloatingPointError: if the optimizer was made with nonfinite="raise".
    """
    client = zero.optimizer.client
    client.skipped_steps += 1
    if client.nonfinite == "raise" and not zero.dynamic_loss_scale:
        raise FloatingPointError(
            "expected finite gradients below 2^63, got others on some rank; nothing was changed. Lower the learning "
            "rate or set gradient_clipping, or make the optimizer with nonfinite='skip' to leave such steps out"
        )
