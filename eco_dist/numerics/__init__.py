"""Formats, scale groups, rounding, codes and moments: plain torch, no distributed."""

from eco_dist.numerics.codec import (
    codes_scale_shape,
    codes_shape,
    decode,
    decode_into,
    decoded_at_once,
    encode,
    encode_checked,
    fake_quantize,
    scale_from_absmax,
)
from eco_dist.numerics.formats import Format, grid_step
from eco_dist.numerics.groups import BLOCK_SIZE, Granularity, blocks_per_row, group_absmax, scale_shape
from eco_dist.numerics.moments import MomentFormat, decode_moment, encode_moment
from eco_dist.numerics.philox import Stream, random_halves
from eco_dist.numerics.rounding import Rounding, round_to_grid, square_root

__all__ = [
    "BLOCK_SIZE",
    "Format",
    "Granularity",
    "MomentFormat",
    "Rounding",
    "Stream",
    "blocks_per_row",
    "codes_scale_shape",
    "codes_shape",
    "decode",
    "decode_into",
    "decode_moment",
    "decoded_at_once",
    "encode",
    "encode_checked",
    "encode_moment",
    "fake_quantize",
    "grid_step",
    "group_absmax",
    "random_halves",
    "round_to_grid",
    "scale_from_absmax",
    "scale_shape",
    "square_root",
]
