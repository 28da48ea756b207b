"""The quantized-weight tensor subclass, and which weights of a model become one."""

from eco_dist.weights.convert import (
    DEFAULT_SKIP,
    Conversion,
    ConversionReport,
    plan_conversion,
    quantize_weights_,
)
from eco_dist.weights.tensor import QuantizedWeight

__all__ = ["DEFAULT_SKIP", "Conversion", "ConversionReport", "QuantizedWeight", "plan_conversion", "quantize_weights_"]
