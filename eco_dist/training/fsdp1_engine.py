"""PyTorch's first FSDP as a run's engine: each block a flat parameter, converted by `eco_dist.fsdp1`."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

from eco_dist import fsdp1
from eco_dist.engines.fsdp2 import default_blocks
from eco_dist.memory import MemoryReport
from eco_dist.models import SPARSE_PRESETS
from eco_dist.recipe import Recipe
from eco_dist.training.config import TrainConfig
from eco_dist.training.engine import COMPUTE_DTYPES, TorchEngine, build_optimizer

__all__ = ["FSDP1Engine", "refuse_unsupported"]


class FSDP1Engine(TorchEngine):
    """`FullyShardedDataParallel` with codes; gradients are reduced in fp32 whatever the compute dtype."""

    model: FullyShardedDataParallel
    optimizer: fsdp1.FlatOptimizer

    def _convert(self, model: nn.Module, recipe: Recipe, config: TrainConfig) -> None:
        refuse_unsupported(recipe, config)
        dtype = COMPUTE_DTYPES[config.engine.computes]
        blocks = set(default_blocks(model))
        policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: module in blocks)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")  # on one rank
            self.model = FullyShardedDataParallel(
                model,
                auto_wrap_policy=policy,
                mixed_precision=MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
                device_id=self._ranks.device,
            )
        client = build_optimizer(fsdp1.originals(self.model), config.optimizer, seed=config.run.seed)
        self.optimizer = fsdp1.convert(self.model, client, recipe=recipe, also_skip=config.model.keep)
        self.conversion = self.optimizer.conversion

    def measure(self, *, strict: bool) -> MemoryReport:
        """As `RunEngine.measure`."""
        return fsdp1.measure(self.model, self.optimizer, strict=strict)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `RunEngine.weights`; one flat parameter at a time is gathered."""
        return fsdp1.stored_weights(self.model)


def refuse_unsupported(recipe: Recipe, config: TrainConfig) -> None:
    """Refuse what this engine does not train.

    Raises:
        ValueError: for a recipe without codes, or a model with experts.
    """
    if not recipe.quantizes:
        raise ValueError(
            f"expected a recipe with codes for engine.name=fsdp1, got '{recipe.name}'; set engine.name=fsdp2"
        )
    if config.model.preset in SPARSE_PRESETS:
        raise ValueError(
            f"expected a preset without experts for engine.name=fsdp1, got {config.model.preset!r}; "
            "set engine.name=fsdp2"
        )
