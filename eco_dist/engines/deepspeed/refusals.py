"""What of a DeepSpeed JSON cannot work with ECO optimizers."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.pipe.module import PipelineModule


def refuse_unsupported(engine: Any) -> None:
    """Refuse what would bring master weights back or cannot work; `engine` is a DeepSpeedEngine being built.

    Raises:
        ValueError: what was asked for, and what to do instead.
    """
    for asked, setting, advice in _refusals(engine):
        if asked:
            raise ValueError(f"ECO optimizers do not work with {setting}; {advice}")


def _refusals(engine: Any) -> list[tuple[bool, str, str]]:
    zero = engine._config.zero_config
    stage3 = engine.zero_optimization_stage() == 3
    model_dtype, gradient_dtype = engine.get_data_types()
    into_bf16 = engine.zero_optimization_stage() == 1 and model_dtype is torch.bfloat16
    offload = "keep it on the device: the recipe 'fp8-8bit' needs 3 bytes a parameter where Adam needs 12"
    stage0 = "set zero_optimization.stage to 1, 2 or 3, or 'fallback' to true in the 'eco' section"
    plain_wire = "leave it out: parameters travel as one byte codes already"
    return [
        (not 1 <= engine.zero_optimization_stage() <= 3, "ZeRO stage 0", stage0),
        (isinstance(engine.module, PipelineModule), "pipeline parallelism", "pass a plain torch.nn.Module"),
        (
            into_bf16 and gradient_dtype is torch.float32,
            "bf16 and data_types.grad_accum_dtype 'fp32' at stage 1, which DeepSpeed gives to its BF16_Optimizer",
            "use stage 2, or set data_types.grad_accum_dtype to 'bf16'",
        ),
        (engine.super_offload(), "SuperOffload", offload),
        (_is_on(engine.zero_offload_optimizer()), "zero_optimization.offload_optimizer", offload),
        (_is_on(engine.zero_offload_param()), "zero_optimization.offload_param", offload),
        (engine.zenflow_config() is not None, "ZenFlow", "leave out zero_optimization.zenflow"),
        (engine.zero_hpz_partition_size() > 1, "ZeRO++ hpZ", "set zero_hpz_partition_size to 1"),
        (zero.zero_quantized_weights, "ZeRO++ qwZ (zero_quantized_weights)", plain_wire),
        (zero.zero_quantized_nontrainable_weights, "zero_quantized_nontrainable_weights", "leave it out"),
        (zero.zero_quantized_gradients, "ZeRO++ qgZ (zero_quantized_gradients)", "leave it out"),
        (zero.elastic_checkpoint, "zero_optimization.elastic_checkpoint", "leave it out"),
        (zero.parameter_alignment, "zero_optimization.parameter_alignment", "leave it out: units are aligned already"),
        (stage3 and not zero.reduce_scatter, "reduce_scatter false at stage 3", "set it to true"),
        (stage3 and zero.use_all_reduce_for_fetch_params, "stage3_use_all_reduce_for_fetch_params", "leave it out"),
        (engine.fp16_master_weights_and_gradients(), "fp16_master_weights_and_grads", "leave it out: no master exists"),
        (engine.bf16_master_weights_and_gradients(), "bf16_master_weights_and_grads", "leave it out: no master exists"),
        (engine.torch_autocast_enabled(), "torch_autocast", "use bf16: {enabled: true}"),
        (
            engine.is_deepcompile_enabled(),
            "DeepCompile",
            "leave out compile.deepcompile",
        ),
        (engine.mp_world_size > 1, "tensor parallelism", "use data and expert parallelism"),
    ]


def _is_on(offload: Any) -> bool:
    return offload is not None and offload.device not in (None, "none")
