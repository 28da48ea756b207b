"""The words of a memory report."""

from __future__ import annotations

import enum


class Category(enum.Enum):
    """What bytes are for."""

    CODES = "codes"
    SCALES = "scales"
    HIGH_PRECISION = "high-precision parameters"
    MOMENTS = "moments"
    MOMENT_SCALES = "moment scales"
    RESIDUAL = "residual"
    MASTER = "master weights"
    COUNTERS = "step counters"
    PADDING = "padding"
    BUFFERS = "buffers"
    GRADIENTS = "gradients"

    @property
    def is_static(self) -> bool:
        """Whether these bytes are resident between steps."""
        return self is not Category.GRADIENTS


STATE_CATEGORIES = {
    "step": Category.COUNTERS,
    "lr_peak": Category.COUNTERS,
    "lr_last": Category.COUNTERS,
    "layout": Category.COUNTERS,
    "exp_avg": Category.MOMENTS,
    "exp_avg_sq": Category.MOMENTS,
    "exp_avg_scale": Category.MOMENT_SCALES,
    "exp_avg_sq_scale": Category.MOMENT_SCALES,
    "residual": Category.RESIDUAL,
    "master": Category.MASTER,
}
"""Category of each key of the optimizer state."""
