"""Recipes: how a weight is stored and what happens to the rounding error.

A recipe is chosen once, at conversion, travels with the quantized weight, and is read from there by the optimizer, the
engines, the memory report and checkpoints.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
from typing import Any

from eco_dist.numerics import BLOCK_SIZE, Format, Granularity, MomentFormat, Rounding


class Compensation(enum.Enum):
    """What happens to the quantization error e = updated weight - stored weight.

    `momentum`: injected into the first moment (ECO). `residual`: stored and added back at the next step. `none`: lost
    (for comparison). `master`: never arises, an fp32 master weight is kept (for comparison).
    """

    MOMENTUM = "momentum"
    RESIDUAL = "residual"
    NONE = "none"
    MASTER = "master"


class Injection(enum.Enum):
    """How the error enters the momentum; see `eco_dist.optim.rules`."""

    PAPER = "paper"
    AUTO = "auto"
    DISPLACEMENT = "displacement"


class Idle(enum.Enum):
    """What happens to a scale group whose gradient is zero throughout, as those of idle experts and rows are.

    `step`: what AdamW does, decay and momentum move it on. `skip`: nothing in it changes, no decay either: the remedy
    under nearest rounding, where idle experts otherwise drift further than without compensation.
    """

    STEP = "step"
    SKIP = "skip"


class ResidualFormat(enum.Enum):
    """How compensation `residual` stores the error: exactly, or as a signed byte in units of 1/127 grid step."""

    FP32 = "fp32"
    INT8 = "int8"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Storage and arithmetic of quantized weights.

    Attributes:
        format: grid of the codes; None leaves every weight in fp32 (ordinary AdamW).
        granularity: extent of a scale group; must be None for `bf16` and for no format, which have no scales.
        rounding: how the updated weight is rounded.
        compensation: what happens to the error.
        injection: form of compensation `momentum`.
        moments: storage of both moments.
        moments_rounding: how moments in less than fp32 are rounded.
        idle: what happens to a scale group (for `bf16`: a block) without gradient.
        residual: storage of the error under compensation `residual`.
    """

    format: Format | None = Format.E4M3
    granularity: Granularity | None = Granularity.BLOCK
    rounding: Rounding = Rounding.STOCHASTIC
    compensation: Compensation = Compensation.MOMENTUM
    injection: Injection = Injection.AUTO
    moments: MomentFormat = MomentFormat.FP32
    moments_rounding: Rounding = Rounding.NEAREST
    idle: Idle = Idle.STEP
    residual: ResidualFormat = ResidualFormat.INT8

    def __post_init__(self) -> None:
        """Refuse combinations that cannot work."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.name not in ("format", "granularity"):
                object.__setattr__(self, field.name, _as_enum(field.name, value))
        if self.format is None:
            if self.compensation is not Compensation.MASTER:
                raise ValueError(
                    "expected compensation 'master' for a recipe without a format, "
                    f"got '{self.compensation.value}'; fp32 weights have no error to compensate"
                )
            if self.granularity is not None:
                raise ValueError(f"format None stores no scales: expected granularity None, got {self.granularity}")
        elif self.format.is_scaled == (self.granularity is None):
            needs = "one of row, block, tensor" if self.format.is_scaled else "None (it stores no scales)"
            got = None if self.granularity is None else self.granularity.value
            raise ValueError(f"format '{self.format.value}' expects granularity {needs}, got {got!r}")
        if self.idle is Idle.SKIP and self.granularity is Granularity.TENSOR:
            raise ValueError(
                "idle 'skip' expects granularity row or block, got 'tensor', whose one scale moves with every weight"
            )

    @classmethod
    def from_name(cls, name: str) -> Recipe:
        """A named recipe.

        Raises:
            ValueError: for an unknown name; says the nearest one.
        """
        if name in RECIPES:
            return RECIPES[name]
        nearest = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean '{nearest[0]}'?" if nearest else f"choose one of {', '.join(RECIPES)}"
        raise ValueError(f"expected the name of a recipe, got '{name}'; {hint}")

    @property
    def name(self) -> str:
        """The recipe's name if it is a named one, else its fields."""
        for name, recipe in RECIPES.items():
            if recipe == self:
                return name
        return ", ".join(f"{key}={value}" for key, value in self.to_dict().items())

    @property
    def quantizes(self) -> bool:
        """Whether weights become codes at all."""
        return self.format is not None

    @property
    def injects(self) -> bool:
        """Whether the error goes into the momentum."""
        return self.compensation is Compensation.MOMENTUM

    @property
    def injection_in_force(self) -> Injection:
        """Form of the rule: where nothing is injected, the ordinary one, whatever the field says."""
        return self.injection if self.injects else Injection.PAPER

    def replace(self, **changes: Any) -> Recipe:
        """A copy with some fields changed; enum fields also accept their value as a string.

        Raises:
            ValueError: for an unknown field or value.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for key in changes:
            if key not in known:
                nearest = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean '{nearest[0]}'?" if nearest else f"choose one of {', '.join(known)}"
                raise ValueError(f"expected a field of a recipe, got '{key}'; {hint}")
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, str | None]:
        """Fields as plain strings, for JSON."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {key: None if value is None else value.value for key, value in values.items()}

    @property
    def bytes_per_parameter(self) -> float:
        """Resident bytes of one quantized parameter in a wide matrix, block scales included, row scales not."""
        block = 4 / BLOCK_SIZE
        moments = 2 * (self.moments.storage_dtype.itemsize + (block if self.moments.has_scales else 0))
        if self.format is None:
            return 4 + moments
        weight = self.format.grid.bits / 8 + (block if self.granularity is Granularity.BLOCK else 0)
        if self.compensation is Compensation.MASTER:
            return weight + moments + 4
        if self.compensation is Compensation.RESIDUAL:
            return weight + moments + (4 if self.residual is ResidualFormat.FP32 else 1)
        return weight + moments


_ENUMS: dict[str, type[enum.Enum]] = {
    "format": Format,
    "granularity": Granularity,
    "rounding": Rounding,
    "compensation": Compensation,
    "injection": Injection,
    "moments": MomentFormat,
    "moments_rounding": Rounding,
    "idle": Idle,
    "residual": ResidualFormat,
}


def _as_enum(field: str, value: Any) -> enum.Enum:
    try:
        return _ENUMS[field](value)
    except ValueError:
        allowed = ", ".join(repr(member.value) for member in _ENUMS[field])
        raise ValueError(f"expected recipe.{field} to be one of {allowed}, got {value!r}") from None


# What a residual keeps is not lost, so the stored weight may as well be the nearest one.
_RESIDUAL = Recipe(compensation=Compensation.RESIDUAL, rounding=Rounding.NEAREST)

RECIPES: types.MappingProxyType[str, Recipe] = types.MappingProxyType(
    {
        "fp8": Recipe(),
        "fp8-bf16": Recipe(moments=MomentFormat.BF16),
        "fp8-8bit": Recipe(moments=MomentFormat.FP8),
        "fp8-residual": _RESIDUAL,
        "fp8-residual-8bit": _RESIDUAL.replace(moments=MomentFormat.FP8),
        "paper": Recipe(granularity=Granularity.ROW, injection=Injection.PAPER),
        "int4": Recipe(format=Format.INT4, granularity=Granularity.TENSOR),
        "bf16": Recipe(format=Format.BF16, granularity=None),
        "fp32-master": Recipe(format=None, granularity=None, compensation=Compensation.MASTER),
        "fp8-master": Recipe(compensation=Compensation.MASTER, rounding=Rounding.NEAREST),
        "fp8-naive": Recipe(compensation=Compensation.NONE),
    }
)
"""Named recipes. The last three are baselines."""


def resolve_recipe(recipe: Recipe | str) -> Recipe:
    """A recipe given as such or by name."""
    return recipe if isinstance(recipe, Recipe) else Recipe.from_name(recipe)
