"""Reading the tables of `descriptors.py`."""

import triton
import triton.language as tl

from eco_dist.optim.kernels.triton.descriptors import FIELDS, NUMBERS, Field, Number, Scalar

WIDTH: tl.constexpr = tl.constexpr(FIELDS)
NUMBER_WIDTH: tl.constexpr = tl.constexpr(NUMBERS)
SCALAR_WIDTH: tl.constexpr = tl.constexpr(2 * NUMBERS)

CODES: tl.constexpr = tl.constexpr(int(Field.CODES))
SCALES: tl.constexpr = tl.constexpr(int(Field.SCALES))
GRAD: tl.constexpr = tl.constexpr(int(Field.GRAD))
EXP_AVG: tl.constexpr = tl.constexpr(int(Field.EXP_AVG))
EXP_AVG_SCALE: tl.constexpr = tl.constexpr(int(Field.EXP_AVG_SCALE))
EXP_AVG_SQ: tl.constexpr = tl.constexpr(int(Field.EXP_AVG_SQ))
EXP_AVG_SQ_SCALE: tl.constexpr = tl.constexpr(int(Field.EXP_AVG_SQ_SCALE))
EXTRA: tl.constexpr = tl.constexpr(int(Field.EXTRA))
ABSMAX: tl.constexpr = tl.constexpr(int(Field.ABSMAX))
FIRST_PROGRAM: tl.constexpr = tl.constexpr(int(Field.FIRST_PROGRAM))
BLOCK_COUNT: tl.constexpr = tl.constexpr(int(Field.BLOCKS))
BLOCKS_PER_ROW: tl.constexpr = tl.constexpr(int(Field.BLOCKS_PER_ROW))
COLUMNS: tl.constexpr = tl.constexpr(int(Field.COLUMNS))
FIRST_BLOCK: tl.constexpr = tl.constexpr(int(Field.FIRST_BLOCK))
TENSOR: tl.constexpr = tl.constexpr(int(Field.TENSOR))

SEED: tl.constexpr = tl.constexpr(int(Number.SEED))
STEP: tl.constexpr = tl.constexpr(int(Number.STEP))

GRAD_SCALE: tl.constexpr = tl.constexpr(int(Scalar.GRAD_SCALE))
BETA1: tl.constexpr = tl.constexpr(int(Scalar.BETA1))
FACTOR1: tl.constexpr = tl.constexpr(int(Scalar.FACTOR1))
BETA2: tl.constexpr = tl.constexpr(int(Scalar.BETA2))
FACTOR2: tl.constexpr = tl.constexpr(int(Scalar.FACTOR2))
ROOT2: tl.constexpr = tl.constexpr(int(Scalar.ROOT2))
EPS: tl.constexpr = tl.constexpr(int(Scalar.EPS))
DECAY: tl.constexpr = tl.constexpr(int(Scalar.DECAY))
STEP_SIZE: tl.constexpr = tl.constexpr(int(Scalar.STEP_SIZE))
GAIN: tl.constexpr = tl.constexpr(int(Scalar.GAIN))


@triton.jit
def find_shard(table, count):
    """Which of `count` shards this program works on: the last one whose first program is not behind it."""
    program = tl.program_id(0)
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        is_behind = tl.load(table + middle * WIDTH + FIRST_PROGRAM) > program
        low = tl.where(is_behind, low, middle)
        high = tl.where(is_behind, middle, high)
    return low


@triton.jit
def pointer(entry, FIELD: tl.constexpr, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Pointer to a tensor of the shard at `entry` of the first table."""
    address = tl.load(entry + FIELD).to(tl.pointer_type(DTYPE))
    if KIND.aligned and FIELD <= EXTRA:
        address = tl.multiple_of(address, 16)
    return address
