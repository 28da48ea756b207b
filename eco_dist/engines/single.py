"""One process, nothing sharded: the quantized weight is the parameter its module uses."""

from __future__ import annotations

from eco_dist.weights import quantize_weights_ as prepare

__all__ = ["prepare"]
