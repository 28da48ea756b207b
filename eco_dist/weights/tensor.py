"""The quantized weight: a tensor subclass that is codes and scales and looks like fp32.

[Note: quantized weight]
* Its *codes* and *scales* are ordinary tensors; nothing weight-sized in high precision exists beside them.
* Its apparent dtype is fp32, so that gradients arrive in fp32 and FSDP2, which wants one dtype per group, takes norms
  and quantized weights together. A float8 leaf would get a float8 gradient.
* It may be a *shard*: rows of a larger tensor cut along dimension 0. `full_rows` remembers that tensor's rows, which
  FSDP2 does not tell a shard but which padding needs.
* An operation it does not know raises. Dequantizing silently would send different bytes on different ranks or update
  weights outside the step, both seen in practice.

What it can do is listed in `operations.py` (storage), `compute.py` (forward and backward) and `fsdp_hooks.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from eco_dist.numerics import Granularity, codes_scale_shape, codes_shape, decode_into, encode_checked
from eco_dist.recipe import Recipe
from eco_dist.weights.fsdp_hooks import FSDPHooks

_F = TypeVar("_F", bound=Callable[..., Any])


def _untraced(function: _F) -> _F:
    """Keep torch.compile out of a constructor of a wrapper subclass."""
    return cast(_F, torch._dynamo.disable(function))


class QuantizedWeight(FSDPHooks, Tensor):
    """Weight stored as codes with scales.

    Attributes:
        codes: storage dtype of the format, `[..., columns]` (INT4: two columns per byte).
        scales: fp32, one per scale group.
        recipe: how it is stored and stepped.
        full_rows: dimension 0 of the tensor this is a shard of; its own for a whole tensor.
        tensor_id: 28-bit number naming its stream of random bits, derived from the parameter's name.
    """

    codes: Tensor
    scales: Tensor
    recipe: Recipe
    full_rows: int
    tensor_id: int

    @staticmethod
    @_untraced
    def __new__(
        cls: type[QuantizedWeight],
        codes: Tensor,
        scales: Tensor,
        recipe: Recipe,
        columns: int,
        full_rows: int,
        tensor_id: int,
    ) -> QuantizedWeight:
        """Wrap codes and scales; `columns` is the logical width."""
        shape = (*codes.shape[:-1], columns)
        strides = [math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape))]
        wrapper: QuantizedWeight = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=torch.float32, device=codes.device, requires_grad=False
        )
        return wrapper

    @_untraced
    def __init__(
        self, codes: Tensor, scales: Tensor, recipe: Recipe, columns: int, full_rows: int, tensor_id: int
    ) -> None:
        """See `__new__`; most callers want `from_values`."""
        self.codes = codes
        self.scales = scales
        self.recipe = recipe
        self.full_rows = full_rows
        self.tensor_id = tensor_id

    @classmethod
    def from_values(cls, values: Tensor, recipe: Recipe, tensor_id: int = 0) -> QuantizedWeight:
        """Quantize a whole tensor to nearest.

        Args:
            values: finite fp32, bf16 or fp16 tensor with at least two dimensions; a meta tensor gives meta codes.
            recipe: a recipe with a format.
            tensor_id: name of its stream of random bits.

        Raises:
            TypeError: for another dtype.
            ValueError: for fewer than two dimensions, values that are not finite, or a recipe without a format.
        """
        if recipe.format is None:
            raise ValueError(f"expected a recipe with a format, got '{recipe.name}', which keeps fp32 weights")
        if values.ndim < 2:
            raise ValueError(
                f"expected a weight with at least 2 dimensions, got shape {tuple(values.shape)}; "
                "keep vectors (norms, biases) in high precision"
            )
        if values.is_meta:
            codes, scales = _empty_storage(values.shape, recipe, values.device)
        else:
            codes, scales = encode_checked(values.detach(), recipe.format, recipe.granularity)
        return cls(codes, scales, recipe, values.shape[-1], values.shape[0], tensor_id)

    def like(self, codes: Tensor, scales: Tensor) -> QuantizedWeight:
        """The same kind of weight around other codes and scales."""
        return QuantizedWeight(codes, scales, self.recipe, self.shape[-1], self.full_rows, self.tensor_id)

    def empty(self, shape: Sequence[int], device: torch.device) -> QuantizedWeight:
        """The same kind of weight, uninitialized, with other leading dimensions."""
        return self.like(*_empty_storage(shape, self.recipe, device))

    @property
    def is_shard(self) -> bool:
        """Whether rows of the whole tensor are missing here."""
        return self.shape[0] != self.full_rows

    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Stored weight in a floating dtype, detached."""
        assert self.recipe.format is not None
        values = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        decode_into(values, self.codes, self.scales, self.recipe.format, self.recipe.granularity)
        return values

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Stored weight as an ordinary tensor; gradients flow back to this weight in fp32."""
        from eco_dist.weights.compute import Dequantize

        return cast(Tensor, Dequantize.apply(self, dtype))

    def assign_(self, values: Tensor) -> None:
        """Replace the stored weight by values rounded to nearest.

        Raises:
            ValueError: if this is a shard with one scale for the whole tensor: its ranks would choose different ones.
        """
        if self.recipe.granularity is Granularity.TENSOR and self.is_shard:
            raise ValueError(
                "expected quantized values for a shard with granularity 'tensor', got high-precision ones, of which "
                "each rank sees only its rows and would choose its own scale; load before fully_shard"
            )
        if values.is_meta or self.codes.is_meta:
            return
        assert self.recipe.format is not None
        codes, scales = encode_checked(values.detach(), self.recipe.format, self.recipe.granularity)
        self.codes.copy_(codes)
        self.scales.copy_(scales)

    # --- tensor protocol -------------------------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """Inner tensors and the rest, for torch.compile, torch.save and DTensor."""
        return ["codes", "scales"], (self.recipe, self.shape[-1], self.full_rows, self.tensor_id)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], outer_size: Any = None, outer_stride: Any = None
    ) -> QuantizedWeight:
        """Inverse of `__tensor_flatten__`."""
        return QuantizedWeight(inner["codes"], inner["scales"], *context)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, recipe and device; never the values."""
        rows = f", shard of {self.full_rows} rows" if self.is_shard else ""
        return f"QuantizedWeight(shape={tuple(self.shape)}, recipe={self.recipe.name}{rows}, device={self.device})"

    def data_ptr(self) -> int:
        """Address of the codes: a wrapper's own is 0, and tools that map parameters by it would mix them up."""
        return self.codes.data_ptr()

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle codes, scales and plain values, so that `torch.load(weights_only=True)` can read them."""
        recipe = self.recipe.to_dict()
        is_parameter = isinstance(self, torch.nn.Parameter)
        arguments = (self.codes, self.scales, recipe, self.shape[-1], self.full_rows, self.tensor_id, is_parameter)
        return _rebuild, (*arguments, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedWeight:
        """A copy with its own storage; a parameter stays a parameter."""
        copy = self.like(self.codes.clone(), self.scales.clone())
        result: Tensor = torch.nn.Parameter(copy, self.requires_grad) if isinstance(self, torch.nn.Parameter) else copy
        memo[id(self)] = result
        return cast(QuantizedWeight, result)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Forward operations dequantize explicitly (`compute.py`); everything else goes to dispatch."""
        from eco_dist.weights.compute import COMPUTE_FUNCTIONS

        handler = COMPUTE_FUNCTIONS.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any, kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Storage operations (`operations.py`); an unknown one raises."""
        from eco_dist.weights.operations import dispatch

        return dispatch(func, args, kwargs or {})


def _empty_storage(shape: Sequence[int], recipe: Recipe, device: torch.device) -> tuple[Tensor, Tensor]:
    assert recipe.format is not None
    codes = torch.empty(codes_shape(shape, recipe.format), dtype=recipe.format.grid.storage_dtype, device=device)
    scales = torch.empty(codes_scale_shape(shape, recipe.format, recipe.granularity), device=device)
    return codes, scales


def _rebuild(
    codes: Tensor,
    scales: Tensor,
    recipe: dict[str, Any],
    columns: int,
    full_rows: int,
    tensor_id: int,
    is_parameter: bool,
    requires_grad: bool,
) -> Tensor:
    weight = QuantizedWeight(codes, scales, Recipe(**recipe), columns, full_rows, tensor_id)
    return torch.nn.Parameter(weight, requires_grad) if is_parameter else weight


torch.serialization.add_safe_globals([_rebuild])
