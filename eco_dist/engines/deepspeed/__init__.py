"""DeepSpeed ZeRO 1, 2 and 3: an optimizer partition is codes, scales and moments; codes travel, one byte a parameter.

Importing this package changes nothing; `install()` does, and `import eco_dist.deepspeed` calls it.
"""

from eco_dist.engines.deepspeed.config import EcoConfig
from eco_dist.engines.deepspeed.experts import shard_experts
from eco_dist.engines.deepspeed.install import initialize, install

__all__ = ["EcoConfig", "initialize", "install", "shard_experts"]
