"""Which weights of a model become codes, and the conversion in place."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from eco_dist.numerics import Granularity
from eco_dist.recipe import Idle, Injection, Recipe, resolve_recipe
from eco_dist.weights.tensor import QuantizedWeight

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_SKIP = ("*embed*", "*wte*", "*wpe*", "*head*", "output.weight", "*norm*", "*router*", "*.gate.weight")
"""Name patterns that stay in high precision, as in the paper: embeddings, output heads, norms, and routers of experts.
Vectors, `nn.Embedding` weights and what `get_output_embeddings()` returns stay so whatever their name."""

EXPERTS = "*experts.*"
"""Names of experts' weights: by default their scale groups without gradient are left alone (docs/moe.md)."""

_CONVERTIBLE = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversion:
    """What happened to one parameter.

    Attributes:
        names: its names; several when it is tied.
        shape: its global shape.
        recipe: recipe of the quantized weight; None if it stayed in high precision.
        reason: why.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    recipe: Recipe | None
    reason: str

    @property
    def parameters(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """What `quantize_weights_` did, one entry a parameter."""

    recipe: Recipe
    conversions: tuple[Conversion, ...]

    @property
    def coverage(self) -> float:
        """Share of the parameters that are codes now."""
        total = sum(conversion.parameters for conversion in self.conversions)
        quantized = sum(conversion.parameters for conversion in self.conversions if conversion.recipe)
        return quantized / total if total else 0.0

    def table(self) -> Table:
        """The report for a terminal; layers that differ only in their number share a line."""
        from rich.table import Table

        table = Table(title=f"recipe {self.recipe.name}: {self.coverage:.1%} of the parameters are quantized")
        for column in ("weights", "shape", "stored as", "why"):
            table.add_column(column)
        for column in ("tensors", "parameters"):
            table.add_column(column, justify="right")
        groups: dict[tuple[str, ...], list[Conversion]] = {}
        for conversion in self.conversions:
            name = re.sub(r"\.\d+\.", ".*.", " = ".join(conversion.names))
            stored = "fp32" if conversion.recipe is None else _stored_as(conversion.recipe)
            shape = " x ".join(map(str, conversion.shape))
            groups.setdefault((name, shape, stored, conversion.reason), []).append(conversion)
        for key, members in groups.items():
            table.add_row(*key, str(len(members)), f"{sum(member.parameters for member in members):,}")
        return table

    def __str__(self) -> str:
        """The table as plain text."""
        from rich.console import Console

        console = Console(width=140)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def quantize_weights_(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    skip: Sequence[str] = DEFAULT_SKIP,
    also_skip: Sequence[str] = (),
    plain: str = "fp32",
    skip_idle_experts: bool = True,
) -> ConversionReport:
    """Replace a model's weights by quantized ones, in place; everything else becomes fp32.

    Call it before `fully_shard`, and on the whole model: names choose each weight's stream of random bits. Ties are
    kept; a model on the meta device stays there.

    Args:
        model: any module.
        recipe: a recipe or its name.
        skip: shell-style patterns of parameter names to keep in high precision.
        also_skip: patterns in addition to `skip`.
        plain: storage of the skipped matrices (embeddings, heads): `fp32`, or `bf16` (codes of recipe `bf16`).
        skip_idle_experts: give experts (`EXPERTS`) the recipe with `idle` `skip`. Recipes with the injection of the
            paper or one scale a tensor stay as they are.

    Returns:
        What was converted, what was not, and why.

    Raises:
        TypeError: if a weight to convert is float64 or not floating point.
        ValueError: if a weight is already sharded or holds NaN or infinity, or `plain` is neither choice. The model is
            then unchanged.
    """
    report = plan_conversion(
        model, recipe, skip=skip, also_skip=also_skip, plain=plain, skip_idle_experts=skip_idle_experts
    )
    parameters = [parameter for _, parameter in _named_once(model)]
    for conversion, parameter in zip(report.conversions, parameters, strict=True):
        if conversion.recipe is not None and not isinstance(parameter, QuantizedWeight):
            _check_convertible(conversion.names[0], parameter)
    replacements = _replacements(report.conversions, parameters)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in replacements:
                setattr(module, name, replacements[id(parameter)])
    return report


def plan_conversion(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    skip: Sequence[str] = DEFAULT_SKIP,
    also_skip: Sequence[str] = (),
    plain: str = "fp32",
    skip_idle_experts: bool = True,
) -> ConversionReport:
    """What `quantize_weights_` would do with the same arguments; the model is not changed.

    Raises:
        ValueError: if a weight is already sharded, or `plain` is neither choice.
    """
    recipe = resolve_recipe(recipe)
    if plain not in ("fp32", "bf16"):
        raise ValueError(f"expected plain to be 'fp32' or 'bf16', got {plain!r}")
    patterns = (*skip, *also_skip)
    experts = _for_experts(recipe) if skip_idle_experts else recipe
    conversions = [_decide(model, names, p, (recipe, experts), patterns, plain) for names, p in _named_once(model)]
    return ConversionReport(recipe=recipe, conversions=tuple(conversions))


def tensor_ids(names: Iterable[str]) -> dict[str, int]:
    """28-bit numbers for names: a hash, so that they do not depend on the order of parameters or the engine."""
    ids: dict[str, int] = {}
    taken: set[int] = set()
    for name in names:
        number = int.from_bytes(hashlib.blake2s(name.encode(), digest_size=4).digest(), "little") & 0x0FFFFFFF
        while number in taken:
            number = (number + 1) & 0x0FFFFFFF
        taken.add(number)
        ids[name] = number
    return ids


def _named_once(model: nn.Module) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    """Every parameter once, with all of its names."""
    by_id: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), ([], parameter))[0].append(name)
    return [(tuple(names), parameter) for names, parameter in by_id.values()]


def _decide(
    model: nn.Module,
    names: tuple[str, ...],
    parameter: nn.Parameter,
    recipes: tuple[Recipe, Recipe],
    patterns: Sequence[str],
    plain: str,
) -> Conversion:
    """What becomes of a parameter; `recipes` are those of ordinary weights and of experts."""
    recipe = recipes[any(fnmatch.fnmatchcase(name, EXPERTS) for name in names)]
    if isinstance(parameter, DTensor):
        raise ValueError(f"expected a model that is not sharded yet, got the DTensor '{names[0]}'; quantize first")
    shape = tuple(parameter.shape)
    if isinstance(parameter, QuantizedWeight):
        return Conversion(names=names, shape=shape, recipe=parameter.recipe, reason="is quantized already")
    if not recipe.quantizes:
        return Conversion(names=names, shape=shape, recipe=None, reason="the recipe keeps fp32 weights")
    reason = _reason_to_skip(model, names, parameter, patterns)
    if reason is None:
        return Conversion(names=names, shape=shape, recipe=recipe, reason="matrix")
    if plain == "bf16" and parameter.ndim >= 2:
        return Conversion(names=names, shape=shape, recipe=Recipe.from_name("bf16"), reason=reason)
    return Conversion(names=names, shape=shape, recipe=None, reason=reason)


def _for_experts(recipe: Recipe) -> Recipe:
    """The recipe with idle scale groups left alone, where that is possible and not against the paper's letter."""
    if not recipe.quantizes or recipe.granularity is Granularity.TENSOR or recipe.injection is Injection.PAPER:
        return recipe
    return recipe.replace(idle=Idle.SKIP)


def _reason_to_skip(
    model: nn.Module, names: tuple[str, ...], parameter: nn.Parameter, patterns: Sequence[str]
) -> str | None:
    if parameter.ndim < 2:
        return "vector"
    owners = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    if any(isinstance(owner, nn.Embedding) for owner in owners):
        return "embedding"
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    if head is not None and any(owner is head for owner in owners):
        return "output head"
    for pattern in patterns:
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            return f"matches {pattern}"
    return None


def _check_convertible(name: str, parameter: Tensor) -> None:
    if parameter.dtype not in _CONVERTIBLE:
        raise TypeError(
            f"expected '{name}' to be float32, bfloat16 or float16, got {parameter.dtype}; "
            f"convert it first, or keep it as it is with also_skip=['{name}']"
        )
    if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
        raise ValueError(f"expected '{name}' to be finite, got NaN or infinity; repair the weights before converting")


def _replacements(conversions: Sequence[Conversion], parameters: Sequence[nn.Parameter]) -> dict[int, nn.Parameter]:
    ids = tensor_ids(conversion.names[0] for conversion in conversions)
    result: dict[int, nn.Parameter] = {}
    for conversion, parameter in zip(conversions, parameters, strict=True):
        if isinstance(parameter, QuantizedWeight):
            continue
        data: Tensor
        if conversion.recipe is not None:
            data = QuantizedWeight.from_values(parameter.data, conversion.recipe, ids[conversion.names[0]])
        elif parameter.dtype in (torch.bfloat16, torch.float16):
            data = parameter.data.float()
        else:
            continue
        result[id(parameter)] = nn.Parameter(data, requires_grad=parameter.requires_grad)
    return result


def _stored_as(recipe: Recipe) -> str:
    assert recipe.format is not None
    return recipe.format.value + (f", scale per {recipe.granularity.value}" if recipe.granularity else "")
