"""How one parameter is stored: a recipe's codes and moments, or what another framework keeps.

[Note: weight and state]
A storage answers two questions for any local shape: what the *weight* takes, and what the optimizer's *state* takes.
FSDP shards both alike. DeepSpeed asks two others: what the *working copy* takes, which at stages 0 to 2 every rank
keeps whole, and what its *partition* takes. Every answer is a list of (category, bytes).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping

from eco_dist.memory.categories import STATE_CATEGORIES, Category
from eco_dist.numerics import Granularity, codes_scale_shape, codes_shape
from eco_dist.optim.state import state_layout
from eco_dist.recipe import Recipe

Shape = tuple[int, ...]
Bytes = list[tuple[Category, int]]


class Storage:
    """See the note above; `recipe` is None for what is not a quantized weight."""

    recipe: Recipe | None = None
    is_quantized: bool = False
    runs_under_zero: bool = True

    @property
    def stepped_bytes(self) -> int:
        """Bytes of an element of what another framework's optimizer steps."""
        return 4

    def weight(self, shape: Shape) -> Bytes:
        """What the weight takes."""
        raise NotImplementedError

    def state(self, shape: Shape, *, second_moment: bool) -> Bytes:
        """What the optimizer's state takes."""
        raise NotImplementedError

    def on_wire(self, elements: int, compute_bytes: int) -> int:
        """Bytes that so many elements travel as in an all-gather: the compute dtype's."""
        return compute_bytes * elements

    def working(self, shape: Shape) -> Bytes:
        """What DeepSpeed's forward reads."""
        return self.weight(shape)

    def partition(self, shape: Shape, *, second_moment: bool) -> Bytes:
        """What DeepSpeed's optimizer owns."""
        return self.state(shape, second_moment=second_moment)


@dataclasses.dataclass(frozen=True)
class RecipeStorage(Storage):
    """A quantized weight."""

    recipe: Recipe = dataclasses.field(default_factory=Recipe)
    is_quantized = True

    def weight(self, shape: Shape) -> Bytes:
        """codes: one storage element each (INT4: two in a byte, rows padded to whole bytes); 4 bytes a scale."""
        return list(_codes_and_scales(shape, self.recipe))

    def state(self, shape: Shape, *, second_moment: bool) -> Bytes:
        """As `eco_dist.optim.state` allocates it."""
        return _state(shape, self.recipe, second_moment)

    def on_wire(self, elements: int, compute_bytes: int) -> int:
        """The codes; scales are left out."""
        assert self.recipe.format is not None
        return elements * self.recipe.format.grid.bits // 8


@dataclasses.dataclass(frozen=True)
class PlainStorage(Storage):
    """A parameter in high precision under `ECOAdamW` or torch's AdamW: fp32 with fp32 moments.

    DeepSpeed makes it 16 bits with an fp32 master, whatever it is.
    """

    def weight(self, shape: Shape) -> Bytes:
        """4 bytes an element."""
        return [(Category.HIGH_PRECISION, 4 * math.prod(shape))]

    def state(self, shape: Shape, *, second_moment: bool) -> Bytes:
        """4 bytes an element and moment, and the step."""
        return _state(shape, None, second_moment)

    def working(self, shape: Shape) -> Bytes:
        """2 bytes an element."""
        return [(Category.WORKING, 2 * math.prod(shape))]

    def partition(self, shape: Shape, *, second_moment: bool) -> Bytes:
        """4 bytes of master weight beside the state."""
        return [(Category.MASTER, 4 * math.prod(shape)), *_state(shape, None, second_moment)]


@dataclasses.dataclass(frozen=True)
class PerElement(Storage):
    """What another framework keeps, where it is a sum of bytes an element.

    Attributes:
        weights: category -> bytes an element of what forward reads.
        states: category -> bytes an element of the rest; moments count twice where there are two.
        scales: a scale of 4 bytes for every tensor.
    """

    weights: Mapping[Category, float]
    states: Mapping[Category, float]
    scales: bool = False

    def __hash__(self) -> int:
        """By identity: the baselines are singletons."""
        return id(self)

    @property
    def stepped_bytes(self) -> int:
        """Those of the master weight."""
        return int(self.states.get(Category.MASTER, 4))

    def weight(self, shape: Shape) -> Bytes:
        """Bytes an element times elements."""
        return self._times(self.weights, shape) + ([(Category.SCALES, 4)] if self.scales else [])

    def state(self, shape: Shape, *, second_moment: bool) -> Bytes:
        """Bytes an element times elements, and a step counter."""
        moments = 1.0 if second_moment else 0.5
        counts = {kind: b * (moments if kind is Category.MOMENTS else 1) for kind, b in self.states.items()}
        return [*self._times(counts, shape), (Category.COUNTERS, 4)]

    @staticmethod
    def _times(counts: Mapping[Category, float], shape: Shape) -> Bytes:
        return [(kind, math.ceil(each * math.prod(shape))) for kind, each in counts.items()]


@dataclasses.dataclass(frozen=True)
class EightBitMoments(Storage):
    """bf16 weights under ``torchao.optim.AdamW8bit``.

    It quantizes a state of 4,096 elements or more, in whole blocks of 256; what is smaller or uneven stays bf16. The
    rule looks at the local shard, so the layout changes with the number of ranks.
    """

    runs_under_zero = False

    def weight(self, shape: Shape) -> Bytes:
        """2 bytes an element."""
        return [(Category.HIGH_PRECISION, 2 * math.prod(shape))]

    def state(self, shape: Shape, *, second_moment: bool) -> Bytes:
        """A byte an element and 4 for each 256, and a map of 256 fp32 values a state; or 2 bytes an element."""
        elements, states = math.prod(shape), 2 if second_moment else 1
        if elements < 4096 or elements % 256:
            return [(Category.MOMENTS, 2 * states * elements), (Category.COUNTERS, 4)]
        scales = 4 * (elements // 256) + 1024
        return [
            (Category.MOMENTS, states * elements),
            (Category.MOMENT_SCALES, states * scales),
            (Category.COUNTERS, 4),
        ]


@functools.cache
def _codes_and_scales(shape: Shape, recipe: Recipe) -> tuple[tuple[Category, int], ...]:
    assert recipe.format is not None
    codes = math.prod(codes_shape(shape, recipe.format)) * recipe.format.grid.storage_dtype.itemsize
    scales = codes_scale_shape(shape, recipe.format, recipe.granularity)
    # With granularity `tensor` every rank has the one scale, whatever rows it has.
    count = 1 if recipe.granularity is Granularity.TENSOR else math.prod(scales)
    return (Category.CODES, codes), (Category.SCALES, 4 * count)


def _state(shape: Shape, recipe: Recipe | None, second_moment: bool) -> Bytes:
    return [
        (STATE_CATEGORIES[key], math.prod(piece.shape) * piece.dtype.itemsize)
        for key, piece in state_layout(shape, recipe, second_moment=second_moment).items()
    ]
