"""Storage operations of a quantized weight: what modules, FSDP2, DTensor and checkpoints do to a parameter.

The list was found by running them with a counter. Anything else raises, with the reason a user can act on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from eco_dist.numerics import Granularity
from eco_dist.weights.tensor import QuantizedWeight

aten = torch.ops.aten
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_HANDLERS: dict[Any, Handler] = {}


def _implements(*operations: Any) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for operation in operations:
            _HANDLERS[operation] = handler
        return handler

    return register


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that is known, or raise.

    Raises:
        NotImplementedError: for every other operation.
    """
    handler = _HANDLERS.get(func)
    if handler is None and func.namespace in ("c10d_functional", "_c10d_functional"):
        handler = _functional_collective
    if handler is not None:
        return handler(func, args, kwargs)
    if func._schema.is_mutable:
        raise NotImplementedError(
            f"{func} on a quantized weight would lose the rounding error: step quantized weights with "
            "eco_dist.ECOAdamW or eco_dist.ECOSGD instead of a stock optimizer, or replace values with copy_()"
        )
    raise NotImplementedError(
        f"{func} is not defined on a quantized weight, and dequantizing silently is not done; "
        "call weight.dequantize() first if its values are wanted"
    )


def _rows_only(func: Any, dim: int) -> None:
    if dim != 0:
        raise NotImplementedError(f"a quantized weight can only be cut along dimension 0, got {func} along {dim}")


def _per_row(weight: QuantizedWeight, cut: Callable[[Tensor], Any]) -> tuple[Any, Any]:
    """Apply a cut along dimension 0 to codes and scales; scales that belong to all rows stay whole."""
    if weight.recipe.granularity is Granularity.TENSOR:
        return cut(weight.codes), None
    return cut(weight.codes), cut(weight.scales)


@_implements(aten.detach.default, aten.alias.default)
def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    return return_and_correct_aliasing(func, args, kwargs, weight.like(func(weight.codes), func(weight.scales)))


@_implements(aten.view.default, aten._unsafe_view.default, aten.as_strided.default)
def _handle(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # FSDP2 flattens the padded shard and re-strides the unsharded parameter, only to keep a handle on the storage.
    # Rows with scales cannot be flattened, so the handle keeps its shape.
    weight, size = args[0], list(args[1])
    if size not in ([-1], [weight.numel()], list(weight.shape)):
        raise NotImplementedError(f"a quantized weight of shape {tuple(weight.shape)} cannot be viewed as {size}")
    alias = weight.like(aten.alias(weight.codes), aten.alias(weight.scales))
    return return_and_correct_aliasing(func, args, kwargs, alias)


@_implements(aten.clone.default, aten._pin_memory.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    return weight.like(func(weight.codes, *args[1:], **kwargs), func(weight.scales, *args[1:], **kwargs))


@_implements(aten._to_copy.default)
def _to_device(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    dtype = kwargs.pop("dtype", None)
    if dtype not in (None, weight.dtype):
        raise NotImplementedError(
            f"a quantized weight has no {dtype} form: casting a converted model would replace its codes; "
            "cast before quantize_weights_, or use weight.dequantize(dtype)"
        )
    return weight.like(func(weight.codes, **kwargs), func(weight.scales, **kwargs))


@_implements(aten.empty_like.default)
def _empty_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].empty(args[0].shape, torch.device(kwargs.get("device") or args[0].device))


@_implements(aten.new_empty.default)
def _new_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight, size = args[0], list(args[1])
    device = torch.device(kwargs.get("device") or weight.device)
    if size == [0]:  # FSDP2's stand-in for a rank without rows; only its emptiness is read
        return torch.empty(0, device=device)
    if not size:  # how torch.distributed.checkpoint begins to stage a tensor by its one storage
        raise NotImplementedError(
            "expected codes and scales by themselves for an asynchronous save, got a quantized weight, which has two "
            "storages; use dcp.async_save(eco_dist.checkpoint.dcp_state(model, optimizer), ...)"
        )
    _same_row_shape(func, weight, size)
    return weight.empty(size, device)  # asynchronous checkpoints stage into this


@_implements(aten.new_zeros.default)
def _new_zeros(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight, size = args[0], list(args[1])
    _same_row_shape(func, weight, size)
    fresh = weight.empty(size, torch.device(kwargs.get("device") or weight.device))
    fresh.codes.zero_()
    if weight.recipe.granularity is Granularity.TENSOR:
        fresh.scales.copy_(weight.scales)  # a padded shard of a tensor with one scale
    else:
        fresh.scales.fill_(1)
    return fresh


def _same_row_shape(func: Any, weight: QuantizedWeight, size: list[int]) -> None:
    if size[1:] != list(weight.shape[1:]):
        raise NotImplementedError(f"{func} of a quantized weight keeps rows of {tuple(weight.shape[1:])}, got {size}")


@_implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    _rows_only(func, args[2] if len(args) > 2 else kwargs.get("dim", 0))
    codes, scales = _per_row(weight, lambda tensor: func(tensor, args[1]))
    return [weight.like(part, weight.scales if scales is None else scales[i]) for i, part in enumerate(codes)]


@_implements(aten.slice.Tensor)
def _slice(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    dim = args[1] if len(args) > 1 else 0
    start, end = (*args[2:4], None, None)[:2]
    if dim != 0 and not start and (end is None or end >= weight.shape[dim]):
        return _same(aten.alias.default, (weight,), {})
    _rows_only(func, dim)
    codes, scales = _per_row(weight, lambda tensor: func(tensor, *args[1:]))
    part = weight.like(codes, aten.alias(weight.scales) if scales is None else scales)
    return return_and_correct_aliasing(func, args, kwargs, part)


@_implements(aten.constant_pad_nd.default)
def _pad_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # DTensor.full_tensor() pads short shards at the end of dimension 0.
    weight, padding = args[0], list(args[1])
    if any(padding[:-1]):
        raise NotImplementedError(f"a quantized weight can only be padded after its last row, got {padding}")

    def longer(tensor: Tensor) -> Tensor:
        return torch.cat((tensor, tensor.new_zeros((padding[-1], *tensor.shape[1:]))))

    codes, scales = _per_row(weight, longer)
    return weight.like(codes, weight.scales if scales is None else scales)


@_implements(aten.copy_.default)
def _assign(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, QuantizedWeight):
        return target.copy_(source.decode())
    if not isinstance(source, QuantizedWeight):
        target.assign_(source.expand_as(target) if source.shape != target.shape else source)
    elif source.recipe.format is target.recipe.format and source.scales.shape == target.scales.shape:
        target.codes.copy_(source.codes)
        target.scales.copy_(source.scales)
    else:
        target.assign_(source.decode())
    return target


@_implements(aten.normal_.default, aten.uniform_.default, aten.zero_.default, aten.fill_.Scalar)
def _initialize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    weight = args[0]
    if not weight.codes.is_meta:
        values = torch.empty(weight.shape, device=weight.device)
        weight.assign_(func(values, *args[1:], **kwargs))
    return weight


@_implements(aten.zeros_like.default, aten.ones_like.default, aten.rand_like.default, aten.randn_like.default)
def _plain_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)


@_implements(aten.lt.Scalar, aten.gt.Scalar, aten.where.self)
def _by_value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # nn.init.trunc_normal_ draws again where a value is out of bounds; the results are ordinary tensors.
    return func(*(arg.decode() if isinstance(arg, QuantizedWeight) else arg for arg in args), **kwargs)


@_implements(aten.is_pinned.default)
def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].codes.is_pinned()


@_implements(aten.equal.default)
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args
    if not (isinstance(left, QuantizedWeight) and isinstance(right, QuantizedWeight)):
        raise NotImplementedError("a quantized weight compares with another one; call dequantize() for its values")
    return torch.equal(left.codes, right.codes) and torch.equal(left.scales, right.scales)


def _functional_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # DTensor.full_tensor(): gather codes and scales one by one along dimension 0.
    weight = args[0]
    codes, scales = _per_row(weight, lambda tensor: func(tensor, *args[1:], **kwargs))
    return weight.like(codes, weight.scales if scales is None else scales)
