"""The kernels: step a few blocks, step a row, measure the absmax, store the scale of a whole tensor."""

import triton
import triton.language as tl

from eco_dist.optim.kernels.triton.device.fields import (
    ABSMAX,
    BLOCKS_PER_ROW,
    CODES,
    COLUMNS,
    EXTRA,
    FIRST_BLOCK,
    FIRST_PROGRAM,
    GAIN,
    NUMBER_WIDTH,
    SCALAR_WIDTH,
    SCALES,
    SEED,
    STEP,
    TENSOR,
    WIDTH,
    find_shard,
    pointer,
)
from eco_dist.optim.kernels.triton.device.grids import (
    BLOCK,
    NOISE,
    bits_of,
    code_of,
    random_halves,
    reciprocal,
    round_to_grid,
    scale_of,
)
from eco_dist.optim.kernels.triton.device.moments import store_moment
from eco_dist.optim.kernels.triton.device.update import load_grad, load_values, locate, residual_unit, update
from eco_dist.optim.step import MOMENT_PURPOSES, RESIDUAL_PURPOSE, RESIDUAL_STEPS

FIRST_MOMENT: tl.constexpr = tl.constexpr(MOMENT_PURPOSES[0] << 28)
SECOND_MOMENT: tl.constexpr = tl.constexpr(MOMENT_PURPOSES[1] << 28)
RESIDUE: tl.constexpr = tl.constexpr(RESIDUAL_PURPOSE << 28)
COUNTS: tl.constexpr = tl.constexpr(RESIDUAL_STEPS)


@triton.jit
def halves_for(entry, words, row, part, PURPOSE: tl.constexpr, BLOCKS: tl.constexpr):
    """Random integers of these blocks for one purpose (shifted into the stream's upper bits)."""
    number = tl.load(entry + FIRST_BLOCK) + row.to(tl.int64) * tl.load(entry + BLOCKS_PER_ROW) + part
    stream = tl.load(entry + TENSOR).to(tl.uint32) | PURPOSE
    return random_halves(tl.load(words + SEED), stream, tl.load(words + STEP).to(tl.uint32), number, BLOCKS)


@triton.jit
def store_codes(entry, rounded, row, part, exists, offset, column, inside, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Codes of representable numbers; INT4 packs two columns into a byte, the lower one first."""
    GRID: tl.constexpr = KIND.grid
    code = code_of(rounded, GRID)
    if GRID.bits == 4:
        columns = tl.load(entry + COLUMNS)
        nibbles = tl.reshape(tl.where(inside, code & 0xF, 0), [BLOCKS, BLOCK // 2, 2])
        low, high = tl.split(nibbles)
        pair = part[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
        place = row.to(tl.int64)[:, None] * ((columns + 1) // 2) + pair
        holds = exists[:, None] & (pair * 2 < columns)
        tl.store(pointer(entry, CODES, tl.int8, KIND) + place, (low | (high << 4)).to(tl.int8), mask=holds)
    elif GRID.bits == 16:
        tl.store(pointer(entry, CODES, tl.int16, KIND) + offset, code.to(tl.int16), mask=inside)
    else:
        tl.store(pointer(entry, CODES, tl.int8, KIND) + offset, code.to(tl.int8), mask=inside)


@triton.jit
def store_residual(
    entry, words, error, rounded, scale, row, part, offset, inside, KIND: tl.constexpr, BLOCKS: tl.constexpr
):
    """The error, exactly or as a stochastically rounded count of 1/127 grid steps."""
    if KIND.residual_is_fp32:
        tl.store(pointer(entry, EXTRA, tl.float32, KIND) + offset, error, mask=inside)
    else:
        halves = halves_for(entry, words, row, part, RESIDUE, BLOCKS)
        count = tl.div_rn(error, residual_unit(rounded, scale, KIND)) + (2 * halves + 1).to(tl.float32) * NOISE
        count = (tl.minimum(tl.maximum(count, -1024.0), 1024.0) + 12582912.0) - 12582912.0  # 1.5 * 2^23: to nearest
        count = tl.minimum(tl.maximum(count, -COUNTS), COUNTS)
        tl.store(pointer(entry, EXTRA, tl.int8, KIND) + offset, count.to(tl.int32).to(tl.int8), mask=inside)


@triton.jit
def add_counts(totals, theta, error, before, after, inside):
    """Add to the statistics: squared error, squared weight, codes that moved (by value), elements."""
    error, theta = tl.where(inside, error, 0.0).to(tl.float64), tl.where(inside, theta, 0.0).to(tl.float64)
    tl.atomic_add(totals, tl.sum(tl.sum(error * error, 1), 0))
    tl.atomic_add(totals + 1, tl.sum(tl.sum(theta * theta, 1), 0))
    moved = (inside & (before != after)).to(tl.int32)
    tl.atomic_add(totals + 2, tl.sum(tl.sum(moved, 1), 0).to(tl.float64))
    tl.atomic_add(totals + 3, tl.sum(tl.sum(inside.to(tl.int32), 1), 0).to(tl.float64))


@triton.jit
def finish(
    entry, words, numbers, maps, totals, theta, m, v, d, before, scale,
    row, part, exists, offset, column, inside, KIND: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Round, compensate, store. `scale` is the new one, `before` the old codes by value."""
    GRID: tl.constexpr = KIND.grid
    block = row.to(tl.int64) * tl.load(entry + BLOCKS_PER_ROW) + part
    if GRID is None:
        tl.store(pointer(entry, CODES, tl.float32, KIND) + offset, theta, mask=inside)
    else:
        halves = halves_for(entry, words, row, part, 0, BLOCKS) if KIND.stochastic else 0
        unit = theta if KIND.granularity == "none" else theta * reciprocal(scale)[:, None]
        rounded = round_to_grid(unit, halves, GRID, KIND.stochastic)
        error = theta - (rounded if KIND.granularity == "none" else rounded * scale[:, None])
        store_codes(entry, rounded, row, part, exists, offset, column, inside, KIND, BLOCKS)
        if KIND.counts:
            add_counts(totals, theta, error, before, rounded, inside)
        if KIND.compensation == "momentum":
            m = m + (error * d if KIND.rule == "adamw" else error) * tl.load(numbers + GAIN)
        elif KIND.compensation == "residual":
            store_residual(entry, words, error, rounded, scale, row, part, offset, inside, KIND, BLOCKS)
        elif KIND.compensation == "master":
            tl.store(pointer(entry, EXTRA, tl.float32, KIND) + offset, theta, mask=inside)
    halves = halves_for(entry, words, row, part, FIRST_MOMENT, BLOCKS) if KIND.stochastic_moments else 0
    store_moment(m, halves, entry, maps, offset, inside, block, exists, KIND, False)
    if KIND.rule != "sgd":
        halves = halves_for(entry, words, row, part, SECOND_MOMENT, BLOCKS) if KIND.stochastic_moments else 0
        store_moment(v, halves, entry, maps, offset, inside, block, exists, KIND, True)


@triton.jit
def new_scale(absmax, KIND: tl.constexpr):
    """Scale of the codes for a group's largest magnitude."""
    GRID: tl.constexpr = KIND.grid
    return scale_of(absmax, GRID)


@triton.jit
def scale_place(row, part, entry, KIND: tl.constexpr):
    """Number of each block's scale in the shard."""
    if KIND.granularity == "block":
        return row.to(tl.int64) * tl.load(entry + BLOCKS_PER_ROW) + part
    elif KIND.granularity == "row":
        return row.to(tl.int64)
    else:
        return row.to(tl.int64) * 0


@triton.jit(do_not_specialize=["count"])
def step_blocks(table, words, numbers, maps, totals, count, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Step `BLOCKS` blocks of one shard: a single pass, everything between in registers."""
    index = find_shard(table, count)
    entry, words, numbers = table + index * WIDTH, words + index * NUMBER_WIDTH, numbers + index * SCALAR_WIDTH
    row, part, exists, offset, column, inside = locate(entry, 0, KIND, BLOCKS)
    grad = load_grad(entry, offset, inside, KIND)
    if KIND.skips_idle:
        exists = exists & (tl.max(tl.abs(grad), 1) > 0)
        inside = inside & exists[:, None]
    place = scale_place(row, part, entry, KIND)
    scale = tl.full([BLOCKS], 1.0, tl.float32)
    if KIND.granularity != "none":
        scale = tl.load(pointer(entry, SCALES, tl.float32, KIND) + place, mask=exists, other=1.0)
    before = grad
    if KIND.grid is not None and KIND.reads_codes:
        before = load_values(entry, row, offset, column, inside, KIND)
    theta, m, v, d = update(
        entry, numbers, maps, grad, before, scale, row, part, exists, offset, inside, KIND
    )  # fmt: skip
    if KIND.granularity != "none":
        if KIND.absmax_is_given:
            absmax = tl.load(pointer(entry, ABSMAX, tl.float32, KIND) + place, mask=exists, other=0.0)
        else:
            absmax = tl.max(tl.abs(theta), 1)
        scale = new_scale(absmax, KIND)
    # Threads share what they load (scales, pairs of INT4): nothing is stored before all have read.
    tl.debug_barrier()
    if KIND.granularity == "block":
        tl.store(pointer(entry, SCALES, tl.float32, KIND) + place, scale, mask=exists)
    finish(entry, words, numbers, maps, totals, theta, m, v, d, before, scale,
           row, part, exists, offset, column, inside, KIND, BLOCKS)  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def step_rows(table, words, numbers, maps, totals, count, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Step one row: a pass for its absmax and one to store, which finds the row in the cache."""
    index = find_shard(table, count)
    entry, words, numbers = table + index * WIDTH, words + index * NUMBER_WIDTH, numbers + index * SCALAR_WIDTH
    if KIND.skips_idle:
        if row_gradient(entry, KIND, BLOCKS) > 0:
            step_row(entry, words, numbers, maps, totals, KIND, BLOCKS)
    else:
        step_row(entry, words, numbers, maps, totals, KIND, BLOCKS)


@triton.jit
def step_row(entry, words, numbers, maps, totals, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Step this program's row."""
    row = tl.program_id(0) - tl.load(entry + FIRST_PROGRAM).to(tl.int32)
    old = tl.load(pointer(entry, SCALES, tl.float32, KIND) + row)
    if KIND.absmax_is_given:
        absmax = tl.load(pointer(entry, ABSMAX, tl.float32, KIND) + row)
    else:
        absmax = row_absmax(entry, numbers, maps, old, KIND, BLOCKS)
    new = new_scale(absmax, KIND)
    for start in range(0, tl.load(entry + BLOCKS_PER_ROW).to(tl.int32), BLOCKS):
        rows, part, exists, offset, column, inside = locate(entry, start, KIND, BLOCKS)
        grad = load_grad(entry, offset, inside, KIND)
        before = grad
        if KIND.reads_codes:
            before = load_values(entry, rows, offset, column, inside, KIND)
        theta, m, v, d = update(entry, numbers, maps, grad, before, tl.full([BLOCKS], 0.0, tl.float32) + old,
                                rows, part, exists, offset, inside, KIND)  # fmt: skip
        tl.debug_barrier()
        finish(entry, words, numbers, maps, totals, theta, m, v, d, before, tl.full([BLOCKS], 0.0, tl.float32) + new,
               rows, part, exists, offset, column, inside, KIND, BLOCKS)  # fmt: skip
    tl.debug_barrier()
    tl.store(pointer(entry, SCALES, tl.float32, KIND) + row, new)


@triton.jit
def row_gradient(entry, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Largest magnitude of a row's gradient."""
    largest = tl.zeros([BLOCKS, BLOCK], tl.float32)
    for start in range(0, tl.load(entry + BLOCKS_PER_ROW).to(tl.int32), BLOCKS):
        _, _, _, offset, _, inside = locate(entry, start, KIND, BLOCKS)
        largest = tl.maximum(largest, tl.abs(load_grad(entry, offset, inside, KIND)))
    return tl.max(tl.max(largest, 1), 0)


@triton.jit
def row_absmax(entry, numbers, maps, scale, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Largest magnitude of a row's updated weight."""
    largest = tl.zeros([BLOCKS, BLOCK], tl.float32)
    for start in range(0, tl.load(entry + BLOCKS_PER_ROW).to(tl.int32), BLOCKS):
        row, part, exists, offset, column, inside = locate(entry, start, KIND, BLOCKS)
        grad = load_grad(entry, offset, inside, KIND)
        values = grad
        if KIND.compensation != "master":
            values = load_values(entry, row, offset, column, inside, KIND)
        theta, _, _, _ = update(
            entry, numbers, maps, grad, values, tl.full([BLOCKS], 0.0, tl.float32) + scale,
            row, part, exists, offset, inside, KIND,
        )  # fmt: skip
        largest = tl.maximum(largest, tl.abs(theta))
    return tl.max(tl.max(largest, 1), 0)


@triton.jit(do_not_specialize=["count"])
def measure_blocks(table, words, numbers, maps, totals, count, KIND: tl.constexpr, BLOCKS: tl.constexpr):
    """Absmax of the updated weight, into tensors that hold zeros; nothing else changes."""
    index = find_shard(table, count)
    entry, numbers = table + index * WIDTH, numbers + index * SCALAR_WIDTH
    row, part, exists, offset, column, inside = locate(entry, 0, KIND, BLOCKS)
    grad = load_grad(entry, offset, inside, KIND)
    place = scale_place(row, part, entry, KIND)
    scale = tl.load(pointer(entry, SCALES, tl.float32, KIND) + place, mask=exists, other=1.0)
    values = grad
    if KIND.compensation != "master":
        values = load_values(entry, row, offset, column, inside, KIND)
    theta, _, _, _ = update(entry, numbers, maps, grad, values, scale, row, part, exists, offset, inside, KIND)
    absmax = tl.max(tl.abs(theta), 1)
    # Magnitudes order like their bit patterns.
    target = pointer(entry, ABSMAX, tl.int32, KIND)
    if KIND.granularity == "tensor":
        tl.atomic_max(target, bits_of(tl.max(absmax, 0)))
    else:
        tl.atomic_max(target + place, bits_of(absmax), mask=exists)


@triton.jit
def store_scales(table, KIND: tl.constexpr):
    """The scale of a whole tensor, after all its programs have read the old one."""
    entry = table + tl.program_id(0) * WIDTH
    absmax = tl.load(pointer(entry, ABSMAX, tl.float32, KIND))
    tl.store(pointer(entry, SCALES, tl.float32, KIND), new_scale(absmax, KIND))
