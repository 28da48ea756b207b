"""What owners and borrowers of cut units send each other: gradients of tails before a step, codes after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.engines.fsdp1.chunk import Chunk
from eco_dist.engines.fsdp1.geometry import CutUnit, Tail

Cut = tuple[int, CutUnit, Tail]
"""Number of a chunk, one of its flat parameter's cut units, and one of that unit's tails."""


class Exchange:
    """The messages between the ranks that hold the same flat parameters: one all-to-all each way."""

    def __init__(self, chunks: Sequence[Chunk], group: dist.ProcessGroup) -> None:
        """Remember this rank's chunks of all flat parameters, in an order all ranks share."""
        self._chunks, self._group = chunks, group
        self._is_needed = any(chunk.geometry.cut_units for chunk in chunks)

    def _cuts(self) -> Iterator[Cut]:
        """In an order all ranks share."""
        for number, chunk in enumerate(self._chunks):
            yield from ((number, cut, tail) for cut in chunk.geometry.cut_units for tail in cut.tails)

    def collect_gradients(self, grads: Sequence[Tensor]) -> list[dict[int, list[Tensor]]]:
        """Gradients of the tails of this rank's cut units, in fp32; for each chunk by the number of the member.

        Args:
            grads: of the chunks.
        """
        collected: list[dict[int, list[Tensor]]] = [{} for _ in self._chunks]
        if not self._is_needed:
            return collected
        rank = self._group.rank()
        sent = [
            (cut.owner, grads[number][: tail.count].float()) for number, cut, tail in self._cuts() if tail.rank == rank
        ]
        expected = [item for item in self._cuts() if item[1].owner == rank]
        received = self._all_to_all(sent, [(tail.rank, tail.count) for _, _, tail in expected], grads[0].device)
        for (number, cut, _), piece in zip(expected, received, strict=True):
            collected[number].setdefault(cut.member, []).append(piece)
        return collected

    def share_codes(self) -> None:
        """Bring every borrowed unit up to date with its owner's."""
        if not self._is_needed:
            return
        rank = self._group.rank()
        sent = [(tail.rank, self._last_unit(number, cut)) for number, cut, tail in self._cuts() if cut.owner == rank]
        borrowed = [chunk.borrowed for chunk in self._chunks if chunk.borrowed is not None]
        parts = [_bytes(item.codes, None if item.planned.units.has_one_scale else item.scales) for item in borrowed]
        expected = [
            (item.cut.owner, sum(part.numel() for part in own)) for item, own in zip(borrowed, parts, strict=True)
        ]
        device = self._chunks[0].device
        for own, piece in zip(parts, self._all_to_all(sent, expected, device, torch.uint8), strict=True):
            for part, values in zip(own, piece.split([part.numel() for part in own]), strict=True):
                part.copy_(values)

    def _last_unit(self, number: int, cut: CutUnit) -> Tensor:
        shard = self._chunks[number].shards[cut.member]
        assert cut.unit == shard.run.first + shard.run.units - 1, (cut, shard.run)
        scales = None if shard.plan.units.has_one_scale else shard.weight.scales[-1:]
        return torch.cat(_bytes(shard.weight.codes[-1:], scales))

    def _all_to_all(
        self,
        sent: Sequence[tuple[int, Tensor]],
        expected: Sequence[tuple[int, int]],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Send tensors of one dimension to ranks.

        Args:
            sent: receivers and tensors.
            expected: senders and numbers of elements, as their tensors are listed there.
            device: of the tensors.
            dtype: of the tensors.

        Returns:
            What was expected, in its order.
        """
        ranks = range(self._group.size())
        outgoing = [tensor for rank in ranks for receiver, tensor in sent if receiver == rank]
        order = sorted(range(len(expected)), key=lambda index: expected[index][0])  # stable: as the sender lists them
        counts = [expected[index][1] for index in order]
        arrived = torch.empty(sum(counts), dtype=dtype, device=device)
        dist.all_to_all_single(
            arrived,
            torch.cat(outgoing) if outgoing else arrived.new_empty(0),
            [sum(count for sender, count in expected if sender == rank) for rank in ranks],
            [sum(tensor.numel() for receiver, tensor in sent if receiver == rank) for rank in ranks],
            group=self._group,
        )
        pieces = dict(zip(order, arrived.split(counts), strict=True))
        return [pieces[index] for index in range(len(expected))]


def _bytes(codes: Tensor, scales: Tensor | None) -> list[Tensor]:
    """Codes and scales as bytes that share their memory."""
    return [part.view(torch.uint8).view(-1) for part in (codes, scales) if part is not None and part.numel()]
