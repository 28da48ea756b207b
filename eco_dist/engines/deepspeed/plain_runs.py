"""This rank's run of parameters that stay in high precision, at stage 0 where no engine cuts them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

Place = tuple[nn.Parameter, tuple[int, ...], int, int, int]
"""A parameter, its shape, its first element in the run, where that lies in the run, how many."""


class PlainRun:
    """Equal shares of some parameters' elements, one behind the other, in fp32; the last share is padded.

    Attributes:
        flat: this rank's share.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> None:
        """Take the share from the parameters."""
        self._parameters, self._group = tuple(parameters), group
        self._length = -(-sum(p.numel() for p in parameters) // group.size())
        self.flat = self._share([parameter.data for parameter in parameters])

    def places(self) -> Iterator[Place]:
        """Where each parameter's elements lie in this rank's share."""
        offset, start = 0, self._length * self._group.rank()
        for parameter in self._parameters:
            first = min(max(start, offset), offset + parameter.numel())
            end = max(min(start + self._length, offset + parameter.numel()), first)
            place = first - start if end > first else 0
            yield parameter, tuple(parameter.shape), first - offset, place, end - first
            offset += parameter.numel()

    def gradient(self) -> Tensor:
        """Gradient of the share in fp32; zeros for a parameter that has none."""
        return self._share([p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters])

    def show(self) -> None:
        """Write the shares of all ranks over the parameters. Collective."""
        whole = torch.empty(self._length * self._group.size(), device=self.flat.device)
        dist.all_gather_into_tensor(whole, self.flat, group=self._group)
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, values in zip(self._parameters, whole[: sum(sizes)].split(sizes), strict=True):
            parameter.data.copy_(values.view_as(parameter))

    def take_changed(self) -> None:
        """Take over elements of the parameters that are not those of the share, rounded to the parameters' dtype."""
        for parameter, _, start, place, count in self.places():
            mine, shown = self.flat[place : place + count], parameter.data.reshape(-1)[start : start + count]
            mine.copy_(torch.where(mine.to(shown.dtype) == shown, mine, shown.float()))

    @torch.no_grad()
    def _share(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's share of tensors that are cut as the parameters are, in fp32."""
        flat = torch.zeros(self._length, device=self._parameters[0].device)
        for tensor, (_, _, start, place, count) in zip(tensors, self.places(), strict=True):
            flat[place : place + count] = tensor.reshape(-1)[start : start + count]
        return flat
