"""Encoding tensors as codes with scales, and back.

scale = absmax / max        (fp32, one per group; 1 for an all-zero group)
code  = round(x / scale)    x-hat = code * scale
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eco_dist.numerics.formats import Format
from eco_dist.numerics.groups import Granularity, expand_to_elements, group_absmax, scale_shape
from eco_dist.numerics.rounding import round_to_grid

SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Scales never go below the smallest normal number, so that their reciprocal is finite."""

LARGEST_VALUE = torch.finfo(torch.float32).max * (1 - 2.0**-23)
"""Scales map the largest code to this at most: one fp32 step higher, 127 * scale may round to infinity."""


def codes_shape(shape: Sequence[int], format: Format) -> tuple[int, ...]:
    """Shape of the codes of a tensor of `shape`; INT4 packs two columns into a byte, padding an odd row."""
    if format is Format.INT4:
        return (*shape[:-1], (shape[-1] + 1) // 2)
    return tuple(shape)


def codes_scale_shape(shape: Sequence[int], format: Format, granularity: Granularity | None) -> tuple[int, ...]:
    """Shape of the scales that go with the codes; `[..., 0]` for a format that has none."""
    if not format.is_scaled or granularity is None:
        return (*shape[:-1], 0)
    return scale_shape(shape, granularity)


def decoded_at_once(device: str) -> int:
    """Elements that `decode_into` decodes at a time on a type of device; it takes three fp32 copies of them.

    On a CPU as many as stay in its caches (4096 x 4096 codes to bf16, one thread: 0.28 of the time of all at once);
    elsewhere so many that starting a kernel costs little beside running it.
    """
    return 1 << 18 if device == "cpu" else 1 << 22


def scale_from_absmax(absmax: Tensor, format: Format) -> Tensor:
    """Scale that maps a group's largest magnitude onto the largest code.

    Args:
        absmax: fp32, one per group, finite.
        format: the grid.

    Returns:
        fp32 of the same shape: absmax / max, a normal number with a finite max * scale; 1 where absmax is 0.
    """
    # Divided by a tensor: CUDA turns division by a number into a product with its reciprocal, whose scales creep by an
    # ulp a step where nothing else changes.
    scale = (absmax / torch.full((), format.grid.max, device=absmax.device)).clamp_(
        SMALLEST_SCALE, LARGEST_VALUE / format.grid.max
    )
    return torch.where(absmax == 0, torch.ones_like(scale), scale)


def encode(
    values: Tensor,
    format: Format,
    granularity: Granularity | None = Granularity.BLOCK,
    *,
    halves: Tensor | None = None,
    absmax: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes and scales of a tensor. Values must be finite; `encode_checked` refuses those that are not.

    Args:
        values: fp32 `[..., columns]`.
        format: grid of the codes.
        granularity: extent of a scale group; ignored (may be None) for BF16.
        halves: random integers for stochastic rounding (`random_halves`); None rounds to nearest.
        absmax: largest magnitude of each group where it is not this tensor's own: a group cut by a shard border has
            one scale, which its owners agree on first.

    Returns:
        codes of shape `codes_shape(...)` and fp32 scales of shape `codes_scale_shape(...)`.
    """
    if not format.is_scaled or granularity is None:
        rounded = round_to_grid(values, format, halves)
        return pack(rounded, format), values.new_empty(codes_scale_shape(values.shape, format, None))
    scales = scale_from_absmax(group_absmax(values, granularity) if absmax is None else absmax, format)
    inverse = expand_to_elements(scales.reciprocal(), values.shape[-1], granularity)
    return pack(round_to_grid(values * inverse, format, halves), format), scales


def encode_checked(values: Tensor, format: Format, granularity: Granularity | None) -> tuple[Tensor, Tensor]:
    """`encode` to nearest for values that come from outside.

    Raises:
        TypeError: if the tensor is not fp32, bf16 or fp16.
        ValueError: if a value is NaN or infinite: a cast would turn +inf into the largest code silently.
    """
    if values.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(
            f"expected a float32, bfloat16 or float16 tensor to quantize, got {values.dtype}; convert it with .float()"
        )
    values = values.float()
    bad = int(values.numel() - torch.isfinite(values).sum())
    if bad:
        raise ValueError(
            f"expected finite values to quantize, got {bad} NaN or infinite of {values.numel()}; "
            "repair the weights before converting the model"
        )
    return encode(values, format, granularity)


def decode(codes: Tensor, scales: Tensor, format: Format, granularity: Granularity | None, columns: int) -> Tensor:
    """Values that codes and scales stand for: code * scale, rounded once to fp32.

    Args:
        codes: tensor of `format`'s storage dtype.
        scales: fp32, one per group.
        format: grid of the codes.
        granularity: extent of a scale group.
        columns: elements of a row (INT4 rows may carry one padding code).

    Returns:
        fp32 `[..., columns]`.
    """
    values = unpack(codes, format, columns)
    if not format.is_scaled or granularity is None:
        return values
    return values * expand_to_elements(scales, columns, granularity)


def decode_into(out: Tensor, codes: Tensor, scales: Tensor, format: Format, granularity: Granularity | None) -> None:
    """Write the values that codes and scales stand for, in runs of rows: no transient is as large as a large weight.

    Args:
        out: contiguous `[..., columns]` in any floating dtype.
        codes: tensor of `format`'s storage dtype.
        scales: fp32, one per group.
        format: grid of the codes.
        granularity: extent of a scale group.
    """
    columns = out.shape[-1]
    at_once = decoded_at_once(out.device.type)
    if out.numel() <= at_once:
        out.copy_(decode(codes, scales, format, granularity, columns))
        return
    rows, codes = out.view(-1, columns), codes.flatten(0, -2)
    is_cut = format.is_scaled and granularity not in (None, Granularity.TENSOR)
    scales = scales.flatten(0, -2) if is_cut else scales.reshape(1, -1)
    run = max(1, at_once // columns)
    for first in range(0, rows.shape[0], run):
        mine = slice(first, first + run)
        rows[mine] = decode(codes[mine], scales[mine] if is_cut else scales, format, granularity, columns)


def fake_quantize(values: Tensor, format: Format, granularity: Granularity | None) -> Tensor:
    """Round to nearest and decode again, in the dtype of the input and without gradient support."""
    codes, scales = encode(values.detach().float(), format, granularity)
    return decode(codes, scales, format, granularity, values.shape[-1]).to(values.dtype)


def pack(rounded: Tensor, format: Format) -> Tensor:
    """Codes of representable numbers (fp32, in units of the scale)."""
    grid = format.grid
    if format is Format.INT4:
        nibbles = rounded.to(torch.int8).bitwise_and_(0xF)
        if nibbles.shape[-1] % 2:
            nibbles = torch.nn.functional.pad(nibbles, (0, 1))
        return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).view(torch.uint8)
    if grid.float_dtype is None:
        return rounded.to(grid.storage_dtype)
    return rounded.to(grid.float_dtype).view(grid.storage_dtype)


def unpack(codes: Tensor, format: Format, columns: int) -> Tensor:
    """Representable numbers (fp32, in units of the scale) of codes."""
    grid = format.grid
    if format is Format.INT4:
        signed = codes.view(torch.int8)
        # The left shift brings the low nibble's sign bit on top; arithmetic right shifts extend it.
        pairs = torch.stack((signed << 4 >> 4, signed >> 4), dim=-1)
        return pairs.flatten(-2)[..., :columns].float()
    if grid.float_dtype is None:
        return codes.float()
    return codes.view(grid.float_dtype).float()
