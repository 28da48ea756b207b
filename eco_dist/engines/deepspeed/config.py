"""The `eco` section of a DeepSpeed JSON.

It needs nothing of DeepSpeed's own modules: the fallback reads it where they have changed.
"""

from __future__ import annotations

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from eco_dist.recipe import Recipe
from eco_dist.weights import DEFAULT_SKIP

SECTION = "eco"
AUTO = "auto"
"""The value of a key that stands for its default, as elsewhere in such a JSON."""

DEEPSPEED_SKIP = (*DEFAULT_SKIP, "*.gate.wg.weight")
"""As everywhere, and the router of DeepSpeed's own MoE layer."""


class EcoConfig(BaseModel):
    """`"eco": {...}` in the DeepSpeed JSON; every key may be left out or be `"auto"`.

    Attributes:
        recipe: name of a recipe.
        overrides: fields of the recipe to change, for example `{"rounding": "nearest"}`.
        skip: patterns of parameter names that stay in high precision, instead of the usual ones.
        also_skip: patterns in addition.
        working_copy: what forward and backward read at stage 1 and 2: `replica` (codes of all ranks, decoded layer by
            layer), `transient` (16 bits from forward to step) or `kept` (16 bits always).
        seed: seed of stochastic rounding, instead of the optimizer's.
        fallback: train at stage 0 with codes beside a plain model, on any version of DeepSpeed.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    recipe: str = "fp8"
    overrides: dict[str, str | None] = Field(default_factory=dict)
    skip: list[str] = Field(default_factory=lambda: list(DEEPSPEED_SKIP))
    also_skip: list[str] = Field(default_factory=list)
    working_copy: Literal["replica", "transient", "kept"] = "replica"
    seed: int | None = None
    fallback: bool = False

    @field_validator("recipe")
    @classmethod
    def _is_recipe(cls, name: str) -> str:
        Recipe.from_name(name)
        return name

    def resolved(self) -> Recipe:
        """The recipe with its overrides.

        Raises:
            ValueError: for an unknown field or value, or a combination that cannot work.
        """
        return Recipe.from_name(self.recipe).replace(**self.overrides)


def read_config(parameters: dict[str, Any]) -> EcoConfig:
    """The `eco` section of a DeepSpeed configuration.

    Raises:
        ValueError: for an unknown key or a value out of range, in one sentence.
    """
    section = parameters.get(SECTION, {})
    if not isinstance(section, dict):
        raise ValueError(f"expected 'eco' in the DeepSpeed configuration to be a dictionary, got {section!r}")
    known = list(EcoConfig.model_fields)
    for key in section:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{nearest[0]}'?" if nearest else f"choose one of {', '.join(known)}"
            raise ValueError(f"expected a key of the 'eco' section, got '{key}'; {hint}")
    try:
        config = EcoConfig(**{key: value for key, value in section.items() if value != AUTO})
        config.resolved()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"in the 'eco' section, '{where}': {first['msg']}; got {first['input']!r}") from None
    return config
