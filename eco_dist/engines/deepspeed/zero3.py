"""ZeRO stage 3: DeepSpeed's optimizer with codes where its 16-bit partitions and fp32 masters would be.

DeepSpeed keeps fetching, prefetching, releasing, reduction, norms and loss scale. Ours are: what a partition is made
of, how it is gathered, the step, and when the buffer of gradient partitions exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.engines.deepspeed.checkpoint3 import Checkpoint3
from eco_dist.engines.deepspeed.common import clip_factor, is_bad, refuse_moving, report_bad_gradients
from eco_dist.engines.deepspeed.memory import Described, ZeroMemory
from eco_dist.engines.deepspeed.partitions import Binder, Partition
from eco_dist.engines.deepspeed.plan import WeightPlan
from eco_dist.engines.flat.shards import ShardOptimizer


class ECOZeroOptimizer3(Checkpoint3):
    """Stage 3 for an ECO optimizer.

    Attributes:
        optimizer: a `ShardOptimizer`.
        partitions: this rank's partition of every quantized parameter, by the parameter's id.
    """

    optimizer: ShardOptimizer

    def __init__(self, module: Any, optimizer: ShardOptimizer, *args: Any, plan: WeightPlan, **kwargs: Any) -> None:
        """As DeepSpeed's; `plan` comes from the installer."""
        self._plan = plan
        self.partitions: dict[int, Partition] = {}
        self._factor = 1.0
        super().__init__(module, optimizer, *args, **kwargs)

    def is_quantized_group(self, index: int) -> bool:
        """Whether a sub-group's members are codes; groups are not mixed."""
        return self._plan.get(self.fp16_groups[index][0]) is not None

    # --- what a partition is made of --------------------------------------------------------------------------------

    def _create_fp16_partitions_with_defragmentation(self, fp16_param_groups: Any) -> None:
        for group in fp16_param_groups:
            for parameter in group["params"]:
                planned = self._plan.get(parameter)
                if planned is not None:
                    self._quantize(parameter, planned)
        self.persistent_parameters[:] = [p for p in self.persistent_parameters if id(p) not in self.partitions]
        binder = Binder(self.partitions)
        for parameter in self.module.parameters():
            binder.bind(parameter)
        super()._create_fp16_partitions_with_defragmentation(fp16_param_groups)

    def _quantize(self, parameter: Any, planned: Any) -> None:
        parameter.all_gather()
        partition = Partition(planned, self._get_param_partition_group(parameter), parameter.device)
        partition.shard.assign(parameter.data)
        parameter.partition()
        partition.attach(parameter)
        self.optimizer.adopt(partition.shard)
        self.partitions[id(parameter)] = partition

    def _get_parameter_partitions(self) -> list[Tensor]:
        """The 16-bit partitions, which DeepSpeed moves into one buffer: those of high-precision parameters."""
        plain = [p.ds_tensor for group in self.fp16_groups for p in group if id(p) not in self.partitions]
        return plain or [torch.zeros(1, dtype=self.dtype, device=self.device)]

    def _set_fp16_partitioned_groups_flat(self) -> None:
        offset = 0
        for index, group in enumerate(self.fp16_groups):
            length = sum(parameter.partition_numel() for parameter in group)
            if self.is_quantized_group(index):
                self.fp16_partitioned_groups_flat.append(self._nothing(self.dtype, length))
            else:
                self.fp16_partitioned_groups_flat.append(self.lp_param_buffer.narrow(0, offset, length))
                offset += length

    def _nothing(self, dtype: torch.dtype, length: int) -> Tensor:
        """A tensor of a length and no memory."""
        return torch.zeros(1, dtype=dtype, device=self.device).expand(length)

    def _create_fp32_partitions(self) -> None:
        """Masters of high-precision sub-groups only."""
        flats = self.fp16_partitioned_groups_flat
        none = torch.empty(0, dtype=self.dtype, device=self.device)
        self.fp16_partitioned_groups_flat = [
            none if self.is_quantized_group(index) else flat for index, flat in enumerate(flats)
        ]
        super()._create_fp32_partitions()
        self.fp16_partitioned_groups_flat = flats
        for index, flat in enumerate(flats):
            if self.is_quantized_group(index):
                self.fp32_partitioned_groups_flat[index] = self._nothing(torch.float32, flat.numel())

    def initialize_optimizer_states(self) -> None:
        """Nothing: DeepSpeed would only allocate gradients here and free them again."""

    offload_states = reload_states = refuse_moving

    def memory_tensors(self) -> Iterable[Described]:
        """Every tensor held between steps, for the memory report."""
        return ZeroMemory(self, self.module).memory_tensors()

    def quantized_weights(self) -> Iterable[tuple[str, int, int]]:
        """Sizes of the weights that are codes, for the memory report."""
        return ZeroMemory(self, self.module).quantized_weights()

    # --- gradients --------------------------------------------------------------------------------------------------

    def _setup_for_real_optimizer(self) -> None:
        super()._setup_for_real_optimizer()
        self._release_gradients()

    def _release_gradients(self) -> None:
        """Free the buffer of gradient partitions; it is needed from backward to step only."""
        self.grad_partitions_flat_buffer.untyped_storage().resize_(0)

    def _ensure_gradients(self) -> None:
        buffer = self.grad_partitions_flat_buffer
        if buffer.untyped_storage().nbytes() == 0:
            buffer.untyped_storage().resize_(buffer.numel() * buffer.element_size())
            buffer.zero_()

    def _get_fp32_grad_state_partition(self, param: Any, release_swap_buffers: bool) -> Any:
        """As DeepSpeed's, for `safe_get_full_grad`.

        Raises:
            ValueError: between step and backward, when no gradients exist.
        """
        if self.grad_partitions_flat_buffer.untyped_storage().nbytes() == 0:
            raise ValueError("Gradients are only available immediately after backward and before engine step")
        return super()._get_fp32_grad_state_partition(param, release_swap_buffers)

    def partition_grads(self, params_to_release: list[Any], grad_partitions: list[Tensor]) -> Any:
        """As DeepSpeed's, into a buffer that may have been freed."""
        self._ensure_gradients()
        return super().partition_grads(params_to_release, grad_partitions)

    def _DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads(
        self, params_to_reduce: list[Any], communication_data_type: torch.dtype
    ) -> list[Tensor]:
        """As DeepSpeed's, whose ranks get equal shares of elements, with gradients padded so that these are units."""
        for parameter in params_to_reduce:
            if id(parameter) in self.partitions and parameter.padding_size():
                flat = parameter.grad.flatten()
                parameter.grad.data = torch.nn.functional.pad(flat, (0, parameter.padding_size()))
        scatter = super()._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads
        result: list[Tensor] = scatter(params_to_reduce, communication_data_type)
        return result

    # --- the step ---------------------------------------------------------------------------------------------------

    def step(self, closure: Any = None) -> None:
        """One step, or none on any rank if a gradient anywhere is not finite."""
        self.optimizer.follow_client()
        self._ensure_gradients()
        super().step(closure)
        self._release_gradients()
        if self.overflow:
            report_bad_gradients(self)
        else:
            super()._update_scale(False)

    def _update_scale(self, has_overflow: bool = False) -> None:
        """DeepSpeed asks before it unscales the gradients, which carry the old scale: let it grow after the step."""
        if has_overflow:
            super()._update_scale(True)

    def _overflow_check_and_loss_scale_update(self, update_scale: bool = True) -> Any:
        """As DeepSpeed's, but it looks whatever the dtype: a NaN must not reach codes or moments."""
        self.check_overflow()
        return self._loss_scale_update_and_overflow_cleanup() if update_scale else self.overflow

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether a gradient on any rank cannot be used."""
        flag = is_bad(self.grad_partitions_flat_buffer).to(torch.uint8)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.dp_process_group)
        return bool(flag.item())

    def _prepare_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        if not self.is_quantized_group(sub_group_id):
            super()._prepare_sub_group(sub_group_id, timer_names)

    def unscale_and_clip_grads(self, sub_group_id: int, total_norm: Any) -> None:
        """Scale the fp32 gradients of high-precision parameters; the step scales the others."""
        if self.is_quantized_group(sub_group_id):
            self._factor = clip_factor(total_norm, float(self.loss_scale), self.clip_grad)
        else:
            super().unscale_and_clip_grads(sub_group_id, total_norm)

    def _optimizer_step(self, sub_group_id: int) -> None:
        group = self.optimizer.param_groups[self.sub_group_to_group_id[sub_group_id]]
        if not self.is_quantized_group(sub_group_id):
            flat = self.fp32_partitioned_groups_flat[sub_group_id]
            self.optimizer.step_tensors([(flat, flat.grad)], group, 1.0)
            return
        work = []
        pairs = zip(self.fp16_groups[sub_group_id], self.averaged_gradients[sub_group_id], strict=True)
        for parameter, grad in pairs:
            weight = self.partitions[id(parameter)].shard.weight
            work.append((weight, grad[: weight.numel()].view(weight.shape)))
        self.optimizer.step_tensors(work, group, self._factor)

    def _reassign_or_swap_out_partitioned_parameters(self, sub_group_id: int) -> None:
        if not self.is_quantized_group(sub_group_id):
            super()._reassign_or_swap_out_partitioned_parameters(sub_group_id)

    def _release_sub_group(self, sub_group_id: int, timer_names: Any) -> None:
        if self.is_quantized_group(sub_group_id):
            self.averaged_gradients[sub_group_id] = None
        else:
            super()._release_sub_group(sub_group_id, timer_names)
