"""Before rounding: where a program's elements lie, and the update rule on them."""

import triton
import triton.language as tl

from eco_dist.optim.kernels.triton.device.fields import (
    BETA1,
    BETA2,
    BLOCK_COUNT,
    BLOCKS_PER_ROW,
    CODES,
    COLUMNS,
    DECAY,
    EPS,
    EXTRA,
    FACTOR1,
    FACTOR2,
    FIRST_PROGRAM,
    GRAD,
    GRAD_SCALE,
    ROOT2,
    STEP_SIZE,
    pointer,
)
from eco_dist.optim.kernels.triton.device.grids import BLOCK, float_of, grid_step, value_of
from eco_dist.optim.kernels.triton.device.moments import load_moment
from eco_dist.optim.step import RESIDUAL_STEPS

RESIDUAL_UNIT: tl.constexpr = tl.constexpr(1 / RESIDUAL_STEPS)


@triton.jit
def locate(entry, start, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Where `BLOCKS` blocks lie: row, number in the row, whether they exist.

    And their elements: offset in the shard, column, whether they are inside the tensor. `start` counts blocks along the
    row of a program that walks it.
    """
    program = tl.program_id(0) - tl.load(entry + FIRST_PROGRAM).to(tl.int32)
    per_row = tl.load(entry + BLOCKS_PER_ROW).to(tl.int32)
    columns = tl.load(entry + COLUMNS)
    if KIND.aligned:
        columns = tl.multiple_of(columns, 16)
    number = tl.arange(0, BLOCKS) + start
    if KIND.walks_rows:
        row = number * 0 + program
        part = number
        exists = part < per_row
    else:
        number += program * BLOCKS
        row = number // per_row
        part = number - row * per_row
        exists = number < tl.load(entry + BLOCK_COUNT)
    # 64 bits: a high-precision parameter is one row, which may have more than 2^31 elements.
    column = part.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    offset = row.to(tl.int64)[:, None] * columns + column
    return row, part, exists, offset, column, exists[:, None] & (column < columns)


@triton.jit
def load_grad(entry, offset, inside, KIND: tl.constexpr):
    """Gradient in fp32."""
    if KIND.grad_is_bf16:
        bits = tl.load(pointer(entry, GRAD, tl.int16, KIND) + offset, mask=inside, other=0)
        return float_of(bits.to(tl.int32) << 16)
    else:
        return tl.load(pointer(entry, GRAD, tl.float32, KIND) + offset, mask=inside, other=0.0)


@triton.jit
def load_values(entry, row, offset, column, inside, KIND: tl.constexpr):
    """The numbers the codes stand for, in units of the scale."""
    GRID: tl.constexpr = KIND.grid
    if GRID.bits == 4:
        packed = (tl.load(entry + COLUMNS) + 1) // 2
        place = row.to(tl.int64)[:, None] * packed + column // 2
        code = tl.load(pointer(entry, CODES, tl.int8, KIND) + place, mask=inside, other=0).to(tl.int32)
        code = (code << (28 - (column & 1) * 4).to(tl.int32)) >> 28
    elif GRID.bits == 16:
        code = tl.load(pointer(entry, CODES, tl.int16, KIND) + offset, mask=inside, other=0).to(tl.int32)
    else:
        code = tl.load(pointer(entry, CODES, tl.int8, KIND) + offset, mask=inside, other=0).to(tl.int32)
    return value_of(code, GRID)


@triton.jit
def residual_unit(values, scale, KIND: tl.constexpr):
    """Weight units of one count of an 8-bit residual."""
    GRID: tl.constexpr = KIND.grid
    unit = grid_step(values, GRID)
    if KIND.granularity != "none":
        unit = unit * scale[:, None]
    return unit * RESIDUAL_UNIT


@triton.jit
def load_weight(entry, values, scale, offset, inside, KIND: tl.constexpr):
    """Weight before the step: the stored weight, with its residual, or the master weight."""
    if KIND.compensation == "master":
        return tl.load(pointer(entry, EXTRA, tl.float32, KIND) + offset, mask=inside, other=0.0)
    else:
        stored = values if KIND.granularity == "none" else values * scale[:, None]
        if KIND.compensation == "residual":
            if KIND.residual_is_fp32:
                return stored + tl.load(pointer(entry, EXTRA, tl.float32, KIND) + offset, mask=inside, other=0.0)
            else:
                count = tl.load(pointer(entry, EXTRA, tl.int8, KIND) + offset, mask=inside, other=0)
                return stored + count.to(tl.float32) * residual_unit(values, scale, KIND)
        else:
            return stored


@triton.jit
def update(entry, numbers, maps, grad, values, scale, row, part, exists, offset, inside, KIND: tl.constexpr):
    """The rule of `eco_dist/optim/rules.py`: updated weight, new moments, d. Without a second moment it and d are m."""
    block = row.to(tl.int64) * tl.load(entry + BLOCKS_PER_ROW) + part
    if KIND.grid is None:
        theta = tl.load(pointer(entry, CODES, tl.float32, KIND) + offset, mask=inside, other=0.0)
    else:
        theta = load_weight(entry, values, scale, offset, inside, KIND)
    g = grad * tl.load(numbers + GRAD_SCALE)
    m = load_moment(entry, maps, offset, inside, block, exists, KIND, False) * tl.load(numbers + BETA1)
    decayed = theta * tl.load(numbers + DECAY)
    factor1 = tl.load(numbers + FACTOR1)
    if KIND.rule == "sgd":
        m = m + g * factor1
        return decayed - m * tl.load(numbers + STEP_SIZE), m, m, m
    else:
        v = load_moment(entry, maps, offset, inside, block, exists, KIND, True) * tl.load(numbers + BETA2)
        v = v + (g * g) * tl.load(numbers + FACTOR2)
        d = tl.sqrt_rn(v) * tl.load(numbers + ROOT2) + tl.load(numbers + EPS)
        if KIND.rule == "displacement":
            m = m + tl.div_rn(g, d) * factor1
            return decayed - m, m, v, d
        else:
            m = m + g * factor1
            return decayed - tl.div_rn(m, d) * tl.load(numbers + STEP_SIZE), m, v, d
