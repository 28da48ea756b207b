"""Who moves the tokens and multiplies the experts."""

from __future__ import annotations

import importlib.util

import torch

from eco_dist.moe.config import MoEConfig
from eco_dist.moe.experts import Backend, native


def backend_of(config: MoEConfig) -> Backend:
    """The backend a layer asks for; `auto` is megablocks on a machine with CUDA where it can be used, else native.

    Raises:
        ValueError: if megablocks is asked for by name and cannot be used; says why.
    """
    has_megablocks = torch.cuda.is_available() and importlib.util.find_spec("megablocks") is not None
    if config.backend == "native" or (config.backend == "auto" and not has_megablocks):
        return native
    from eco_dist.moe.megablocks import MegaBlocks

    try:
        return MegaBlocks(config)
    except ValueError:
        if config.backend == "auto":  # what it cannot do the native code can
            return native
        raise
