"""The words of a memory report.

[Note: static and transient]
*Static* bytes are resident between steps; they are counted exactly, tensor by tensor. *Transient* bytes come and go
within a step; planned ones are a model, measured ones are what the tracker saw.
"""

from __future__ import annotations

import enum


class Category(enum.StrEnum):
    """What bytes are for."""

    CODES = "codes"
    SCALES = "scales"
    HIGH_PRECISION = "high-precision parameters"
    WORKING = "working copy"
    MOMENTS = "moments"
    MOMENT_SCALES = "moment scales"
    RESIDUAL = "residual"
    MASTER = "master weights"
    COUNTERS = "step counters"
    PADDING = "padding"
    OTHER_STATE = "other optimizer state"
    BUFFERS = "buffers"
    FRAMEWORK = "framework buffers"
    GRADIENTS = "gradients"
    UNSHARDED = "unsharded weights"
    COMMUNICATION = "communication buffers"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"

    @property
    def is_static(self) -> bool:
        """Whether these bytes are resident between steps."""
        return self not in _TRANSIENT


_TRANSIENT = frozenset(
    (
        Category.GRADIENTS,
        Category.UNSHARDED,
        Category.COMMUNICATION,
        Category.ACTIVATIONS,
        Category.TEMPORARIES,
    )
)

NOT_A_WEIGHTS = (Category.PADDING, Category.COUNTERS, Category.WORKING)
"""Left out of "bytes of a quantized parameter": they do not grow with the shard of it that a rank owns."""

STATE_CATEGORIES = {
    "step": Category.COUNTERS,
    "lr_peak": Category.COUNTERS,
    "lr_last": Category.COUNTERS,
    "layout": Category.COUNTERS,
    "exp_avg": Category.MOMENTS,
    "exp_avg_sq": Category.MOMENTS,
    "momentum_buffer": Category.MOMENTS,
    "max_exp_avg_sq": Category.MOMENTS,
    "exp_avg_scale": Category.MOMENT_SCALES,
    "exp_avg_sq_scale": Category.MOMENT_SCALES,
    "residual": Category.RESIDUAL,
    "master": Category.MASTER,
}
"""Category of each key of the optimizer state; torch's own optimizers included, other keys are `OTHER_STATE`."""


def category_of(word: str) -> Category:
    """The category of a word or of a key of optimizer state; `OTHER_STATE` for any other."""
    if word in STATE_CATEGORIES:
        return STATE_CATEGORIES[word]
    return _WORDS.get(word, Category.OTHER_STATE)


_WORDS = {category.value: category for category in Category}
