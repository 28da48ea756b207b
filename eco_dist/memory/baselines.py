"""What others keep for a parameter, to hold beside a recipe.

| name | what | bytes a parameter between steps |
|---|---|---|
| `bf16-master` | bf16 weights, fp32 master and moments: DeepSpeed's and Megatron's mixed precision | 14 |
| `deepspeed-bf16-master` | DeepSpeed `bf16_master_weights_and_grads`: bf16 master, fp32 moments | 12 |
| `deepspeed-bf16-states` | and `bf16_optimizer_states`: bf16 moments too | 8 |
| `te-fp8-master` | Transformer Engine FP8 weights with their transpose (Hopper), fp32 master and moments | 14 |
| `torchao-8bit` | bf16 weights under `torchao.optim.AdamW8bit` | 4.03 |
| `flashoptim` | FlashOptim: bf16 weights, 8 bits of correction, 8-bit moments with an fp16 scale per 32 | 5.13 |

FlashOptim quotes 7 bytes with bf16 gradients and 5 with gradient release; gradients are transient here, so both are
this row, with and without `step_in_backward`. `fp32-master` and `fp8-master` are recipes, in `eco_dist.recipe`.
"""

from __future__ import annotations

import dataclasses
import difflib
import types

from eco_dist.memory.categories import Category
from eco_dist.memory.storage import EightBitMoments, PerElement, PlainStorage, RecipeStorage, Storage
from eco_dist.recipe import RECIPES, Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """How another framework stores the matrices of a model, and everything else.

    Attributes:
        name: as on the command line.
        matrices: storage of what a recipe would quantize.
        others: storage of embeddings, heads, norms and biases.
        note: what it is, one sentence.
    """

    name: str
    matrices: Storage
    others: Storage
    note: str


def _mixed(master: int, moments: int) -> PerElement:
    return PerElement({Category.HIGH_PRECISION: 2}, {Category.MASTER: master, Category.MOMENTS: moments})


def _baseline(name: str, matrices: Storage, others: Storage, note: str) -> Baseline:
    return Baseline(name=name, matrices=matrices, others=others, note=note)


_BF16 = _mixed(4, 8)
_BF16_MASTER = _mixed(2, 8)
_BF16_STATES = _mixed(2, 4)
_TE = PerElement({Category.CODES: 1, Category.WORKING: 1}, {Category.MASTER: 4, Category.MOMENTS: 8}, scales=True)
_TORCHAO = EightBitMoments()
_FLASH = PerElement(
    {Category.HIGH_PRECISION: 2}, {Category.RESIDUAL: 1, Category.MOMENTS: 2, Category.MOMENT_SCALES: 4 / 32}
)

BASELINES: types.MappingProxyType[str, Baseline] = types.MappingProxyType(
    {
        baseline.name: baseline
        for baseline in (
            _baseline("bf16-master", _BF16, _BF16, "bf16 weights, fp32 master weights and moments"),
            _baseline("deepspeed-bf16-master", _BF16_MASTER, _BF16_MASTER, "DeepSpeed's bf16_master_weights_and_grads"),
            _baseline("deepspeed-bf16-states", _BF16_STATES, _BF16_STATES, "and DeepSpeed's bf16_optimizer_states"),
            _baseline("te-fp8-master", _TE, _BF16, "Transformer Engine FP8 weights, their transpose, fp32 master"),
            _baseline("torchao-8bit", _TORCHAO, _TORCHAO, "torchao's AdamW8bit on bf16 weights"),
            _baseline("flashoptim", _FLASH, _FLASH, "FlashOptim's AdamW with 24-bit master weights"),
        )
    }
)
"""Baselines that are not recipes, by name."""

_PLAIN = PlainStorage()


def storage_of(recipe: Recipe | None) -> Storage:
    """Storage of a parameter with this recipe; None: high precision."""
    return _PLAIN if recipe is None or recipe.format is None else RecipeStorage(recipe)


def resolve(name: Recipe | Baseline | str) -> Recipe | Baseline:
    """A recipe or a baseline, given as such or by name.

    Raises:
        ValueError: for an unknown name; says the nearest one.
    """
    if not isinstance(name, str):
        return name
    if name in BASELINES:
        return BASELINES[name]
    if name in RECIPES:
        return RECIPES[name]
    known = [*RECIPES, *BASELINES]
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{nearest[0]}'?" if nearest else f"choose one of {', '.join(known)}"
    raise ValueError(f"expected the name of a recipe or baseline, got '{name}'; {hint}")
