"""What this engine relies on inside DeepSpeed, none of which it promises to keep.

`broken_promises()` lists what the installed version lacks; `deepspeed.initialize` then refuses ECO optimizers with that
list, or trains them at stage 0 (`fallback.py`), which relies on nothing of this.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

TESTED_VERSION = "0.19.8"

_ZERO = "deepspeed.runtime.zero"
_STAGE12 = f"{_ZERO}.stage_1_and_2:DeepSpeedZeroOptimizer"
_STAGE3 = f"{_ZERO}.stage3:DeepSpeedZeroOptimizer_Stage3"
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_INIT = f"{_ZERO}.partition_parameters"

SIGNATURES: Mapping[str, Sequence[str]] = {
    # What we wrap, and what tells us how to refuse.
    f"{_ENGINE}._configure_zero_optimizer": ("self", "optimizer"),
    f"{_ENGINE}._do_optimizer_sanity_check": ("self", "basic_optimizer"),
    f"{_ENGINE}._configure_distributed_model": ("self", "model"),
    f"{_ENGINE}.get_data_types": ("self",),
    f"{_ENGINE}.zero_optimization_stage": ("self",),
    f"{_ENGINE}.super_offload": ("self",),
    f"{_ENGINE}.zero_offload_optimizer": ("self",),
    f"{_ENGINE}.zero_offload_param": ("self",),
    f"{_ENGINE}.zenflow_config": ("self",),
    f"{_ENGINE}.zero_hpz_partition_size": ("self",),
    f"{_ENGINE}.fp16_master_weights_and_gradients": ("self",),
    f"{_ENGINE}.bf16_master_weights_and_gradients": ("self",),
    f"{_ENGINE}.torch_autocast_enabled": ("self",),
    f"{_ENGINE}.is_deepcompile_enabled": ("self",),
    f"{_ENGINE}.load_universal_checkpoint": ("self",),
    f"{_ENGINE}._get_all_ckpt_names": ("self", "checkpoints_path", "tag"),
    # Stage 1 and 2: overridden or called.
    f"{_STAGE12}.flatten_dense_tensors_aligned": (
        "self",
        "tensor_list",
        "alignment",
        "use_cpu_data",
        "param_padding",
    ),
    f"{_STAGE12}.initialize_optimizer_states": ("self",),
    f"{_STAGE12}.step": ("self", "closure"),
    f"{_STAGE12}.check_overflow": ("self", "partition_gradients"),
    f"{_STAGE12}._has_inf_or_nan": ("x", "j"),
    f"{_STAGE12}.scaled_global_norm": ("self", "norm_type"),
    f"{_STAGE12}._update_scale": ("self", "has_overflow"),
    f"{_STAGE12}.zero_grad": ("self", "set_to_none"),
    f"{_STAGE12}.free_grad_in_param_list": ("self", "param_list"),
    f"{_STAGE12}._link_all_hp_params": ("self",),
    f"{_STAGE12}._lazy_init_hp_params_optimizer_state": ("self",),
    f"{_STAGE12}.state_dict": ("self",),
    f"{_STAGE12}._load_legacy_checkpoint": (
        "self",
        "state_dict_list",
        "load_optimizer_states",
        "load_from_fp32_weights",
    ),
    f"{_STAGE12}._load_global_state": ("self", "sd"),
    f"{_STAGE12}._load_universal_checkpoint": (
        "self",
        "checkpoint_folder",
        "load_optimizer_states",
        "load_from_fp32_weights",
    ),
    f"{_STAGE12}.update_lp_params": ("self",),
    f"{_STAGE12}._restore_from_bit16_weights": ("self",),
    f"{_STAGE12}.refresh_fp32_params": ("self",),
    # Stage 3: overridden or called.
    f"{_STAGE3}._create_fp16_partitions_with_defragmentation": ("self", "fp16_param_groups"),
    f"{_STAGE3}._get_parameter_partitions": ("self",),
    f"{_STAGE3}._set_fp16_partitioned_groups_flat": ("self",),
    f"{_STAGE3}._create_fp32_partitions": ("self",),
    f"{_STAGE3}.initialize_optimizer_states": ("self",),
    f"{_STAGE3}._setup_for_real_optimizer": ("self",),
    f"{_STAGE3}._get_fp32_grad_state_partition": ("self", "param", "release_swap_buffers"),
    f"{_STAGE3}.partition_grads": ("self", "params_to_release", "grad_partitions"),
    f"{_STAGE3}._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads": (
        "self",
        "params_to_reduce",
        "communication_data_type",
    ),
    f"{_STAGE3}.step": ("self", "closure"),
    f"{_STAGE3}._update_scale": ("self", "has_overflow"),
    f"{_STAGE3}._overflow_check_and_loss_scale_update": ("self", "update_scale"),
    f"{_STAGE3}._loss_scale_update_and_overflow_cleanup": ("self",),
    f"{_STAGE3}.check_overflow": ("self", "partition_gradients"),
    f"{_STAGE3}.has_overflow": ("self", "partition_gradients"),
    f"{_STAGE3}._prepare_sub_group": ("self", "sub_group_id", "timer_names"),
    f"{_STAGE3}.unscale_and_clip_grads": ("self", "sub_group_id", "total_norm"),
    f"{_STAGE3}._optimizer_step": ("self", "sub_group_id"),
    f"{_STAGE3}._reassign_or_swap_out_partitioned_parameters": ("self", "sub_group_id"),
    f"{_STAGE3}._release_sub_group": ("self", "sub_group_id", "timer_names"),
    f"{_STAGE3}._get_param_partition_group": ("self", "param"),
    f"{_STAGE3}._get_fp32_opt_state_partition": ("self", "param", "release_swap_buffers", "optim_state_key"),
    f"{_STAGE3}.set_full_hp_param": ("self", "value", "param", "optim_state_key"),
    f"{_STAGE3}.set_local_hp_param": ("self", "value", "param", "optim_state_key"),
    f"{_STAGE3}.set_fp32_grad_for_param": ("self", "value", "param"),
    f"{_STAGE3}._set_fp32_optimizer_param_groups": ("self",),
    f"{_STAGE3}._clear_fp32_optimizer_param_groups": ("self",),
    f"{_STAGE3}._rigid_state_dict": ("self",),
    f"{_STAGE3}._rigid_load_state_dict": ("self", "state_dict", "load_optimizer_states"),
    f"{_STAGE3}._restore_from_bit16_weights": ("self",),
    f"{_STAGE3}._load_global_state_stage3": ("self", "sd"),
    f"{_STAGE3}._load_universal_checkpoint": (
        "self",
        "checkpoint_folder",
        "load_optimizer_states",
        "load_from_fp32_weights",
    ),
    # Functions.
    f"{_INIT}:free_param": ("param",),
    f"{_INIT}:MultipleAllGatherHandles.__init__": ("self", "handles"),
    "deepspeed.runtime.utils:is_invalid_grad_norm": ("norm",),
    "deepspeed.runtime.utils:all_gather_dp_groups": (
        "groups_flat",
        "partitioned_param_groups",
        "dp_process_group",
        "start_alignment_factor",
        "allgather_bucket_size",
    ),
    "deepspeed.utils.groups:_get_expert_parallel_rank": ("group_name",),
}
"""Where -> names of the parameters, in order."""

MENTIONS: Mapping[str, Sequence[str]] = {
    # `_configure_zero_optimizer` finds the classes by these names, which we replace while it runs.
    f"{_ENGINE}._configure_zero_optimizer": (
        "DeepSpeedZeroOptimizer if not self.zenflow",
        "from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3",
        "check_grad_overflow=",
    ),
    f"{_ENGINE}._configure_basic_optimizer": ("getattr(torch.optim, self.optimizer_name())",),
    # Partitions: equal shares of the flat group, whose length `flatten_dense_tensors_aligned` decides.
    f"{_STAGE12}.__init__": (
        "self.nccl_start_alignment_factor * dist.get_world_size",
        "partition_size = len(self.bit16_groups_flat[i]) // dist.get_world_size",
        "self.initialize_optimizer_states()",
        "self.round_robin_bit16_offsets.append",
    ),
    f"{_STAGE12}.get_flat_partition": ("self.all_grad_tensors[param_group_idx][i]",),
    # Equal shares of elements, rounded up: what our padding of gradients relies on.
    "deepspeed.runtime.comm.coalesced_collectives:reduce_scatter_coalesced": (
        "chunk_sz = math.ceil(tensor.numel() / world_sz)",
    ),
    f"{_STAGE3}.step": (
        "self._overflow_check_and_loss_scale_update(update_scale=False)",
        "self._prepare_sub_group(sub_group_id",
        "self.unscale_and_clip_grads(sub_group_id",
        "self._optimizer_step(sub_group_id)",
        "self._reassign_or_swap_out_partitioned_parameters(sub_group_id)",
        "self._release_sub_group(sub_group_id",
    ),
    f"{_STAGE3}._setup_for_real_optimizer": ("self.grad_partitions_flat_buffer", "partition_numel()"),
    f"{_INIT}:Init._convert_to_deepspeed_param": (
        "def all_gather(param_list=None, async_op=False, hierarchy=0)",
        "def partition(param_list=None, hierarchy=0, has_been_updated=False, free_data=True)",
        "param.all_gather_coalesced = all_gather_coalesced",
        "param.padding_size = padding_size",
    ),
}
"""Where -> pieces of source that must be there: behaviour no signature shows."""


def broken_promises() -> list[str]:
    """What the installed DeepSpeed does not have as expected, one sentence each; empty if all is well."""
    missing = []
    for where, names in SIGNATURES.items():
        found = _find(where)
        if found is None:
            missing.append(f"{where} does not exist")
        elif (got := list(inspect.signature(found).parameters)) != list(names):
            missing.append(f"{where} has the parameters {', '.join(got)}, expected {', '.join(names)}")
    for where, pieces in MENTIONS.items():
        found = _find(where)
        source = "" if found is None else inspect.getsource(found)
        missing += [f"{where} no longer contains `{piece}`" for piece in pieces if piece not in source]
    return missing


def require_contract() -> None:
    """Refuse a DeepSpeed whose inside has changed.

    Raises:
        ImportError: names everything that is missing, the version that works, and what works without.
    """
    missing = broken_promises()
    if missing:
        import deepspeed

        raise ImportError(
            f"expected DeepSpeed {TESTED_VERSION} or one like it, got {deepspeed.__version__}, which differs where "
            f"the ECO engine needs it; install deepspeed=={TESTED_VERSION}, or train the same script at stage 0 with "
            "'fallback': true in the 'eco' section of the DeepSpeed JSON, or on FSDP2 (eco_dist.shard_model):\n  "
            + "\n  ".join(missing)
        )


def _find(where: str) -> Any:
    module, _, path = where.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError:
        return None
    for name in path.split("."):
        found = getattr(found, name, None)
        if found is None:
            return None
    return _undecorated(found)


def _undecorated(function: Any) -> Any:
    """What `instrument_w_nvtx` wraps: it leaves no `__wrapped__`, but holds the function as `func`."""
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "func" in names:
        return function.__closure__[names.index("func")].cell_contents
    return inspect.unwrap(function)
