"""The step of a shard, in plain torch: decode, rule, encode, compensate.

This is the reference that every kernel equals bit for bit. It allocates a few fp32 tensors of the shard's size; the
kernels allocate none.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from eco_dist.numerics import (
    BLOCK_SIZE,
    Granularity,
    MomentFormat,
    Rounding,
    decode,
    decode_moment,
    encode,
    encode_moment,
    grid_step,
    group_absmax,
    random_halves,
)
from eco_dist.numerics.codec import unpack
from eco_dist.numerics.groups import expand_to_elements
from eco_dist.optim import rules
from eco_dist.optim.rules import Hyper, Rule, Scalars, scalars_of
from eco_dist.optim.shard import Shard, StateKey
from eco_dist.recipe import Compensation, Idle, Injection, ResidualFormat

RESIDUAL_STEPS = 127
"""An 8-bit residual counts in 1/127 of the grid step at the stored weight, which no error exceeds."""

MOMENT_PURPOSES = (1, 2)
"""`Stream.purpose` of the two moments' rounding."""

RESIDUAL_PURPOSE = 3
"""`Stream.purpose` of an 8-bit residual's rounding."""

GRADIENT_LIMIT = 2.0**63
"""Gradients must stay below, so that g^2 is finite: an infinite second moment would poison the injection."""


@dataclasses.dataclass(kw_only=True)
class StepStats:
    """Sums over the shards of this rank since the start of the step.

    Attributes:
        sum_squared_error: of e = theta-tilde - theta-hat.
        sum_squared_weight: of theta-tilde.
        moved: elements whose code changed. (Their values all change a little whenever a scale does.)
        elements: elements stepped.
    """

    sum_squared_error: float = 0.0
    sum_squared_weight: float = 0.0
    moved: int = 0
    elements: int = 0

    def add(self, updated: Tensor, error: Tensor, moved: Tensor, idle: Tensor | None = None) -> None:
        """Count one shard: updated weight and error in weight units, whose codes changed, which were not stepped."""
        still = torch.zeros_like(moved) if idle is None else idle.expand_as(moved)
        self.sum_squared_error += float(error.masked_fill(still, 0).double().square().sum())
        self.sum_squared_weight += float(updated.masked_fill(still, 0).double().square().sum())
        self.moved += int((moved & ~still).sum())
        self.elements += int((~still).sum())


@dataclasses.dataclass(kw_only=True)
class Task:
    """A shard to step.

    Attributes:
        shard: changed in place.
        grad: gradient of its rows, finite, fp32 or bf16.
        rule: which update.
        hyper: hyper-parameters of this step; lr > 0.
        absmax: largest magnitude of the updated weight where the owners of a cut scale group had to agree on it.
    """

    shard: Shard
    grad: Tensor
    rule: Rule
    hyper: Hyper
    absmax: Tensor | None = None

    @functools.cached_property
    def scalars(self) -> Scalars:
        """What the step multiplies with."""
        return scalars_of(self.rule, self.hyper)

    @property
    def skips_idle(self) -> bool:
        """Whether scale groups without gradient stay as they are. Not in a step that rescales momenta: all of them."""
        return self.shard.recipe.idle is Idle.SKIP and self.hyper.momentum_rescale == 1.0


@dataclasses.dataclass(kw_only=True)
class PlainTask:
    """A high-precision parameter to step: `Task` without codes; `state` holds fp32 moments, local tensors."""

    weight: Tensor
    grad: Tensor
    state: dict[str, Tensor]
    rule: Rule
    hyper: Hyper

    @functools.cached_property
    def scalars(self) -> Scalars:
        """What the step multiplies with."""
        return scalars_of(self.rule, self.hyper)


def measure_absmax(task: Task) -> None:
    """Set a task's absmax from this rank's rows; the shard does not change."""
    updated, _, _ = _update(task)
    assert task.shard.recipe.granularity is not None
    task.absmax = group_absmax(updated, task.shard.recipe.granularity)


def step(task: Task, seed: int, stats: StepStats | None = None) -> None:
    """Step a shard in place.

    Args:
        task: the shard, its gradient and hyper-parameters.
        seed: seed of the run's random bits.
        stats: sums to add to.
    """
    shard, recipe = task.shard, task.shard.recipe
    assert recipe.format is not None
    updated, denominator, moments = _update(task)
    idle = _IdleGroups(task) if task.skips_idle else None
    halves = _halves(shard, seed, task.hyper.step, 0) if recipe.rounding is Rounding.STOCHASTIC else None
    before = _codes_by_value(shard) if stats is not None else None
    codes, scales = encode(updated, recipe.format, recipe.granularity, halves=halves, absmax=task.absmax)
    shard.codes.copy_(codes)
    shard.scales.copy_(scales)
    error = updated - _stored(shard)
    if stats is not None and before is not None:
        still = None if idle is None else idle.elements(updated.shape[-1])
        stats.add(updated, error, before != _codes_by_value(shard), still)
    if recipe.injects:
        rules.inject(moments[StateKey.EXP_AVG], error, denominator, task.scalars)
    elif recipe.compensation is Compensation.RESIDUAL:
        _store_residual(shard, error, seed, task.hyper.step)
    elif recipe.compensation is Compensation.MASTER:
        shard.state[StateKey.MASTER].copy_(updated)
    _encode_moments(shard, moments, seed, task.hyper.step)
    if idle is not None:
        idle.restore(shard)


def step_plain(task: PlainTask) -> None:
    """Ordinary step of a high-precision parameter, in place."""
    theta, grad, state = task.weight.float(), task.grad.float(), task.state
    if task.rule is Rule.SGD:
        updated = rules.sgd(theta, grad, state[StateKey.EXP_AVG], task.scalars)
    else:
        updated, _ = rules.adamw(theta, grad, state[StateKey.EXP_AVG], state[StateKey.EXP_AVG_SQ], task.scalars)
    task.weight.copy_(updated)


def is_steppable(grad: Tensor) -> Tensor:
    """Whether a gradient is finite and below `GRADIENT_LIMIT`, as a 0-dimensional bool tensor (no synchronization)."""
    if grad.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=grad.device)
    return grad.abs().amax() < GRADIENT_LIMIT


def _update(task: Task) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """Updated weight, AdamW's d where the injection needs it, and new moments in fp32, all in tensors of their own."""
    shard = task.shard
    moments = _decode_moments(shard)
    theta, grad = _weight_before(shard), task.grad.float()
    if task.rule is Rule.SGD:
        return rules.sgd(theta, grad, moments[StateKey.EXP_AVG], task.scalars), None, moments
    displaces = task.hyper.injection is Injection.DISPLACEMENT
    first, second = moments[StateKey.EXP_AVG], moments[StateKey.EXP_AVG_SQ]
    updated, denominator = rules.adamw(theta, grad, first, second, task.scalars, displacement=displaces)
    return updated, None if displaces else denominator, moments


class _IdleGroups:
    """The scale groups without gradient (of `bf16`: blocks), and what their shard held before the step."""

    def __init__(self, task: Task) -> None:
        shard = task.shard
        granularity = shard.recipe.granularity or Granularity.BLOCK
        self._groups = group_absmax(task.grad.float(), granularity) == 0
        self._before = [tensor.clone() for tensor in self._tensors(shard)]

    @staticmethod
    def _tensors(shard: Shard) -> list[Tensor]:
        return [shard.codes, shard.scales, *(tensor for tensor in shard.state.values() if tensor.ndim)]

    def elements(self, width: int) -> Tensor:
        """Mask over the last dimension of a tensor of the shard, `width` wide: elements, packed codes or scales."""
        groups = self._groups.shape[-1]
        if groups == 1 or width == groups:
            return self._groups
        block = BLOCK_SIZE if width > (groups - 1) * BLOCK_SIZE else BLOCK_SIZE // 2
        return self._groups.repeat_interleave(block, -1)[..., :width]

    def restore(self, shard: Shard) -> None:
        """Undo the step where the gradient was zero."""
        for tensor, before in zip(self._tensors(shard), self._before, strict=True):
            if tensor.numel():
                tensor.copy_(torch.where(self.elements(tensor.shape[-1]), before, tensor))


def _halves(shard: Shard, seed: int, step: int, purpose: int) -> Tensor:
    stream = shard.stream(seed, step, purpose)
    return random_halves(stream, shard.shape, shard.first_row, shard.codes.device)


def _stored(shard: Shard) -> Tensor:
    assert shard.recipe.format is not None
    return decode(shard.codes, shard.scales, shard.recipe.format, shard.recipe.granularity, shard.columns)


def _codes_by_value(shard: Shard) -> Tensor:
    assert shard.recipe.format is not None
    return unpack(shard.codes, shard.recipe.format, shard.columns)


def _weight_before(shard: Shard) -> Tensor:
    """theta-hat, or what the compensation knows to be closer to the weight: theta-hat + e, the master weight."""
    if shard.recipe.compensation is Compensation.MASTER:
        return shard.state[StateKey.MASTER]
    if shard.recipe.compensation is Compensation.RESIDUAL:
        return _stored(shard) + _load_residual(shard)
    return _stored(shard)


def _residual_unit(shard: Shard) -> Tensor:
    """Weight units of one count of an 8-bit residual: grid step of the stored code times scale, over 127."""
    recipe = shard.recipe
    assert recipe.format is not None
    step = grid_step(_codes_by_value(shard), recipe.format)
    if recipe.granularity is not None:
        step = step * expand_to_elements(shard.scales, shard.columns, recipe.granularity)
    return step * (1 / RESIDUAL_STEPS)


def _load_residual(shard: Shard) -> Tensor:
    stored = shard.state[StateKey.RESIDUAL]
    return stored if shard.recipe.residual is ResidualFormat.FP32 else stored.float() * _residual_unit(shard)


def _store_residual(shard: Shard, error: Tensor, seed: int, step: int) -> None:
    if shard.recipe.residual is ResidualFormat.INT8:
        # Always stochastic: rounding to nearest would lose every update smaller than half a count, and with it the
        # slow drift that a residual is kept for.
        noise = (2 * _halves(shard, seed, step, RESIDUAL_PURPOSE) + 1) * 2.0**-17
        error = (error / _residual_unit(shard)).add_(noise).round_().clamp_(-RESIDUAL_STEPS, RESIDUAL_STEPS)
    shard.state[StateKey.RESIDUAL].copy_(error)


_MOMENTS = (
    (StateKey.EXP_AVG, StateKey.EXP_AVG_SCALE, MOMENT_PURPOSES[0]),
    (StateKey.EXP_AVG_SQ, StateKey.EXP_AVG_SQ_SCALE, MOMENT_PURPOSES[1]),
)


def _decode_moments(shard: Shard) -> dict[str, Tensor]:
    """fp32 copies of the moments."""
    return {
        key: decode_moment(
            shard.state[key], shard.state.get(scale), shard.recipe.moments, second=key == StateKey.EXP_AVG_SQ
        )
        for key, scale, _ in _MOMENTS
        if key in shard.state
    }


def _encode_moments(shard: Shard, moments: dict[str, Tensor], seed: int, step: int) -> None:
    stochastic = shard.recipe.moments_rounding is Rounding.STOCHASTIC and shard.recipe.moments is not MomentFormat.FP32
    for key, scale_key, purpose in _MOMENTS:
        if key not in moments:
            continue
        halves = _halves(shard, seed, step, purpose) if stochastic else None
        second = key == StateKey.EXP_AVG_SQ
        stored, scale = encode_moment(moments[key], shard.recipe.moments, second=second, halves=halves)
        shard.state[key].copy_(stored)
        if scale is not None:
            shard.state[scale_key].copy_(scale)
