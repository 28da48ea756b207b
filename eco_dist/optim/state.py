"""Layout of the optimizer state of one parameter: which tensors, of which shape and dtype.

The layout follows from the parameter's global shape and recipe. The memory planner reads it from here too, so what is
predicted is what is allocated.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from eco_dist.numerics import Granularity, MomentFormat, scale_shape
from eco_dist.optim.shard import StateKey, local
from eco_dist.recipe import Compensation, Injection, Recipe, ResidualFormat
from eco_dist.weights import QuantizedWeight


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateTensor:
    """One tensor of the state.

    Attributes:
        shape: shape for the given (local or global) parameter shape; empty for a scalar.
        dtype: stored dtype.
        fill: initial value.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float = 0.0

    @property
    def is_scalar(self) -> bool:
        """Scalars live on the CPU of every rank; the rest is cut like the parameter."""
        return self.shape == ()


_COUNTER = StateTensor(shape=(), dtype=torch.float32)


def state_layout(shape: Sequence[int], recipe: Recipe | None, *, second_moment: bool) -> dict[str, StateTensor]:
    """State of a parameter of `shape`.

    Args:
        shape: local or global shape.
        recipe: recipe of a quantized weight; None for a high-precision parameter (ordinary fp32 moments).
        second_moment: whether the rule has one (AdamW) or not (SGD).
    """
    moments = MomentFormat.FP32 if recipe is None else recipe.moments
    keys = [(StateKey.EXP_AVG, StateKey.EXP_AVG_SCALE)]
    if second_moment:
        keys.append((StateKey.EXP_AVG_SQ, StateKey.EXP_AVG_SQ_SCALE))
    layout = {StateKey.STEP: _COUNTER}
    for key, scale_key in keys:
        layout[key] = StateTensor(shape=tuple(shape), dtype=moments.storage_dtype, fill=_zero_code(moments, key))
        if moments.has_scales:
            layout[scale_key] = StateTensor(shape=scale_shape(shape, Granularity.BLOCK), dtype=torch.float32, fill=1)
    if recipe is not None:
        layout[StateKey.LAYOUT] = StateTensor(shape=(), dtype=torch.float32, fill=_layout_number(recipe))
        layout.update(_compensation_state(tuple(shape), recipe))
    return layout


def _layout_number(recipe: Recipe) -> float:
    """What the stored bytes mean, as a number fp32 holds exactly: E4M3 codes and dynamic-map codes look alike."""
    meaning = [recipe.moments.value, recipe.compensation.value]
    if recipe.injects:
        meaning.append(recipe.injection.value)
    if recipe.compensation is Compensation.RESIDUAL:
        meaning.append(recipe.residual.value)
    return float(zlib.crc32("/".join(meaning).encode()) & 0xFFFFFF)


def _compensation_state(shape: tuple[int, ...], recipe: Recipe) -> dict[str, StateTensor]:
    if recipe.compensation is Compensation.RESIDUAL:
        dtype = torch.int8 if recipe.residual is ResidualFormat.INT8 else torch.float32
        return {StateKey.RESIDUAL: StateTensor(shape=shape, dtype=dtype)}
    if recipe.compensation is Compensation.MASTER:
        return {StateKey.MASTER: StateTensor(shape=shape, dtype=torch.float32)}
    if recipe.injection_in_force is Injection.AUTO:
        return {StateKey.LR_PEAK: _COUNTER, StateKey.LR_LAST: _COUNTER}
    return {}


def _zero_code(moments: MomentFormat, key: str) -> float:
    """The code that stands for 0: the signed dynamic map has it in its middle."""
    return 127 if moments is MomentFormat.DYNAMIC8 and key == StateKey.EXP_AVG else 0


def allocate_state(parameter: Tensor, *, second_moment: bool) -> dict[str, Tensor]:
    """Fresh state of a parameter; of a DTensor, DTensors with the same placements (scalars excepted)."""
    weight = local(parameter)
    recipe = weight.recipe if isinstance(weight, QuantizedWeight) else None
    shapes = state_layout(parameter.shape, recipe, second_moment=second_moment)
    state: dict[str, Tensor] = {}
    for key, piece in state_layout(weight.shape, recipe, second_moment=second_moment).items():
        if piece.is_scalar:
            state[key] = torch.tensor(piece.fill, dtype=piece.dtype)
            continue
        tensor = torch.full(piece.shape, piece.fill, dtype=piece.dtype, device=weight.device)
        state[key] = _like_parameter(tensor, parameter, shapes[key].shape)
    if StateKey.MASTER in state:
        assert isinstance(weight, QuantizedWeight)
        local(state[StateKey.MASTER]).copy_(weight.decode())
    return state


def _like_parameter(tensor: Tensor, parameter: Tensor, global_shape: tuple[int, ...]) -> Tensor:
    if not isinstance(parameter, DTensor):
        return tensor
    # Shards may be uneven, so the global shape cannot be derived from the local one.
    stride = torch.empty(global_shape, device="meta").stride()
    return DTensor.from_local(
        tensor,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=torch.Size(global_shape),
        stride=stride,
    )


def restore_dtypes(parameter: Tensor, state: Mapping[str, object], *, second_moment: bool) -> dict[str, object]:
    """State as loaded by `torch.optim.Optimizer`, which casts everything to the parameter's dtype, in its own dtypes.

    The casts are exact: bytes and bf16 pass through fp32 unchanged.

    Raises:
        ValueError: if the keys are not those of the parameter's recipe.
    """
    weight = local(parameter)
    recipe = weight.recipe if isinstance(weight, QuantizedWeight) else None
    layout = state_layout(weight.shape, recipe, second_moment=second_moment)
    name = "high precision" if recipe is None else f"recipe '{recipe.name}'"
    advice = "load state that was saved with the same recipe and optimizer"
    if set(layout) != set(state):
        raise ValueError(
            f"expected optimizer state {sorted(layout)} for a parameter in {name}, "
            f"got {sorted(map(str, state))}; {advice}"
        )
    if recipe is not None and float(cast(Tensor, state[StateKey.LAYOUT])) != layout[StateKey.LAYOUT].fill:
        raise ValueError(f"expected optimizer state of {name}, got the same tensors in another recipe's form; {advice}")
    restored: dict[str, object] = {}
    for key, piece in layout.items():
        value = state[key]
        if not isinstance(value, Tensor):
            value = torch.tensor(value)
        restored[key] = value.to(dtype=piece.dtype, device="cpu") if piece.is_scalar else value.to(dtype=piece.dtype)
    return restored
