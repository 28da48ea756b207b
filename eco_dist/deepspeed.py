"""Importing this module lets DeepSpeed train without master weights: `"optimizer": {"type": "ECOAdamW"}` in its JSON.

`initialize` is DeepSpeed's own, for scripts that would rather name what they use.
"""

from __future__ import annotations

try:
    import deepspeed as _deepspeed  # noqa: F401
except ImportError as error:
    raise ImportError(
        "eco_dist.deepspeed needs DeepSpeed; install it with: pip install 'eco-dist[deepspeed]'"
    ) from error

from eco_dist.engines.deepspeed import EcoConfig, initialize, install

__all__ = ["EcoConfig", "initialize", "install"]

install()
