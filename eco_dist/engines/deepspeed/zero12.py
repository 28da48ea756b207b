"""ZeRO stage 1 and 2: DeepSpeed's optimizer with codes where its fp32 partition would be.

DeepSpeed keeps hooks, buckets, reduction, norms, loss scale and expert groups. Ours are: where the partitions are cut,
what a partition is made of, the step, and the all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.utils import all_gather_dp_groups, is_invalid_grad_norm
from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID
from torch import Tensor, nn

from eco_dist.engines.deepspeed.checkpoint12 import Checkpoint12
from eco_dist.engines.deepspeed.common import clip_factor, is_bad, refuse_moving, report_bad_gradients
from eco_dist.engines.deepspeed.memory import Described, ZeroMemory
from eco_dist.engines.deepspeed.plan import WeightPlan
from eco_dist.engines.deepspeed.replicas import Location, Replicas
from eco_dist.engines.deepspeed.wire import Section, WireLayout
from eco_dist.engines.deepspeed.working_copy import MODES
from eco_dist.engines.flat.shards import ShardOptimizer, WeightShard


class ECOZeroOptimizer(Checkpoint12):
    """Stage 1 and 2 for an ECO optimizer.

    Attributes:
        optimizer: a `ShardOptimizer`.
        shards: this rank's shard of every quantized parameter, by the parameter's id.
        working_copy: what forward and backward read.
    """

    optimizer: ShardOptimizer
    overflow: bool

    def __init__(
        self, optimizer: ShardOptimizer, *args: Any, module: nn.Module, plan: WeightPlan, **kwargs: Any
    ) -> None:
        """As DeepSpeed's; `module` and `plan` come from the installer."""
        self._module = module
        self._plan = plan
        self.shards: dict[int, WeightShard] = {}
        kwargs["check_grad_overflow"] = True  # whatever the dtype: a NaN must not reach codes or moments
        super().__init__(optimizer, *args, **kwargs)

    def is_quantized_group(self, index: int) -> bool:
        """Whether a parameter group's members are codes; groups are not mixed."""
        return self._plan.get(self.bit16_groups[index][0]) is not None

    # --- where the partitions are cut -------------------------------------------------------------------------------

    def flatten_dense_tensors_aligned(
        self, tensor_list: Sequence[Tensor], alignment: int, use_cpu_data: bool = False, param_padding: Any = None
    ) -> Tensor:
        """As DeepSpeed's, but a group of weights becomes so long that every partition is whole units."""
        planned = self._plan.get(tensor_list[0]) if param_padding is not None else None
        if planned is not None:
            ranks = alignment // self.nccl_start_alignment_factor
            alignment = math.lcm(self.nccl_start_alignment_factor, planned.units.columns) * ranks
        flat: Tensor = super().flatten_dense_tensors_aligned(tensor_list, alignment, use_cpu_data, param_padding)
        return flat

    # --- what a partition is made of --------------------------------------------------------------------------------

    def initialize_optimizer_states(self) -> None:
        """Replace the fp32 partitions of weights by codes, scales and moments."""
        quantized = [index for index in range(len(self.bit16_groups)) if self.is_quantized_group(index)]
        groups: dict[int, list[int]] = {}
        for index in quantized:
            groups.setdefault(id(self.real_dp_process_group[index]), []).append(index)
        self._locations: dict[int, tuple[Replicas, Location]] = {}
        replicas = [self._adopt_groups(indices) for indices in groups.values()]
        parameters = [parameter for index in quantized for parameter in self.bit16_groups[index]]
        self.working_copy = MODES[self._plan.config.working_copy](self._module, parameters, replicas, self._decode)
        self.working_copy.after_update()
        self._module.register_load_state_dict_pre_hook(lambda *_: self.working_copy.before_load())
        self._module.register_load_state_dict_post_hook(lambda *_: self.take_over_module())

    def _adopt_groups(self, indices: Sequence[int]) -> Replicas:
        """Quantize the groups of one process group."""
        group = self.real_dp_process_group[indices[0]]
        layout = WireLayout([self._section(index) for index in indices])
        resident = self._plan.config.working_copy == "replica"
        replicas = Replicas(layout, group, torch.device(self.device), resident=resident)
        for section, index in enumerate(indices):
            shards = self._adopt_group(index, section, replicas)
            self.optimizer.param_groups[index]["params"] = [shard.weight for shard in shards]
            self._forget_partition(index)
        return replicas

    def _section(self, index: int) -> Section:
        units = self._plan[self.bit16_groups[index][0]].units
        count = units.count(int(self.partition_size[index]))
        rows = len(self.bit16_groups[index]) if units.has_one_scale else count
        return Section(units=units, count=count, scale_rows=rows)

    def _adopt_group(self, index: int, section: int, replicas: Replicas) -> list[WeightShard]:
        shards = []
        order = zip(self.round_robin_bit16_groups[index], self.round_robin_bit16_offsets[index], strict=True)
        for number, (parameter, offset) in enumerate(order):
            planned = self._plan[parameter]
            shard, location = replicas.place(section, number, planned, planned.units.count(offset))
            shard.assign(parameter.data)
            self.optimizer.adopt(shard)
            self.shards[id(parameter)] = shard
            self._locations[id(parameter)] = (replicas, location)
            shards.append(shard)
        return shards

    def _forget_partition(self, index: int) -> None:
        """Drop DeepSpeed's flat 16-bit group and fp32 partition; what is left has their length and no memory."""
        flat = self.bit16_groups_flat[index]
        size = int(self.partition_size[index])
        nothing = torch.zeros(1, dtype=flat.dtype, device=flat.device)
        self.bit16_groups_flat[index] = nothing.expand(flat.numel())
        self.parallel_partitioned_bit16_groups[index] = [
            nothing.expand(size) for _ in self.parallel_partitioned_bit16_groups[index]
        ]
        self.single_partition_of_fp32_groups[index] = torch.zeros(1, device=flat.device).expand(size)

    def _decode(self, parameter: nn.Parameter, out: Tensor) -> None:
        replicas, location = self._locations[id(parameter)]
        replicas.decode_into(location, out)

    offload_states = reload_states = refuse_moving

    def memory_tensors(self) -> Iterable[Described]:
        """Every tensor held between steps, for the memory report."""
        return ZeroMemory(self, self._module).memory_tensors()

    def quantized_weights(self) -> Iterable[tuple[str, int, int]]:
        """Sizes of the weights that are codes, for the memory report."""
        return ZeroMemory(self, self._module).quantized_weights()

    # --- the step ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _has_inf_or_nan(x: Tensor, j: int | None = None) -> Tensor:
        """Whether a gradient cannot be used."""
        return is_bad(x)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step, or none on any rank if a gradient anywhere is not finite."""
        self.micro_step_id = INITIAL_MICRO_STEP_ID
        self.optimizer.follow_client()
        self.check_overflow()
        norm = None
        if self.compute_grad_norm and not self.overflow:
            norm = self.scaled_global_norm()
            self.overflow = is_invalid_grad_norm(norm)
        scale = float(self.loss_scale)  # before it changes: gradients carry the old one
        self._update_scale(self.overflow)
        if self.overflow:
            self._discard_gradients()
            report_bad_gradients(self)
            return
        self._global_grad_norm = None if norm is None else norm / scale
        factor = clip_factor(norm, scale, self.clip_grad)
        for index in range(len(self.bit16_groups)):
            self._step_group(index, factor)
        self._share_plain_groups()
        self.working_copy.after_update()
        self._lazy_init_hp_params_optimizer_state()

    def _discard_gradients(self) -> None:
        if self.compute_grad_norm:
            self._global_grad_norm = float("inf")
        self.zero_grad(set_to_none=True)
        for index in self.averaged_gradients:
            self.averaged_gradients[index] = None
            self.all_grad_tensors[index] = None

    def _step_group(self, index: int, factor: float) -> None:
        self.free_grad_in_param_list(self.params_not_in_partition[index])
        self.free_grad_in_param_list(self.params_in_partition[index])
        pieces = list(self.averaged_gradients[index])
        self.averaged_gradients[index] = None
        self.all_grad_tensors[index] = None
        group = self.optimizer.param_groups[index]
        if self.is_quantized_group(index):
            work = self._pair_with_shards(index, pieces)
        else:
            work = [(self.single_partition_of_fp32_groups[index], self.flatten(pieces))]
        self.optimizer.step_tensors(work, group, factor)

    def _pair_with_shards(self, index: int, pieces: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Every shard's weight with its gradient. DeepSpeed lists a partition's members in order, then padding."""
        mine = dict(zip(map(id, self.params_in_partition[index]), pieces, strict=False))
        work: list[tuple[Tensor, Tensor]] = []
        for parameter in self.round_robin_bit16_groups[index]:
            weight = self.shards[id(parameter)].weight
            piece = mine.get(id(parameter))
            grad = torch.zeros(weight.shape, device=weight.device) if piece is None else piece.reshape(weight.shape)
            work.append((weight, grad))
        return work

    def _share_plain_groups(self) -> None:
        """Copy what stayed in high precision into the model, on all ranks."""
        plain = [index for index in range(len(self.bit16_groups)) if not self.is_quantized_group(index)]
        for index in plain:
            partitions = self.parallel_partitioned_bit16_groups[index]
            rank = dist.get_rank(group=self.real_dp_process_group[index])
            partitions[rank].data.copy_(self.single_partition_of_fp32_groups[index].data)
        all_gather_dp_groups(
            groups_flat=[self.bit16_groups_flat[index] for index in plain],
            partitioned_param_groups=[self.parallel_partitioned_bit16_groups[index] for index in plain],
            dp_process_group=[self.real_dp_process_group[index] for index in plain],
            start_alignment_factor=self.nccl_start_alignment_factor,
            allgather_bucket_size=self.allgather_bucket_size,
        )
