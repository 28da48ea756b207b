"""FSDP1 (`torch.distributed.fsdp.FullyShardedDataParallel`): the optimizer owns codes, FSDP gathers decoded weights."""

from eco_dist.engines.fsdp1.convert import convert
from eco_dist.engines.fsdp1.optimizer import FlatOptimizer
from eco_dist.engines.fsdp1.originals import Originals

__all__ = ["FlatOptimizer", "Originals", "convert"]
