"""Checkpoints and parameter access at stage 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT
from deepspeed.runtime.zero.stage3 import FP32_FLAT_GROUPS, DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.utils import is_zero_param
from torch import Tensor, nn

from eco_dist.engines.deepspeed.checkpoint import (
    ECO,
    Masters,
    load_shards,
    masters_of_sub_groups,
    save_shards,
    take_over_shards,
    without_moments,
)
from eco_dist.engines.deepspeed.checkpoint_runs import flat_runs
from eco_dist.engines.deepspeed.partitions import Gathering, Partition
from eco_dist.engines.deepspeed.universal import LoadsUniversal
from eco_dist.engines.flat.held import HeldRun
from eco_dist.engines.flat.shards import ShardOptimizer, WeightShard

_KEYS = {"masters": FP32_FLAT_GROUPS, "optimizer": OPTIMIZER_STATE_DICT}


class Checkpoint3(LoadsUniversal, DeepSpeedZeroOptimizer_Stage3):
    """The part of `ECOZeroOptimizer3` that reads and writes."""

    optimizer: ShardOptimizer
    partitions: dict[int, Partition]
    fp16_partitioned_groups_flat: list[Tensor]

    def is_quantized_group(self, index: int) -> bool:
        """Whether a sub-group's members are codes."""
        raise NotImplementedError

    @property
    def shards(self) -> dict[int, WeightShard]:
        """This rank's shard of every quantized parameter, by the parameter's id."""
        return {key: partition.shard for key, partition in self.partitions.items()}

    # --- tools that read or write one parameter: safe_get_full_*, safe_set_full_* ------------------------------------

    @torch.no_grad()
    def _get_fp32_opt_state_partition(
        self, param: Any, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> Any:
        """Stored weight or a moment of this rank's partition in fp32, padding included."""
        partition = self.partitions.get(id(param))
        if partition is None:
            return super()._get_fp32_opt_state_partition(param, release_swap_buffers, optim_state_key)
        shard = partition.shard
        own = shard.weight.decode() if optim_state_key is None else self.optimizer.read_state(shard, optim_state_key)
        flat = torch.nn.functional.pad(own.flatten(), (0, partition.elements - own.numel()))
        return flat, self.grad_position[self.get_param_id(param)][0]

    def set_full_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Replace a whole parameter or one of its moments; every rank calls it with the same values."""
        partition = self.partitions.get(id(param))
        if partition is None:
            own, _ = self._get_fp32_opt_state_partition(param, False, optim_state_key)
            first = self._get_param_partition_rank(param) * own.numel()
            own.data.copy_(_padded(value, param)[first : first + own.numel()])
        elif optim_state_key is None:
            partition.shard.assign_changed(value.float().view(param.ds_shape))
        else:
            self.optimizer.write_state(partition.shard, optim_state_key, partition.shard.mine(value))

    def set_local_hp_param(self, value: Tensor, param: Any, optim_state_key: str | None = None) -> None:
        """Replace this rank's partition of a parameter or moment.

        Raises:
            ValueError: if all units of the weight share a scale, which no rank can choose alone.
        """
        partition = self.partitions.get(id(param))
        if partition is None:
            super().set_local_hp_param(value, param, optim_state_key)
            return
        weight = partition.shard.weight
        own = value.flatten()[: weight.numel()].view(weight.shape)
        if optim_state_key is None:
            weight.assign_(own)
        else:
            self.optimizer.write_state(partition.shard, optim_state_key, own)

    def set_fp32_grad_for_param(self, value: Tensor, param: Any) -> None:
        """As DeepSpeed's, which takes the last rank's part to be as long as the others'."""
        super().set_fp32_grad_for_param(_padded(value, param), param)

    # --- save --------------------------------------------------------------------------------------------------------

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Put what is stepped into the optimizer's groups, for its `state_dict` and `load_state_dict`."""
        for index, members in enumerate(self.fp16_groups):
            group = self.optimizer.param_groups[self.sub_group_to_group_id[index]]
            if self.is_quantized_group(index):
                group["params"] += [self.partitions[id(p)].shard.weight for p in members]
            else:
                group["params"].append(self.fp32_partitioned_groups_flat[index])

    def _rigid_state_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = super()._rigid_state_dict()
        masters = list(result[FP32_FLAT_GROUPS])
        for index, members in enumerate(self.fp16_groups):
            if self.is_quantized_group(index):
                masters[index] = torch.cat([self._deepspeed_partition(parameter) for parameter in members])
        result[FP32_FLAT_GROUPS] = masters
        result[ECO] = save_shards(self.shards.values(), result[OPTIMIZER_STATE_DICT])
        result[OPTIMIZER_STATE_DICT] = without_moments(result[OPTIMIZER_STATE_DICT])
        return result

    @torch.no_grad()
    def _deepspeed_partition(self, parameter: Any) -> Tensor:
        """Stored weights in fp32 where DeepSpeed's tools expect them: equal shares of elements. Collective."""
        partition = self.partitions[id(parameter)]
        ranks = partition.group.size()
        length = -(-parameter.ds_numel // ranks)
        if length == partition.elements:
            own: Tensor = self._get_fp32_opt_state_partition(parameter, False)[0]
            return own
        gathering = Gathering([parameter], [partition])
        gathering.finish()
        whole = _padded(gathering.values(0, torch.float32).flatten(), parameter, length * ranks)
        return whole[partition.group.rank() * length :][:length].clone()

    # --- load --------------------------------------------------------------------------------------------------------

    def _rigid_load_state_dict(self, state_dict: dict[str, Any], load_optimizer_states: bool = True) -> None:
        self.loss_scaler = state_dict["loss_scaler"]
        self.dynamic_loss_scale = state_dict["dynamic_loss_scale"]
        self.overflow = state_dict["overflow"]
        if ECO not in state_dict:
            rank, ranks = dist.get_rank(self.dp_process_group), dist.get_world_size(self.dp_process_group)
            order = self._parameters_in_order()
            masters = masters_of_sub_groups(state_dict, _KEYS, order, rank, ranks, moments=load_optimizer_states)
            take_over_shards(self.optimizer, self.shards.values(), masters)
            self._take_over_plain(masters)
        else:
            load_shards(list(self.shards.values()), state_dict[ECO])
            if load_optimizer_states:
                self._set_fp32_optimizer_param_groups()
                self.optimizer.load_state_dict(state_dict[ECO]["optimizer"])
                self._clear_fp32_optimizer_param_groups()
            for index, saved in enumerate(state_dict[FP32_FLAT_GROUPS]):
                if not self.is_quantized_group(index):
                    self.fp32_partitioned_groups_flat[index].data.copy_(saved.data)
        for index in range(len(self.fp16_groups)):
            self._reassign_or_swap_out_partitioned_parameters(index)

    def model(self) -> nn.Module:
        """The engine's module."""
        module: nn.Module = self.module
        return module

    def load_common_state(self, common: Mapping[str, Any]) -> None:
        """As DeepSpeed's."""
        self._load_global_state_stage3(common)

    # --- checkpoints of eco_dist.checkpoint --------------------------------------------------------------------------

    def plain_runs(self) -> Iterator[tuple[int, HeldRun]]:
        """This rank's partitions of high-precision parameters, without padding."""
        for index, members in enumerate(self.fp16_groups):
            if not self.is_quantized_group(index):
                flat = self.fp32_partitioned_groups_flat[index]
                yield from flat_runs(self.optimizer, flat, self._places(members))

    def _places(self, members: list[Any]) -> Iterator[tuple[Any, tuple[int, ...], int, int, int]]:
        offset = 0
        for parameter in members:
            length = parameter.partition_numel()
            start = self._get_param_partition_rank(parameter) * length
            yield parameter, tuple(parameter.ds_shape), start, offset, min(max(parameter.ds_numel - start, 0), length)
            offset += length

    @torch.no_grad()
    def show_loaded(self) -> None:
        """Weights in 16 bits where they are partitioned or kept whole."""
        for index in range(len(self.fp16_groups)):
            self._reassign_or_swap_out_partitioned_parameters(index)
        if self.persistent_parameters:
            self.persistent_parameters[0].partition(self.persistent_parameters)
            self.persistent_parameters[0].all_gather(self.persistent_parameters)

    def _parameters_in_order(self) -> list[tuple[str, int]]:
        """Names and sizes in the order of the client's groups, which is the order of files without ECO."""
        parameters = [p for group in self.optimizer.client.param_groups for p in group["params"]]
        return [(self.param_names[p], p.ds_numel) for p in parameters if p.requires_grad and is_zero_param(p)]

    @torch.no_grad()
    def _take_over_plain(self, masters: Masters) -> None:
        """High-precision parameters of a checkpoint with other groups. Collective."""
        for index, members in enumerate(self.fp16_groups):
            if self.is_quantized_group(index):
                continue
            flat = self.fp32_partitioned_groups_flat[index]
            targets = self.optimizer.fresh_targets(flat, masters.keys, masters.step)
            offset = 0
            for parameter in members:
                group = self._get_param_partition_group(parameter)
                whole = masters.whole(self.param_names[parameter], parameter.ds_numel, group, flat.device)
                length = parameter.partition_numel()
                for key, values in whole.items():
                    fragment = values[group.rank() * length :][:length]
                    targets[key][offset : offset + fragment.numel()].copy_(fragment)
                offset += length

    def _restore_from_bit16_weights(self) -> None:
        """Loading into the module went through the partitions, which took over what was changed."""
        for index, flat in enumerate(self.fp16_partitioned_groups_flat):
            if not self.is_quantized_group(index):
                self.fp32_partitioned_groups_flat[index].data.copy_(flat.data)


def _padded(value: Tensor, parameter: Any, length: int | None = None) -> Tensor:
    """Flat values with zeros behind, so that every rank's partition is as long."""
    flat = value.flatten()
    length = parameter.aligned_size() if length is None else length
    return torch.nn.functional.pad(flat, (0, length - flat.numel()))
