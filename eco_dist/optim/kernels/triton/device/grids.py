"""Random bits, rounding, codes and scales, as `eco_dist.numerics` does them; all on tiles `[blocks, 128]`."""

import triton
import triton.language as tl

from eco_dist.numerics.codec import LARGEST_VALUE, SMALLEST_SCALE
from eco_dist.numerics.groups import BLOCK_SIZE
from eco_dist.numerics.philox import LANES, ROUNDS
from eco_dist.numerics.rounding import NOISE_UNIT

BLOCK: tl.constexpr = tl.constexpr(BLOCK_SIZE)
CALLS: tl.constexpr = tl.constexpr(LANES)
PHILOX_ROUNDS: tl.constexpr = tl.constexpr(ROUNDS)
NOISE: tl.constexpr = tl.constexpr(NOISE_UNIT)
SMALLEST: tl.constexpr = tl.constexpr(SMALLEST_SCALE)
LARGEST: tl.constexpr = tl.constexpr(LARGEST_VALUE)
SIGN: tl.constexpr = tl.constexpr(-(2**31))
EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def bits_of(x):
    """Bit pattern of fp32 values."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """fp32 values of a bit pattern."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def random_halves(seed, stream, step, block, BLOCKS: tl.constexpr):
    """Signed 16-bit random integers of the blocks numbered `block`, int32 `[blocks, 128]`."""
    call = block[:, None] * CALLS + tl.arange(0, CALLS)[None, :]
    low, high = call.to(tl.uint32), (call >> 32).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, low, high, low * 0 + stream, low * 0 + step, PHILOX_ROUNDS)
    # [blocks, 16, 2, 2, 2]: word 2 i + j, high or low half, at [..., i, j, h].
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(words >> 16, words & 0xFFFF).to(tl.int16)
    return tl.reshape(tl.permute(halves, (0, 2, 3, 4, 1)), [BLOCKS, BLOCK]).to(tl.int32)


@triton.jit
def nearest_bf16(x):
    """Bit pattern of fp32 values rounded to nearest BF16, ties to even; the lower 16 bits are zero."""
    bits = bits_of(x)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536


@triton.jit
def stochastic_bf16(x, halves):
    """Bit pattern of fp32 values rounded to BF16 by 16 random bits."""
    return (bits_of(x) + (halves + 32768)) & -65536


@triton.jit
def binade(x, GRID: tl.constexpr):
    """Exponent bits of each value, not below the smallest normal number of a floating grid; those of 1 for integers."""
    if GRID.mantissa_bits == 0:
        return tl.full(x.shape, 127 << 23, tl.int32)
    else:
        return tl.maximum(bits_of(x) & EXPONENT, (127 + GRID.min_exponent) << 23)


@triton.jit
def grid_step(x, GRID: tl.constexpr):
    """Distance between neighbours on the grid."""
    if GRID.bits == 16:
        return float_of(binade(x, GRID)) * (2.0**-GRID.mantissa_bits)
    else:
        return float_of(binade(x, GRID) - (GRID.mantissa_bits << 23))


@triton.jit
def round_to_grid(y, halves, GRID: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Representable numbers, fp32; a zero has the sign of what was rounded."""
    if GRID.bits == 16:
        rounded = float_of(stochastic_bf16(y, halves) if STOCHASTIC else nearest_bf16(y))
        return tl.minimum(tl.maximum(rounded, -GRID.max), GRID.max)
    else:
        # No clamp: the scale maps the largest magnitude onto the largest code within a few ulps, and the noise stays
        # below half a grid step by more than that, so nothing rounds beyond it.
        exponent = binade(y, GRID)
        if STOCHASTIC:
            y = y + (2 * halves + 1).to(tl.float32) * float_of(exponent - ((GRID.mantissa_bits + 17) << 23))
        # Adding 1.5 * 2^(E + 23 - mantissa) leaves no bits below the grid step: rounds to nearest, ties to even.
        big = float_of(exponent + (((23 - GRID.mantissa_bits) << 23) + 0x400000))
        return float_of(bits_of((tl.abs(y) + big) - big) | (bits_of(y) & SIGN))


@triton.jit
def code_of(rounded, GRID: tl.constexpr):
    """Code of each representable number, int32."""
    if GRID.mantissa_bits == 0:
        return rounded.to(tl.int32)
    elif GRID.bits == 16:
        return bits_of(rounded) >> 16
    else:
        # The reverse of `value_of`.
        bits = bits_of(rounded * (2.0 ** -(126 + GRID.min_exponent)))
        return ((bits >> (23 - GRID.mantissa_bits)) & 0x7F) | ((bits >> 24) & 0x80)


@triton.jit
def value_of(code, GRID: tl.constexpr):
    """Representable number of each code; codes are int32, sign-extended."""
    if GRID.mantissa_bits == 0:
        return code.to(tl.float32)
    elif GRID.bits == 16:
        return float_of(code << 16)
    else:
        # Exponent and mantissa where fp32 has its own are the number divided by a power of two, subnormals included.
        bits = (code << (23 - GRID.mantissa_bits)) & (SIGN | (0x7F << (23 - GRID.mantissa_bits)))
        return float_of(bits) * (2.0 ** (126 + GRID.min_exponent))


@triton.jit
def scale_of(absmax, GRID: tl.constexpr):
    """Scale that maps a group's largest magnitude onto the largest code; 1 for a group of zeros."""
    scale = tl.div_rn(absmax, tl.full(absmax.shape, GRID.max, tl.float32))
    scale = tl.minimum(tl.maximum(scale, SMALLEST), LARGEST / GRID.max)
    return tl.where(absmax == 0, 1.0, scale)


@triton.jit
def reciprocal(x):
    """1 / x, correctly rounded."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)
