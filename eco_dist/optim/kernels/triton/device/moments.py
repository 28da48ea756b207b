"""Moments in storage and back, as `eco_dist.numerics.moments` does it."""

import triton
import triton.language as tl

from eco_dist.optim.kernels.triton.device.fields import (
    EXP_AVG,
    EXP_AVG_SCALE,
    EXP_AVG_SQ,
    EXP_AVG_SQ_SCALE,
    pointer,
)
from eco_dist.optim.kernels.triton.device.grids import (
    BLOCK,
    NOISE,
    SMALLEST,
    code_of,
    float_of,
    nearest_bf16,
    reciprocal,
    round_to_grid,
    scale_of,
    stochastic_bf16,
    value_of,
)

CODES: tl.constexpr = tl.constexpr(256)


@triton.jit
def load_moment(entry, maps, offset, inside, block, exists, KIND: tl.constexpr, SECOND: tl.constexpr):
    """fp32 values of a moment, 0 outside the tensor.

    `block` numbers the blocks of the shard; `maps` holds, for the first and the second moment, the 256 values of the
    dynamic map and the 255 middles between them.
    """
    STORED: tl.constexpr = EXP_AVG_SQ if SECOND else EXP_AVG
    SCALE: tl.constexpr = EXP_AVG_SQ_SCALE if SECOND else EXP_AVG_SCALE
    GRID: tl.constexpr = KIND.moment_grid
    if KIND.moments == "fp32":
        return tl.load(pointer(entry, STORED, tl.float32, KIND) + offset, mask=inside, other=0.0)
    elif KIND.moments == "bf16":
        code = tl.load(pointer(entry, STORED, tl.int16, KIND) + offset, mask=inside, other=0)
        return float_of(code.to(tl.int32) << 16)
    else:
        scale = tl.load(pointer(entry, SCALE, tl.float32, KIND) + block, mask=exists, other=1.0)
        code = tl.load(pointer(entry, STORED, tl.int8, KIND) + offset, mask=inside, other=0).to(tl.int32)
        if KIND.moments == "fp8":
            value = value_of(code, GRID) * scale[:, None]
        else:
            value = tl.load(maps + SECOND * 2 * CODES + (code & 0xFF), mask=inside, other=0.0) * scale[:, None]
        return value * value if SECOND else value


@triton.jit
def store_moment(value, halves, entry, maps, offset, inside, block, exists, KIND: tl.constexpr, SECOND: tl.constexpr):
    """The reverse. The value is 0 outside the tensor, so that it does not reach a scale."""
    STORED: tl.constexpr = EXP_AVG_SQ if SECOND else EXP_AVG
    SCALE: tl.constexpr = EXP_AVG_SQ_SCALE if SECOND else EXP_AVG_SCALE
    GRID: tl.constexpr = KIND.moment_grid
    if KIND.moments == "fp32":
        tl.store(pointer(entry, STORED, tl.float32, KIND) + offset, value, mask=inside)
    elif KIND.moments == "bf16":
        if KIND.stochastic_moments:
            largest: tl.constexpr = 3.3895313892515355e38  # of BF16
            rounded = float_of(stochastic_bf16(value, halves))
            bits = nearest_bf16(tl.minimum(tl.maximum(rounded, -largest), largest))
        else:
            bits = nearest_bf16(value)
        tl.store(pointer(entry, STORED, tl.int16, KIND) + offset, (bits >> 16).to(tl.int16), mask=inside)
    else:
        if SECOND:
            value = tl.sqrt_rn(value)
        absmax = tl.max(tl.abs(value), 1)
        if KIND.moments == "fp8":
            scale = scale_of(absmax, GRID)
            unit = value * reciprocal(scale)[:, None]
            code = code_of(round_to_grid(unit, halves, GRID, KIND.stochastic_moments), GRID)
        else:
            scale = tl.where(absmax == 0, 1.0, tl.maximum(absmax, SMALLEST))
            unit = value * reciprocal(scale)[:, None]
            code = dynamic_code(unit, halves, maps + SECOND * 2 * CODES, KIND)
        if SECOND:
            code = code & 0x7F if KIND.moments == "fp8" else code
            code = tl.where(value > 0, tl.maximum(code, 1), code)
        tl.store(pointer(entry, STORED, tl.int8, KIND) + offset, code.to(tl.int8), mask=inside)
        tl.store(pointer(entry, SCALE, tl.float32, KIND) + block, scale, mask=exists)


@triton.jit
def dynamic_code(unit, halves, values, KIND: tl.constexpr):
    """Code of the dynamic map for each value in [-1, 1], by bisection."""
    if KIND.stochastic_moments:
        below = tl.minimum(count_below(unit, values + 1, True), CODES - 2)
        low, high = tl.load(values + below), tl.load(values + below + 1)
        share = tl.div_rn(unit - low, high - low)
        return below + (share > (2 * halves + 65537).to(tl.float32) * NOISE).to(tl.int32)
    else:
        return count_below(unit, values + CODES, False)


@triton.jit
def count_below(x, ascending, OR_EQUAL: tl.constexpr):
    """How many of 255 ascending numbers lie below each value."""
    count = tl.zeros([x.shape[0], BLOCK], tl.int32)
    for bit in tl.static_range(8):
        stride: tl.constexpr = 128 >> bit
        number = tl.load(ascending + (count + (stride - 1)))
        passes = number <= x if OR_EQUAL else number < x
        count += passes.to(tl.int32) * stride
    return count
