"""Bytes that this rank sends in collectives, counted where they are issued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class WireMeter(TorchDispatchMode):
    """Context manager that counts the bytes this rank sends, by kind of collective.

    Sent bytes are those of the ring algorithms: (W - 1) times the input of an all-gather, (W - 1) / W of the input of a
    reduce-scatter, twice that of an all-reduce, for W ranks.

    Attributes:
        bytes: kind -> bytes sent: `all_gather`, `reduce_scatter`, `all_reduce`, or torch's own name for others.
    """

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation; count it if it is a collective."""
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional") and "wait" not in func.__name__:
            name = func.__name__.split(".")[0].strip("_")
            kind, sent = _sent(name, args, kwargs or {})
            self.bytes[kind] += sent
        return result


def _sent(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, int]:
    flat = name.replace("_", "")
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    world = _group_size(args, kwargs)
    if flat.startswith("allgather"):
        return "all_gather", (world - 1) * min(sizes, default=0)
    if flat.startswith("reducescatter"):
        return "reduce_scatter", max(sizes, default=0) * (world - 1) // world
    if flat.startswith("allreduce"):
        return "all_reduce", 2 * sum(sizes) * (world - 1) // world
    return name, sum(sizes)


def _group_size(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    unbox: Callable[[Any], dist.ProcessGroup] = dist.ProcessGroup.unbox
    for leaf in (*args, *kwargs.values()):
        if type(leaf).__name__ == "ScriptObject":
            try:
                return unbox(leaf).size()
            except RuntimeError:  # a ReduceOp is boxed as well
                continue
        if isinstance(leaf, str):
            try:
                resolve = vars(dist.distributed_c10d)["_resolve_process_group"]
                return int(resolve(leaf).size())
            except (RuntimeError, ValueError):
                continue
    return dist.get_world_size()
