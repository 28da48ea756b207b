"""The `eco` section of a DeepSpeed JSON, and what of the rest of that JSON cannot work with it."""

from __future__ import annotations

import difflib
from typing import Any, Literal

import torch
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.pipe.module import PipelineModule
from pydantic import Field, ValidationError, field_validator

from eco_dist.recipe import Recipe
from eco_dist.weights import DEFAULT_SKIP

SECTION = "eco"

DEEPSPEED_SKIP = (*DEFAULT_SKIP, "*.gate.wg.weight")
"""As everywhere, and the router of DeepSpeed's own MoE layer."""


class EcoConfig(DeepSpeedConfigModel):
    """`"eco": {...}` in the DeepSpeed JSON; every key may be left out or be `"auto"`.

    Attributes:
        recipe: name of a recipe.
        overrides: fields of the recipe to change, for example `{"rounding": "nearest"}`.
        skip: patterns of parameter names that stay in high precision, instead of the usual ones.
        also_skip: patterns in addition.
        working_copy: what forward and backward read at stage 1 and 2: `replica` (codes of all ranks, decoded layer by
            layer), `transient` (16 bits from forward to step) or `kept` (16 bits always).
        seed: seed of stochastic rounding, instead of the optimizer's.
    """

    recipe: str = "fp8"
    overrides: dict[str, str | None] = Field(default_factory=dict)
    skip: list[str] = Field(default_factory=lambda: list(DEEPSPEED_SKIP))
    also_skip: list[str] = Field(default_factory=list)
    working_copy: Literal["replica", "transient", "kept"] = "replica"
    seed: int | None = None

    @field_validator("recipe")
    @classmethod
    def _is_recipe(cls, name: str) -> str:
        Recipe.from_name(name)
        return name

    def resolved(self) -> Recipe:
        """The recipe with its overrides.

        Raises:
            ValueError: for an unknown field or value, or a combination that cannot work.
        """
        return Recipe.from_name(self.recipe).replace(**self.overrides)


def read_config(parameters: dict[str, Any]) -> EcoConfig:
    """The `eco` section of a DeepSpeed configuration.

    Raises:
        ValueError: for an unknown key or a value out of range, in one sentence.
    """
    section = parameters.get(SECTION, {})
    if not isinstance(section, dict):
        raise ValueError(f"expected 'eco' in the DeepSpeed configuration to be a dictionary, got {section!r}")
    known = list(EcoConfig.model_fields)
    for key in section:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean '{nearest[0]}'?" if nearest else f"choose one of {', '.join(known)}"
            raise ValueError(f"expected a key of the 'eco' section, got '{key}'; {hint}")
    try:
        config = EcoConfig(**section)
        config.resolved()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"in the 'eco' section, '{where}': {first['msg']}; got {first['input']!r}") from None
    return config


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
    plain_wire = "leave it out: parameters travel as one byte codes already"
    return [
        (not 1 <= engine.zero_optimization_stage() <= 3, "ZeRO stage 0", "set zero_optimization.stage to 1, 2 or 3"),
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
        (
            engine.load_universal_checkpoint(),
            "universal checkpoints",
            "load an ordinary one, on as many ranks as saved it",
        ),
        (engine.mp_world_size > 1, "tensor parallelism", "use data and expert parallelism"),
    ]


def _is_on(offload: Any) -> bool:
    return offload is not None and offload.device not in (None, "none")
