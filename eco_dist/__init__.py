"""Train large models without master weights, on the engines people already use."""

from eco_dist.engines.fsdp2 import shard_model
from eco_dist.engines.in_backward import step_in_backward
from eco_dist.memory import measure, plan
from eco_dist.optim import ECOSGD, ECOAdamW
from eco_dist.recipe import RECIPES, Recipe
from eco_dist.weights import QuantizedWeight, quantize_weights_

__version__ = "0.1.0"

__all__ = [
    "ECOSGD",
    "RECIPES",
    "ECOAdamW",
    "QuantizedWeight",
    "Recipe",
    "measure",
    "plan",
    "quantize_weights_",
    "shard_model",
    "step_in_backward",
]
