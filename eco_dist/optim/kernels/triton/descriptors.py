"""How shards are described to a launch: two small tables, one row a shard.

The first says where the tensors lie and is uploaded only when that changes; the second says what changes from step to
step. Every program finds its shard by bisection over `FIRST_PROGRAM`.
"""

from __future__ import annotations

import enum


class Field(enum.IntEnum):
    """Columns of the first table, int64: pointers (0 if there is no such tensor), then numbers.

    Up to `EXTRA` the tensors have an entry an element, then up to `ABSMAX` one a scale group or block. `EXTRA` is the
    residual or the master weight. `FIRST_BLOCK` is the number of the shard's first block in the whole parameter, which
    random bits follow.
    """

    CODES = 0
    GRAD = 1
    EXP_AVG = 2
    EXP_AVG_SQ = 3
    EXTRA = 4
    SCALES = 5
    EXP_AVG_SCALE = 6
    EXP_AVG_SQ_SCALE = 7
    ABSMAX = 8
    FIRST_PROGRAM = 9
    BLOCKS = 10
    BLOCKS_PER_ROW = 11
    COLUMNS = 12
    FIRST_BLOCK = 13
    TENSOR = 14


class Number(enum.IntEnum):
    """Columns of the second table seen as int64; fp32 numbers follow, see `Scalar`."""

    SEED = 0
    STEP = 1


class Scalar(enum.IntEnum):
    """Columns of the second table seen as fp32; names are those of `rules.Scalars`."""

    GRAD_SCALE = 4
    BETA1 = 5
    FACTOR1 = 6
    BETA2 = 7
    FACTOR2 = 8
    ROOT2 = 9
    EPS = 10
    DECAY = 11
    STEP_SIZE = 12
    GAIN = 13


FIELDS = len(Field)
NUMBERS = (max(Scalar) + 2) // 2
"""Width of the second table in int64 words."""
