"""The optimizer step: pure rules, one step of a shard, and the optimizers that route parameters to it."""

from eco_dist.optim.base import ECOOptimizer
from eco_dist.optim.optimizers import ECOSGD, ECOAdamW
from eco_dist.optim.shard import Shard, StateKey
from eco_dist.optim.step import StepStats

__all__ = ["ECOSGD", "ECOAdamW", "ECOOptimizer", "Shard", "StateKey", "StepStats"]
