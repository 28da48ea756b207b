"""Let DeepSpeed's engine choose our ZeRO optimizers when, and only when, the optimizer is an ECO one."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from deepspeed.runtime import engine as ds_engine
from deepspeed.runtime.zero import stage3 as ds_stage3
from deepspeed.runtime.zero import utils as zero_utils

from eco_dist.engines.deepspeed.config import read_config
from eco_dist.engines.deepspeed.experts import as_plain_model
from eco_dist.engines.deepspeed.plan import plan_weights, refuse_quantized, split_optimizer
from eco_dist.engines.deepspeed.refusals import refuse_unsupported
from eco_dist.engines.deepspeed.universal import model_states
from eco_dist.engines.deepspeed.zero3 import ECOZeroOptimizer3
from eco_dist.engines.deepspeed.zero12 import ECOZeroOptimizer
from eco_dist.optim import ECOSGD, ECOAdamW, ECOOptimizer

_MARK = "_eco_dist_original"


def route() -> None:
    """Route ECO optimizers; others are untouched. Doing it twice is doing it once."""
    for optimizer in (ECOAdamW, ECOSGD):
        if optimizer not in zero_utils.ZERO_SUPPORTED_OPTIMIZERS:
            zero_utils.ZERO_SUPPORTED_OPTIMIZERS.append(optimizer)
    engine = ds_engine.DeepSpeedEngine
    if not hasattr(engine._configure_zero_optimizer, _MARK):
        engine._configure_zero_optimizer = _routed(engine._configure_zero_optimizer)
        engine._do_optimizer_sanity_check = _checked(engine._do_optimizer_sanity_check)
        engine._configure_distributed_model = _plain(engine._configure_distributed_model)
        engine._get_all_ckpt_names = _of_any_stage(engine._get_all_ckpt_names)
        engine.save_checkpoint = _with_our_experts(engine.save_checkpoint)
        engine.load_checkpoint = _with_our_experts(engine.load_checkpoint)


def _checked(original: Any) -> Any:
    """Refuse before DeepSpeed chooses a wrapper: some of them would keep master weights."""

    @functools.wraps(original)
    def check(self: Any, basic_optimizer: Any) -> Any:
        if isinstance(basic_optimizer, ECOOptimizer):
            refuse_unsupported(self)
        return original(self, basic_optimizer)

    return check


def _plain(original: Any) -> Any:
    """Refuse a converted model before DeepSpeed moves it."""

    @functools.wraps(original)
    def configure(self: Any, model: Any) -> Any:
        refuse_quantized(model)
        return original(self, model)

    return configure


def _of_any_stage(original: Any) -> Any:
    """Files with the counters and schedule of a universal checkpoint, which have other names where stage 3 wrote it."""

    @functools.wraps(original)
    def names(self: Any, checkpoints_path: Any, tag: Any) -> Any:
        found = original(self, checkpoints_path, tag)
        if found or not (self.load_universal_checkpoint() and isinstance(self.basic_optimizer, ECOOptimizer)):
            return found
        return model_states(Path(checkpoints_path) / str(tag))

    return names


def _with_our_experts(original: Any) -> Any:
    """Checkpoints of `MoELayer`s are those of their partitions."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with as_plain_model(self):
            return original(self, *args, **kwargs)

    return call


def _routed(original: Any) -> Any:
    @functools.wraps(original)
    def configure(self: Any, optimizer: Any) -> Any:
        if not isinstance(optimizer, ECOOptimizer):
            return original(self, optimizer)
        return _configure(self, optimizer, original)

    setattr(configure, _MARK, original)
    return configure


def _configure(engine: Any, client: ECOOptimizer, original: Any) -> Any:
    """DeepSpeed's own method, with our classes in the place of its own while it runs."""
    # It subclasses stage 3 when it is first imported, which must not happen while the name is replaced.
    import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401

    config = read_config(engine._config._param_dict)
    plan = plan_weights(engine.module, config)
    optimizer = split_optimizer(client, plan)
    saved = ds_engine.DeepSpeedZeroOptimizer, ds_stage3.DeepSpeedZeroOptimizer_Stage3
    ds_engine.DeepSpeedZeroOptimizer = functools.partial(ECOZeroOptimizer, module=engine.module, plan=plan)
    ds_stage3.DeepSpeedZeroOptimizer_Stage3 = functools.partial(ECOZeroOptimizer3, plan=plan)
    try:
        return original(engine, optimizer)
    finally:
        ds_engine.DeepSpeedZeroOptimizer, ds_stage3.DeepSpeedZeroOptimizer_Stage3 = saved
