"""What DeepSpeed's ZeRO optimizers hold between steps, ours and its own: every tensor, by parameter and purpose.

The memory report asks for it through `eco_dist.memory.HoldsMemory` and knows no DeepSpeed. Purposes are words of
`eco_dist.memory.Category`, or keys of optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from eco_dist.engines.flat.shards import WeightShard

Described = tuple[str, str, Tensor]
"""Name of a parameter or buffer, what its bytes are for, and a view of them; no two views overlap."""
Piece = tuple[str, int, int]
"""Name of a parameter, and first element and number of the elements of it that a flat partition has."""

_WORKING = "working copy"
_MASTER = "master weights"
_FRAMEWORK = "framework buffers"


class ZeroMemory:
    """The tensors of a DeepSpeed optimizer at stage 0 to 3, ours or not."""

    def __init__(self, zero: Any, module: nn.Module) -> None:
        """Look at the optimizer of an engine that `deepspeed.initialize` returned, and at its module."""
        self._zero = zero
        self._named: dict[str, Any] = dict(module.named_parameters())
        self._names = {id(parameter): name for name, parameter in self._named.items()}

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """State of the optimizer that ZeRO drives."""
        state: Mapping[Tensor, dict[str, Any]] = self._zero.optimizer.state
        return state

    def quantized_weights(self) -> Iterable[tuple[str, int, int]]:
        """Name, elements on this rank and elements in all of every weight that is codes."""
        return [(shard.plan.name, shard.weight.numel(), shard.plan.elements) for shard in self._shards()]

    def memory_tensors(self) -> Iterator[Described]:
        """Every tensor held for parameters and between ranks."""
        for shard in self._shards():
            yield shard.plan.name, "codes", shard.weight.codes
            yield shard.plan.name, "scales", shard.weight.scales
            yield from ((shard.plan.name, key, value) for key, value in self.state[shard.weight].items())
        yield from ((name, _WORKING, parameter.data) for name, parameter in self._named.items())
        if hasattr(self._zero, "fp32_partitioned_groups_flat"):
            yield from self._of_stage3()
        elif hasattr(self._zero, "single_partition_of_fp32_groups"):
            yield from self._of_stage12()
        elif hasattr(self._zero, "plain_flats"):  # stage 0, ours
            for flat, pieces in self._zero.plain_flats():
                yield from self._of_flat("all", flat, [(self._names[id(p)], first, n) for p, first, n in pieces])
        else:  # stage 0, DeepSpeed's FP16 optimizers: a master for each parameter
            for group in self._zero.optimizer.param_groups:
                for master in group["params"]:
                    yield from self._of_flat("all", master, [("all", 0, master.numel())])

    def _shards(self) -> list[WeightShard]:
        partitions = getattr(self._zero, "partitions", None)
        if partitions is not None:
            return [partition.shard for partition in partitions.values()]
        return list(getattr(self._zero, "shards", {}).values())

    def _of_stage12(self) -> Iterator[Described]:
        zero = self._zero
        for index, master in enumerate(zero.single_partition_of_fp32_groups):
            name = f"parameter group {index}"
            if _is_placeholder(master):
                yield name, _FRAMEWORK, master
                yield name, _FRAMEWORK, zero.bit16_groups_flat[index]
            else:
                yield from self._of_flat(name, master, list(self._pieces12(index)))
        for replicas in getattr(getattr(zero, "working_copy", None), "replicas", ()):
            yield from (("codes of other ranks", _WORKING, run) for run in replicas.others())

    def _pieces12(self, index: int) -> Iterator[Piece]:
        zero = self._zero
        length = int(zero.partition_size[index])
        start = length * dist.get_rank(group=zero.real_dp_process_group[index])
        order = zip(zero.round_robin_bit16_groups[index], zero.round_robin_bit16_offsets[index], strict=True)
        for parameter, offset in order:
            first, end = max(offset - start, 0), min(offset + parameter.numel() - start, length)
            if first < end:
                yield self._names[id(parameter)], first, end - first

    def _of_stage3(self) -> Iterator[Described]:
        zero = self._zero
        for index, (master, group) in enumerate(zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True)):
            name = f"sub-group {index}"
            if _is_placeholder(master):
                yield name, _FRAMEWORK, master
                yield name, _FRAMEWORK, zero.fp16_partitioned_groups_flat[index]
                continue
            pieces, offset = [], 0
            for parameter in group:
                pieces.append((self._names[id(parameter)], offset, _elements_here(parameter)))
                offset += parameter.partition_numel()
            yield from self._of_flat(name, master, pieces)
        ours = getattr(zero, "partitions", {})
        for name, parameter in self._named.items():
            if id(parameter) not in ours and not _share_memory(parameter, parameter.ds_tensor):
                yield name, _WORKING, parameter.ds_tensor.view(-1)[: _elements_here(parameter)]
        yield "gradient partitions", _FRAMEWORK, zero.grad_partitions_flat_buffer
        yield "overflow flag", _FRAMEWORK, zero.inf_or_nan_tracker
        buckets = (bucket.buffer for bucket in zero.ipg_buckets.values())
        yield from (("reduce bucket", _FRAMEWORK, buffer) for buffer in buckets if buffer is not None)

    def _of_flat(self, group: str, master: Tensor, pieces: list[Piece]) -> Iterator[Described]:
        """A flat partition and its moments, piece by piece; what no piece covers is padding."""
        kinds = {_MASTER: master.detach(), **self.state.get(master, {})}
        for kind, tensor in kinds.items():
            if tensor.numel() == master.numel() and tensor.ndim:
                yield from ((name, kind, tensor.view(-1)[first : first + count]) for name, first, count in pieces)
            else:
                yield group, kind, tensor


def _is_placeholder(tensor: Tensor) -> bool:
    """Whether a tensor has a length and no memory."""
    return tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


def _share_memory(parameter: Tensor, partition: Tensor) -> bool:
    """Whether a parameter that stays whole is a view of its partition, as on one rank."""
    return bool(parameter.numel()) and parameter.untyped_storage().data_ptr() == partition.untyped_storage().data_ptr()


def _elements_here(parameter: Any) -> int:
    """Elements of a stage 3 parameter in this rank's partition, padding left out."""
    length = int(parameter.partition_numel())
    return max(0, min(int(parameter.ds_numel) - int(parameter.ds_zero_partition_rank) * length, length))
