"""Stage 3: a parameter's partition is codes, and gathering it decodes them.

DeepSpeed puts functions on every parameter that gather and partition a list of parameters. We put ours in their place:
they serve the quantized ones and hand the others on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import (
    MultipleAllGatherHandles,
    PartitionedParamStatus,
    ZeroParamStatus,
    free_param,
)
from torch import Tensor

from eco_dist.engines.deepspeed.wire import Section, WireLayout, all_gather_runs
from eco_dist.engines.flat.shards import PlannedWeight, WeightShard
from eco_dist.engines.flat.units import runs_of_flat


class Partition:
    """A parameter under ZeRO 3: every rank holds equally many units, the last ones partly padding.

    Attributes:
        shard: the units that are no padding.
        section: what a rank sends of it.
        codes: codes, padding included.
        scales: their scales.
    """

    def __init__(self, planned: PlannedWeight, group: dist.ProcessGroup, device: torch.device) -> None:
        """Allocate, uninitialized but for the padding."""
        units = planned.units
        total = units.count(planned.elements)
        count = -(-total // group.size())
        self.section = Section(units=units, count=count, scale_rows=1 if units.has_one_scale else count)
        self.codes = torch.zeros(self.section.codes_shape, dtype=units.codes_dtype, device=device)
        self.scales = torch.ones(self.section.scales_shape, device=device)
        self.runs = tuple(runs_of_flat(0, total, count, group.size()))
        self.group = group
        mine = self.runs[group.rank()]
        scales = self.scales if units.has_one_scale else self.scales[: mine.units]
        self.shard = WeightShard(planned, mine, self.codes[: mine.units], scales, group)

    @property
    def elements(self) -> int:
        """Elements of every rank's partition."""
        return self.section.count * self.section.units.columns

    def attach(self, parameter: Any) -> None:
        """Make this the partition of a DeepSpeed parameter."""
        old = parameter.ds_tensor
        parameter.ds_tensor = self.codes.view(torch.uint8).view(-1)
        parameter.ds_tensor.ds_numel = self.elements
        parameter.ds_tensor.status = PartitionedParamStatus.AVAILABLE
        parameter.ds_tensor.final_location = old.final_location
        parameter.ds_numel_aligned = self.elements * self.group.size()
        parameter.aligned_size = lambda: self.elements * self.group.size()
        parameter.padding_size = lambda: self.elements * self.group.size() - parameter.ds_numel
        parameter.ds_persist = False  # or DeepSpeed would keep small ones whole in 16 bits


class Gathering:
    """Codes of some partitions on their way; what DeepSpeed calls a handle."""

    def __init__(self, parameters: Sequence[Any], partitions: Sequence[Partition]) -> None:
        """Start the all-gather of partitions that share a process group."""
        self._members = list(zip(parameters, partitions, strict=True))
        group = partitions[0].group
        self._layout = WireLayout([partition.section for partition in partitions])
        self._everyone = self._layout.empty(group.size(), partitions[0].codes.device)
        mine = self._everyone[group.rank()]
        for index, partition in enumerate(partitions):
            codes, scales = self._layout.views(mine, index)
            codes.copy_(partition.codes)
            scales.copy_(partition.scales)
        self._work = all_gather_runs(self._everyone, mine, group, async_op=True) if group.size() > 1 else None
        self._is_done = False

    def finish(self) -> None:
        """Wait for the bytes."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def values(self, index: int, dtype: torch.dtype | None = None) -> Tensor:
        """Decoded values of a parameter, in its own dtype unless told otherwise, after `finish`."""
        parameter, partition = self._members[index]
        out = torch.empty(parameter.ds_shape, dtype=dtype or parameter.dtype, device=partition.codes.device)
        units = partition.section.units
        rows = out.view(-1, units.columns)
        for run in partition.runs:
            codes, scales = self._layout.views(self._everyone[run.rank], index)
            scales = scales if units.has_one_scale else scales[: run.units]
            units.decode_into(rows[run.first : run.first + run.units], codes[: run.units], scales)
        return out

    @torch.no_grad()
    def wait(self, handle_dependency: bool = True) -> None:
        """Decode into the parameters."""
        if self._is_done:
            return
        self.finish()
        for index, (parameter, _) in enumerate(self._members):
            parameter.data = self.values(index)
            parameter.ds_status = ZeroParamStatus.AVAILABLE
        if self._everyone.is_cuda:
            self._everyone.record_stream(torch.cuda.current_stream())
        self._is_done = True


class Binder:
    """The functions that DeepSpeed's coordinator and `GatheredParameters` call."""

    def __init__(self, partitions: dict[int, Partition]) -> None:
        """Serve parameters by their id."""
        self._partitions = partitions

    def bind(self, parameter: Any) -> None:
        """Replace a parameter's functions; every parameter of the model needs it, since lists are mixed."""
        gather, coalesced, partition = parameter.all_gather, parameter.all_gather_coalesced, parameter.partition

        def all_gather(param_list: Any = None, async_op: bool = False, hierarchy: int = 0) -> Any:
            ours, others = self._split([parameter] if param_list is None else param_list)
            handles = gather(others, async_op=async_op, hierarchy=hierarchy) if others else None
            mine = self._start([p for p in ours if p.ds_status == ZeroParamStatus.NOT_AVAILABLE])
            if async_op:
                return [*(handles or []), *mine]
            for handle in mine:
                handle.wait()
            return None

        def all_gather_coalesced(params: Iterable[Any], safe_mode: bool = False, quantize: bool = False) -> Any:
            ours, others = self._split(params)
            handles: list[Any] = list(self._start(ours))
            if others:
                handles.append(coalesced(others, safe_mode=safe_mode, quantize=quantize))
            return handles[0] if len(handles) == 1 else MultipleAllGatherHandles(handles)

        def partition_(
            param_list: Any = None, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
        ) -> None:
            ours, others = self._split([parameter] if param_list is None else param_list)
            self._partition(ours, has_been_updated, free_data)
            if others:
                partition(others, hierarchy=hierarchy, has_been_updated=has_been_updated, free_data=free_data)

        parameter.all_gather, parameter.all_gather_coalesced = all_gather, all_gather_coalesced
        parameter.partition = partition_

    def _split(self, parameters: Iterable[Any]) -> tuple[list[Any], list[Any]]:
        """Quantized ones, in an order all ranks share, and the others."""
        parameters = list(parameters)
        ours = sorted((p for p in parameters if id(p) in self._partitions), key=lambda p: cast(int, p.ds_id))
        return ours, [p for p in parameters if id(p) not in self._partitions]

    def _start(self, parameters: Sequence[Any]) -> list[Gathering]:
        by_group: dict[int, list[Any]] = {}
        for parameter in parameters:
            by_group.setdefault(id(self._partitions[id(parameter)].group), []).append(parameter)
        for parameter in parameters:
            parameter.ds_status = ZeroParamStatus.INFLIGHT
        return [Gathering(members, [self._partitions[id(p)] for p in members]) for members in by_group.values()]

    @torch.no_grad()
    def _partition(self, parameters: Sequence[Any], has_been_updated: bool, free_data: bool) -> None:
        available = [p for p in parameters if p.ds_status is ZeroParamStatus.AVAILABLE]
        if has_been_updated:
            self._take_over(available)
        for parameter in available:
            if free_data or has_been_updated:
                free_param(parameter)
        for parameter in parameters:
            parameter.ds_status = ZeroParamStatus.NOT_AVAILABLE

    def _take_over(self, parameters: Sequence[Any]) -> None:
        """Encode what was changed while gathered."""
        changed = [parameter.data for parameter in parameters]
        one_scale = [p for p in parameters if self._partitions[id(p)].section.units.has_one_scale]
        for gathering in self._start(one_scale):
            gathering.wait()
        for parameter, data in zip(parameters, changed, strict=True):
            before = parameter.data if parameter.data is not data else None
            self._partitions[id(parameter)].shard.assign_changed(data, before)
