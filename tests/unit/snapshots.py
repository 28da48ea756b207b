"""What an optimizer test looks at: everything that is stored, copied, and compared bit for bit."""

import torch
from torch import Tensor, nn

from eco_dist.weights import QuantizedWeight


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of all stored bytes as they are: codes, scales, plain parameters, state with its step counts."""
    tensors = []
    for parameter in model.parameters():
        is_quantized = isinstance(parameter, QuantizedWeight)
        tensors += [parameter.codes, parameter.scales] if is_quantized else [parameter.detach()]
        tensors += [value for _, value in sorted(optimizer.state.get(parameter, {}).items())]
    return [tensor.clone() for tensor in tensors]


def assert_equal(one: list[Tensor], two: list[Tensor]) -> None:
    assert len(one) == len(two)
    for left, right in zip(one, two, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
