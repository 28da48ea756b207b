"""The step of a shard: decode, rule, encode, compensate. The same code for every engine and every recipe.

`begin` ends where a scale group cut by a shard border needs its owners to agree on the absmax; `finish` does the rest.
Nothing of the shard changes before `finish`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from eco_dist.numerics import (
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
from eco_dist.optim.rules import Hyper
from eco_dist.optim.shard import Shard, StateKey
from eco_dist.recipe import Compensation, ResidualFormat

RESIDUAL_STEPS = 127
"""An 8-bit residual counts in 1/127 of the grid step at the stored weight, which no error exceeds."""

_RESIDUAL_PURPOSE = 3

Rule = Callable[[Tensor, Tensor, dict[str, Tensor], Hyper], tuple[Tensor, Tensor | float]]
"""(theta, gradient, decoded moments by state key, scalars) -> (updated weight, gain); moments change in place."""


@dataclasses.dataclass(kw_only=True)
class StepStats:
    """Sums over the shards of this rank since the start of the step.

    Attributes:
        sum_squared_error: of e = theta-tilde - theta-hat.
        sum_squared_weight: of theta-tilde.
        moved: elements whose code changed. (Their values all change a little whenever a scale does.)
        elements: elements in all.
    """

    sum_squared_error: float = 0.0
    sum_squared_weight: float = 0.0
    moved: int = 0
    elements: int = 0

    def add(self, updated: Tensor, error: Tensor, before: Tensor, after: Tensor) -> None:
        """Count one shard: updated weight and error in weight units, codes by value before and after."""
        self.sum_squared_error += float(error.double().square().sum())
        self.sum_squared_weight += float(updated.double().square().sum())
        self.moved += int((before != after).sum())
        self.elements += updated.numel()


@dataclasses.dataclass(kw_only=True)
class Pending:
    """A shard between `begin` and `finish`: its updated weight, moments and gain, all transient."""

    shard: Shard
    updated: Tensor
    moments: dict[str, Tensor]
    gain: Tensor | float
    absmax: Tensor | None


def begin(shard: Shard, grad: Tensor, hyper: Hyper, rule: Rule) -> Pending:
    """Updated weight of a shard.

    Args:
        shard: the shard; not modified.
        grad: gradient of the local rows, fp32 or bf16, finite.
        hyper: scalars of this step; lr > 0.
        rule: update rule.
    """
    moments = _decode_moments(shard)
    updated, gain = rule(_weight_before(shard), grad.float(), moments, hyper)
    absmax = None if shard.recipe.granularity is None else group_absmax(updated, shard.recipe.granularity)
    return Pending(shard=shard, updated=updated, moments=moments, gain=gain, absmax=absmax)


def finish(pending: Pending, seed: int, hyper: Hyper, stats: StepStats | None = None) -> None:
    """Round the updated weight, put its error where the recipe says, and store everything in place.

    Args:
        pending: result of `begin`, its absmax agreed on by all owners of a group.
        seed: seed of the run.
        hyper: scalars of this step.
        stats: sums to add to.
    """
    shard, updated, recipe = pending.shard, pending.updated, pending.shard.recipe
    assert recipe.format is not None
    halves = None
    if recipe.rounding is Rounding.STOCHASTIC:
        halves = random_halves(shard.stream(seed, hyper.step), shard.shape, shard.first_row, updated.device)
    before = _codes_by_value(shard) if stats is not None else None
    codes, scales = encode(updated, recipe.format, recipe.granularity, halves=halves, absmax=pending.absmax)
    shard.codes.copy_(codes)
    shard.scales.copy_(scales)
    stored = _stored(shard)
    error = updated - stored
    if stats is not None and before is not None:
        stats.add(updated, error, before, _codes_by_value(shard))
    if recipe.compensation is Compensation.MOMENTUM:
        pending.moments[StateKey.EXP_AVG].add_(error.mul_(pending.gain))
    elif recipe.compensation is Compensation.RESIDUAL:
        _store_residual(shard, error, seed, hyper.step)
    elif recipe.compensation is Compensation.MASTER:
        shard.state[StateKey.MASTER].copy_(updated)
    _encode_moments(shard, pending.moments)


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
    return step / RESIDUAL_STEPS


def _load_residual(shard: Shard) -> Tensor:
    stored = shard.state[StateKey.RESIDUAL]
    return stored if shard.recipe.residual is ResidualFormat.FP32 else stored.float() * _residual_unit(shard)


def _store_residual(shard: Shard, error: Tensor, seed: int, step: int) -> None:
    if shard.recipe.residual is ResidualFormat.INT8:
        # Always stochastic: rounding to nearest would lose every update smaller than half a count, and with it the
        # slow drift that a residual is kept for.
        stream = shard.stream(seed, step, _RESIDUAL_PURPOSE)
        halves = random_halves(stream, shard.shape, shard.first_row, error.device)
        noise = (2 * halves + 1) * 2.0**-17
        error = (error / _residual_unit(shard)).add_(noise).round_().clamp_(-RESIDUAL_STEPS, RESIDUAL_STEPS)
    shard.state[StateKey.RESIDUAL].copy_(error)


_MOMENTS = ((StateKey.EXP_AVG, StateKey.EXP_AVG_SCALE, False), (StateKey.EXP_AVG_SQ, StateKey.EXP_AVG_SQ_SCALE, True))


def _decode_moments(shard: Shard) -> dict[str, Tensor]:
    """fp32 copies of the moments: the stored ones must survive a step that is given up."""
    return {
        key: decode_moment(shard.state[key], shard.state.get(scale), shard.recipe.moments, second=second)
        for key, scale, second in _MOMENTS
        if key in shard.state
    }


def _encode_moments(shard: Shard, moments: dict[str, Tensor]) -> None:
    for key, scale_key, second in _MOMENTS:
        if key not in moments:
            continue
        stored, scale = encode_moment(moments[key], shard.recipe.moments, second=second)
        shard.state[key].copy_(stored)
        if scale is not None:
            shard.state[scale_key].copy_(scale)


def is_steppable(grad: Tensor) -> Tensor:
    """Whether a gradient is finite and its square is too, as a 0-dimensional bool tensor (no synchronization).

    The limit 2^63 keeps g^2 below fp32's largest number: an infinite second moment would poison the injection.
    """
    if grad.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=grad.device)
    return grad.abs().amax() < 2.0**63
