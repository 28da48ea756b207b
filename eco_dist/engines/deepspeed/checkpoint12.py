"""Checkpoints and parameter access at stage 1 and 2."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    DS_VERSION,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from eco_dist.engines.deepspeed.checkpoint import (
    ECO,
    Masters,
    load_shards,
    masters_of_flat_groups,
    save_shards,
    take_over_shards,
    without_moments,
)
from eco_dist.engines.deepspeed.checkpoint_runs import flat_runs
from eco_dist.engines.deepspeed.universal import LoadsUniversal
from eco_dist.engines.deepspeed.working_copy import WorkingCopy
from eco_dist.engines.flat.held import HeldRun
from eco_dist.engines.flat.shards import ShardOptimizer, WeightShard

_KEYS = {
    "masters": SINGLE_PARTITION_OF_FP32_GROUPS,
    "optimizer": BASE_OPTIMIZER_STATE,
    "slices": PARAM_SLICE_MAPPINGS,
}


class Checkpoint12(LoadsUniversal, DeepSpeedZeroOptimizer):
    """The part of `ECOZeroOptimizer` that reads and writes."""

    optimizer: ShardOptimizer
    shards: dict[int, WeightShard]
    working_copy: WorkingCopy
    _hp_optimizer_states_linked: bool
    _module: nn.Module

    def is_quantized_group(self, index: int) -> bool:
        """Whether a parameter group's members are codes."""
        raise NotImplementedError

    def _share_plain_groups(self) -> None:
        raise NotImplementedError

    # --- tools that read or write one parameter: safe_get_full_*, safe_set_full_* ------------------------------------

    def _link_all_hp_params(self) -> None:
        super()._link_all_hp_params()
        for index, members in enumerate(self.bit16_groups):
            if self.is_quantized_group(index):
                for parameter in members:
                    parameter.get_full_hp_param = functools.partial(self._read_whole, parameter)
                    parameter.set_full_hp_param = functools.partial(self._write_whole, parameter)
                    if parameter._hp_mapping is not None:
                        parameter._hp_mapping.lp_fragment = None  # a view that would keep the working copy alive

    def _lazy_init_hp_params_optimizer_state(self) -> None:
        """Let the tools find the moments of high-precision parameters."""
        if self._hp_optimizer_states_linked:
            return
        for index, members in enumerate(self.bit16_groups):
            flat = self.single_partition_of_fp32_groups[index]
            if not self.is_quantized_group(index) and self.optimizer.state[flat]:
                for parameter in members:
                    if parameter._hp_mapping is not None:
                        parameter._hp_mapping.set_optim_state_fragment(flat, self.optimizer.state[flat])
        self._hp_optimizer_states_linked = True

    @torch.no_grad()
    def _read_whole(self, parameter: nn.Parameter, optim_state_key: str | None = None) -> Tensor:
        """Stored weight or a moment of a whole parameter in fp32. Collective."""
        shard = self.shards[id(parameter)]
        whole = torch.zeros(shard.plan.shape, device=parameter.device)
        own = shard.weight.decode() if optim_state_key is None else self.optimizer.read_state(shard, optim_state_key)
        shard.mine(whole).copy_(own)
        dist.all_reduce(whole, group=shard.group)
        return whole

    @torch.no_grad()
    def _write_whole(self, parameter: nn.Parameter, value: Tensor, optim_state_key: str | None = None) -> None:
        """Replace a whole parameter or one of its moments; every rank calls it with the same values."""
        shard = self.shards[id(parameter)]
        if optim_state_key is None:
            shard.assign_changed(value.float().view(shard.plan.shape))
            self.working_copy.is_stale = True
        else:
            self.optimizer.write_state(shard, optim_state_key, shard.mine(value))

    # --- save --------------------------------------------------------------------------------------------------------

    def checkpoint_event_prologue(self) -> None:
        """Show the weights: the engine is about to save or load the module."""
        self.working_copy.gather_and_fill()

    def checkpoint_event_epilogue(self) -> None:
        """Back to what is there between steps."""
        self.working_copy.rest()

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a checkpoint."""
        result: dict[str, Any] = super().state_dict()
        masters = result[SINGLE_PARTITION_OF_FP32_GROUPS]
        for index in range(len(self.bit16_groups)):
            if self.is_quantized_group(index):
                masters[index] = self._decoded_partition(index)
        result[ECO] = save_shards(self.shards.values(), result[BASE_OPTIMIZER_STATE])
        result[BASE_OPTIMIZER_STATE] = without_moments(result[BASE_OPTIMIZER_STATE])
        return result

    def _decoded_partition(self, index: int) -> Tensor:
        """Stored weights of this rank's partition in fp32, without padding."""
        size = int(self.partition_size[index])
        flat = torch.zeros(size, device=self.device)
        for parameter in self.bit16_groups[index]:
            shard = self.shards[id(parameter)]
            start = shard.run.row * shard.plan.units.columns
            flat[start : start + shard.weight.numel()] = shard.weight.decode().flatten()
        return flat[: size - self.groups_padding[index]]

    # --- load --------------------------------------------------------------------------------------------------------

    def _load_legacy_checkpoint(
        self, state_dict_list: Sequence[Any], load_optimizer_states: bool = True, load_from_fp32_weights: bool = False
    ) -> None:
        mine = state_dict_list[dist.get_rank(group=self.dp_process_group)]
        if ECO in mine:
            load_shards(list(self.shards.values()), mine[ECO])
            if load_optimizer_states:
                self.optimizer.load_state_dict(mine[ECO]["optimizer"])
            self._load_plain_partitions(mine[SINGLE_PARTITION_OF_FP32_GROUPS])
        else:
            masters = masters_of_flat_groups(mine, _KEYS, moments=load_optimizer_states)
            take_over_shards(self.optimizer, self.shards.values(), masters)
            self._take_over_plain(masters)
        self._load_global_state(mine)
        if load_optimizer_states:
            self.show_loaded()
        else:
            self._share_plain_groups()
            self.working_copy.after_update()

    def model(self) -> nn.Module:
        """The engine's module."""
        return self._module

    def load_common_state(self, common: Mapping[str, Any]) -> None:
        """As DeepSpeed's; a universal checkpoint of stage 3 does not name its version."""
        self._load_global_state({DS_VERSION: deepspeed.__version__, **common})

    def update_lp_params(self) -> None:
        """Show the weights: the engine has loaded a universal checkpoint."""
        self._share_plain_groups()
        self.working_copy.after_update()

    # --- checkpoints of eco_dist.checkpoint --------------------------------------------------------------------------

    def plain_runs(self) -> Iterator[tuple[int, HeldRun]]:
        """High-precision parameters of this rank's partitions, and empty runs of the others."""
        for index, members in enumerate(self.bit16_groups):
            if not self.is_quantized_group(index):
                flat = self.single_partition_of_fp32_groups[index]
                yield from flat_runs(self.optimizer, flat, map(_place, members))

    @torch.no_grad()
    def show_loaded(self) -> None:
        """Weights of all ranks, and the moments that DeepSpeed's tools find."""
        self._share_plain_groups()
        self.working_copy.after_update()
        self._hp_optimizer_states_linked = False
        self._link_all_hp_params()
        self._lazy_init_hp_params_optimizer_state()

    @torch.no_grad()
    def _load_plain_partitions(self, masters: Sequence[Tensor]) -> None:
        for index, saved in enumerate(masters):
            if not self.is_quantized_group(index):
                self.single_partition_of_fp32_groups[index][: saved.numel()].copy_(saved.detach())

    @torch.no_grad()
    def _take_over_plain(self, masters: Masters) -> None:
        """High-precision parameters of a checkpoint with other groups, fragment by fragment. Collective."""
        for index, members in enumerate(self.bit16_groups):
            if self.is_quantized_group(index):
                continue
            flat = self.single_partition_of_fp32_groups[index]
            targets = self.optimizer.fresh_targets(flat, masters.keys, masters.step)
            for parameter in members:
                name, group = self.param_names[parameter], self.real_dp_process_group[index]
                whole = masters.whole(name, parameter.numel(), group, flat.device)
                mapping = parameter._hp_mapping
                if mapping is not None:
                    source, target = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
                    for key, values in whole.items():
                        fragment = values[source.start : source.start + source.numel]
                        targets[key][target.start : target.start + target.numel].copy_(fragment)

    def _restore_from_bit16_weights(self) -> None:
        """Take over what was loaded into the module; weights that were not changed keep their codes."""
        self.take_over_module()
        for index, partitions in enumerate(self.parallel_partitioned_bit16_groups):
            if not self.is_quantized_group(index):
                rank = dist.get_rank(group=self.real_dp_process_group[index])
                self.single_partition_of_fp32_groups[index].data.copy_(partitions[rank].data)
        self.working_copy.after_update()

    def take_over_module(self) -> None:
        """Encode what was written into filled parameters."""
        for parameter in self.working_copy.filled():
            self.shards[id(parameter)].assign_changed(parameter.data)
        self.working_copy.is_stale = True


def _place(parameter: Any) -> tuple[Any, tuple[int, ...], int, int, int]:
    """A parameter, its shape, its first element here, where that lies in the flat partition, how many."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return parameter, tuple(parameter.shape), 0, 0, 0
    source, target = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
    return parameter, tuple(parameter.shape), source.start, target.start, target.numel
