"""What a launch is compiled for, and with how many blocks and warps."""

from __future__ import annotations

import dataclasses
import functools

from eco_dist.numerics import Format, Granularity, MomentFormat, Rounding
from eco_dist.numerics.formats import Grid
from eco_dist.optim.rules import Rule
from eco_dist.recipe import Compensation, Recipe, ResidualFormat


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Compile-time constants of a launch; whatever changes from step to step is no part of it.

    Attributes:
        grid: of the codes; None for a high-precision parameter, which is stepped with nothing to round.
        granularity: "row", "block", "tensor", or "none" where there are no scales.
        stochastic: whether the weight is rounded stochastically.
        compensation: value of `Compensation`.
        residual_is_fp32: else it is INT8.
        moments: value of `MomentFormat`.
        stochastic_moments: whether moments in less than fp32 are rounded stochastically.
        rule: "adamw", "displacement" or "sgd".
        grad_is_bf16: else it is fp32.
        skips_idle: whether scale groups without gradient stay as they are.
        absmax_is_given: whether the owners of a scale group have agreed on its absmax before.
        aligned: whether rows are multiples of 16 elements and tensors with an entry an element start at multiples of
            16 bytes, so that loads are vectors.
        counts: whether statistics are collected.
        measures: whether only the absmax is wanted.
    """

    grid: Grid | None
    granularity: str
    stochastic: bool
    compensation: str
    residual_is_fp32: bool
    moments: str
    stochastic_moments: bool
    rule: str
    grad_is_bf16: bool
    skips_idle: bool
    absmax_is_given: bool
    aligned: bool
    counts: bool = False
    measures: bool = False

    @property
    def moment_grid(self) -> Grid:
        """Grid of moments in `fp8`."""
        return Format.E4M3.grid

    @property
    def walks_rows(self) -> bool:
        """Whether a program steps a whole row, block after block, rather than a few blocks at once."""
        return self.granularity == "row" and not self.measures

    @property
    def reads_codes(self) -> bool:
        """Whether the step depends on the codes before it."""
        return self.compensation != "master" or self.counts


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """Blocks of 128 a program holds at a time, and the warps it runs on.

    Fixed, not tuned: an autotuner would run the update several times on the real tensors, and every run steps the
    weights and injects the error again.
    """

    blocks: int
    warps: int


def launch_shape(kind: Kind) -> LaunchShape:
    """Eight elements a thread on 32-wide warps: vector loads of all streams, and nothing spills on any target.

    A row's program has a row to itself, so it takes twice the warps to have enough loads in flight.
    """
    return LaunchShape(blocks=16, warps=8) if kind.walks_rows else LaunchShape(blocks=8, warps=4)


@functools.cache
def kind_of(
    recipe: Recipe,
    rule: Rule,
    *,
    displaces: bool,
    grad_is_bf16: bool,
    skips_idle: bool = False,
    absmax_is_given: bool = False,
    aligned: bool = True,
    counts: bool = False,
    measures: bool = False,
) -> Kind:
    """Kind of a quantized weight's step."""
    assert recipe.format is not None
    given = absmax_is_given or recipe.granularity is Granularity.TENSOR
    return Kind(
        grid=recipe.format.grid,
        granularity="none" if recipe.granularity is None else recipe.granularity.value,
        stochastic=recipe.rounding is Rounding.STOCHASTIC,
        compensation=recipe.compensation.value,
        residual_is_fp32=recipe.residual is ResidualFormat.FP32,
        moments=recipe.moments.value,
        stochastic_moments=recipe.moments_rounding is Rounding.STOCHASTIC and recipe.moments is not MomentFormat.FP32,
        rule="sgd" if rule is Rule.SGD else "displacement" if displaces else "adamw",
        grad_is_bf16=grad_is_bf16,
        skips_idle=skips_idle,
        absmax_is_given=given,
        aligned=aligned,
        counts=counts,
        measures=measures,
    )


@functools.cache
def plain_kind(rule: Rule, *, grad_is_bf16: bool, aligned: bool = True) -> Kind:
    """Kind of a high-precision parameter's step."""
    return Kind(
        grid=None,
        granularity="none",
        stochastic=False,
        compensation=Compensation.NONE.value,
        residual_is_fp32=False,
        moments=MomentFormat.FP32.value,
        stochastic_moments=False,
        rule="sgd" if rule is Rule.SGD else "adamw",
        grad_is_bf16=grad_is_bf16,
        skips_idle=False,
        absmax_is_given=False,
        aligned=aligned,
    )
