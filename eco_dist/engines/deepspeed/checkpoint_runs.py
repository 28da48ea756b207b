"""What a rank holds under ZeRO, as `eco_dist.checkpoint` asks for it.

With it, that format's checkpoints go from any stage and number of ranks to any other, to FSDP2 and to one process:
units are whole rows or blocks, so a run of units is a run of elements of every stored tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from eco_dist.engines.deepspeed.plan import is_expert
from eco_dist.engines.flat.held import HeldRun, quantized_run
from eco_dist.engines.flat.shards import ShardOptimizer
from eco_dist.optim.state import allocate_state


def refuse_experts(parameters: Mapping[str, Tensor], advice: str) -> None:
    """Refuse DeepSpeed's own experts, which have the same names on every rank.

    Args:
        parameters: by name.
        advice: what to do instead.

    Raises:
        ValueError: names the first one.
    """
    for name, parameter in parameters.items():
        if is_expert(parameter):
            raise ValueError(
                f"expected parameters that are the same on all ranks, got '{name}' of deepspeed.moe.MoE; {advice}"
            )


def flat_runs(
    optimizer: ShardOptimizer, flat: Tensor, places: Iterator[tuple[Any, tuple[int, ...], int, int, int]]
) -> Iterator[tuple[int, HeldRun]]:
    """Runs of high-precision parameters that are stepped together, as one flat tensor.

    Args:
        optimizer: has its state, which is made if there is none yet.
        flat: fp32 elements of this rank.
        places: for each parameter its global shape, the first element here, where that lies in `flat`, how many.

    Yields:
        Id of the parameter, and its run.
    """
    state = cast(dict[str, Tensor], optimizer.state[flat])
    if not state:
        state.update(allocate_state(flat, second_moment=optimizer.has_second_moment))
    for parameter, shape, start, first, count in places:
        run = slice(first, first + count)
        own = {key: value[run] if value.ndim else value for key, value in state.items()}
        yield id(parameter), HeldRun(shape=shape, start=start, tensor=flat.detach()[run], state=own)


def frozen_run(parameter: Any) -> HeldRun:
    """A parameter that is not stepped: whole, or this rank's partition of it at stage 3."""
    first_rank = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if not hasattr(parameter, "ds_tensor"):
        return HeldRun(shape=tuple(parameter.shape), start=0, tensor=parameter.detach(), state={}, saved=first_rank)
    own = parameter.ds_tensor
    start = torch.distributed.get_rank(parameter.ds_process_group) * own.ds_numel
    count = min(max(parameter.ds_numel - start, 0), own.ds_numel)
    return HeldRun(shape=tuple(parameter.ds_shape), start=start, tensor=own.detach()[:count], state={})


class HoldsRuns:
    """The part of a ZeRO optimizer that makes it a `Holder` of `eco_dist.checkpoint`."""

    optimizer: ShardOptimizer
    shards: Any

    def plain_runs(self) -> Iterator[tuple[int, HeldRun]]:
        """Ids of high-precision parameters, and their runs."""
        raise NotImplementedError

    def show_loaded(self) -> None:
        """Bring what the model shows up to date with runs that were written over. Collective."""
        raise NotImplementedError

    def checkpoint_groups(self) -> list[dict[str, Any]]:
        """The client's parameter groups."""
        self.optimizer.follow_client()
        return self.optimizer.client.param_groups

    def checkpoint_seed(self) -> int:
        """Seed of stochastic rounding."""
        return self.optimizer.seed

    def checkpoint_runs(self, parameters: Mapping[str, Tensor]) -> Mapping[str, HeldRun]:
        """This rank's run of every parameter.

        Raises:
            ValueError: for DeepSpeed's own experts.
        """
        refuse_experts(parameters, "use engine.save_checkpoint and engine.load_checkpoint")
        shards, plain = self.shards, dict(self.plain_runs())
        runs = {}
        for name, parameter in parameters.items():
            shard = shards.get(id(parameter))
            run = plain.get(id(parameter)) if shard is None else quantized_run(self.optimizer, shard)
            runs[name] = frozen_run(parameter) if run is None else run
        return runs

    def checkpoint_loaded(self, seed: int | None, streams: list[tuple[Tensor, int]]) -> None:
        """Take over seed and streams, and show what was loaded. Collective."""
        if seed is not None:
            self.optimizer.seed = seed
        shards = self.shards
        for parameter, number in streams:
            shards[id(parameter)].weight.tensor_id = number
        self.optimizer.follow_client()
        self.show_loaded()
