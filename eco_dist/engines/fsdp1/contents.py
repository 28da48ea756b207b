"""What the optimizer of a converted FSDP1 model holds, for the memory report and for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from eco_dist.engines.flat.held import HeldRun, quantized_run
from eco_dist.engines.flat.shards import ShardOptimizer, WeightShard
from eco_dist.engines.fsdp1.chunk import Chunk
from eco_dist.engines.fsdp1.geometry import Geometry, Member
from eco_dist.engines.fsdp1.hollow import HollowHandle
from eco_dist.engines.fsdp1.originals import Originals

Described = tuple[str, str, Tensor]
"""Name of a parameter or buffer, what its bytes are for, and the tensor."""

_HIGH_PRECISION = "high-precision parameters"
_FRAMEWORK = "framework buffers"


class Contents(ShardOptimizer):
    """The part that makes the optimizer a `HoldsMemory` of `eco_dist.memory` and a `Holder` of `eco_dist.checkpoint`.

    Attributes:
        handles: all flat parameters that it steps.
        originals: the model before it was wrapped.
        untouched: handles of flat parameters that nothing steps, their layout, and the number of this rank's chunk.
        writes: whether this rank writes what it holds into checkpoints, and not another that holds the same.
    """

    handles: tuple[HollowHandle, ...]
    originals: Originals
    untouched: tuple[tuple[Any, Geometry, int], ...]
    writes: bool

    @property
    def _chunks(self) -> list[Chunk]:
        return [handle.chunk for handle in self.handles]

    @property
    def _weights(self) -> Iterator[WeightShard]:
        return (shard for chunk in self._chunks for shard in chunk.shards.values())

    # --- memory -----------------------------------------------------------------------------------------------------

    def quantized_weights(self) -> Iterable[tuple[str, int, int]]:
        """Name, elements on this rank and elements in all of every weight that is codes."""
        return [(shard.plan.name, shard.weight.numel(), shard.plan.elements) for shard in self._weights]

    def memory_tensors(self) -> Iterator[Described]:
        """Every tensor held for parameters and between ranks; frees first what a forward has left unsharded."""
        for shard in self._weights:
            yield shard.plan.name, "codes", shard.weight.codes
            yield shard.plan.name, "scales", shard.weight.scales
            yield from ((shard.plan.name, key, value) for key, value in self.state[shard.weight].items())
        for handle in self.handles:
            handle.free_unsharded()
            chunk, members = handle.chunk, handle.chunk.geometry.members
            for number, tensor in chunk.plain.items():
                yield members[number].name, _HIGH_PRECISION, tensor
                if members[number].group is not None:
                    yield from ((members[number].name, key, value) for key, value in self.state[tensor].items())
            if chunk.borrowed is not None:
                yield "borrowed units", _FRAMEWORK, chunk.borrowed.codes
                if not chunk.borrowed.planned.units.has_one_scale:
                    yield "borrowed units", _FRAMEWORK, chunk.borrowed.scales

        hollow = [handle.handle.flat_param.detach() for handle in self.handles]  # views of the same element
        one_each = {tensor.untyped_storage().data_ptr(): tensor for tensor in hollow}
        yield from (("hollow flat parameters", _FRAMEWORK, tensor) for tensor in one_each.values())

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def checkpoint_parameters(self) -> Mapping[str, Tensor]:
        """The parameters before FSDP flattened them, by name; what stands for them below."""
        return self.originals.named

    def checkpoint_groups(self) -> Sequence[dict[str, Any]]:
        """The groups, whose parameters are those before FSDP flattened them."""
        self.follow_client()
        return self.param_groups

    def checkpoint_seed(self) -> int:
        """Seed of stochastic rounding."""
        return self.seed

    def checkpoint_runs(self, parameters: Mapping[str, Tensor]) -> Mapping[str, HeldRun]:
        """This rank's run of every parameter."""
        runs: dict[str, HeldRun] = {}
        for chunk in self._chunks:
            for number, member in enumerate(chunk.geometry.members):
                if number in chunk.shards:
                    runs[member.name] = quantized_run(self, chunk.shards[number], saved=self.writes)
                else:
                    state = self.state[chunk.plain[number]] if member.group is not None else {}
                    start, _ = chunk.geometry.piece(member, chunk.rank)
                    runs[member.name] = self._plain_run(member, start, chunk.plain[number], state)
        for handle, geometry, rank in self.untouched:
            for member in geometry.members:
                start, count = geometry.piece(member, rank)
                first = member.offset + start - rank * geometry.chunk if count else 0
                runs[member.name] = self._plain_run(
                    member, start, handle.flat_param._local_shard[first : first + count], {}
                )
        return {name: runs[name] for name in parameters}

    def _plain_run(self, member: Member, start: int, tensor: Tensor, state: Mapping[str, Tensor]) -> HeldRun:
        return HeldRun(shape=member.shape, start=start, tensor=tensor, state=state, saved=self.writes)

    def checkpoint_loaded(self, seed: int | None, streams: Sequence[tuple[Tensor, int]]) -> None:
        """Take over seed and streams, and bring up to date what was made of the codes. Collective."""
        if seed is not None:
            self.seed = seed
        numbers = {id(parameter): number for parameter, number in streams}
        for shard in self._weights:
            shard.weight.tensor_id = numbers.get(id(self.originals.named[shard.plan.name]), shard.weight.tensor_id)
        self.follow_client()
        self.weights_changed()

    def weights_changed(self) -> None:
        """Bring up to date what was made of the codes. Collective."""
        raise NotImplementedError
