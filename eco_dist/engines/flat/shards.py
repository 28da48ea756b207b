"""The optimizer under engines that cut flat runs: it steps units, each with its own codes, scales and moments."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.engines.flat.units import Run, Units
from eco_dist.numerics import decode_moment, encode_moment
from eco_dist.optim import ECOOptimizer, Shard, StateKey
from eco_dist.optim.state import allocate_state
from eco_dist.recipe import Recipe
from eco_dist.weights import QuantizedWeight


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedWeight:
    """A parameter that becomes codes.

    Attributes:
        name: its first name in the model.
        shape: its global shape.
        recipe: how it is stored and stepped.
        tensor_id: name of its stream of random bits.
    """

    name: str
    shape: tuple[int, ...]
    recipe: Recipe
    tensor_id: int

    @property
    def units(self) -> Units:
        """How it is cut."""
        return Units.of(self.shape, self.recipe)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()


class WeightShard:
    """This rank's run of units of one weight.

    Attributes:
        plan: the whole weight.
        run: which units.
        weight: their codes and scales, `[units, columns]`; the optimizer's parameter.
        group: ranks that hold the other runs.
    """

    def __init__(
        self, plan: PlannedWeight, run: Run, codes: Tensor, scales: Tensor, group: dist.ProcessGroup | None
    ) -> None:
        """Wrap codes and scales, uninitialized, of a run; `scales` may be the weight's only one."""
        self.plan = plan
        self.run = run
        self.group = group
        units = plan.units
        self.weight = QuantizedWeight(
            codes, scales, plan.recipe, units.columns, units.count(plan.elements), plan.tensor_id
        )

    @torch.no_grad()
    def assign(self, values: Tensor) -> None:
        """Take this run from the values of the whole weight, rounded to nearest.

        Raises:
            ValueError: if a value is NaN or infinite.
        """
        codes, scales = self.plan.units.encode(values)
        mine = slice(self.run.first, self.run.first + self.run.units)
        self.weight.codes.copy_(codes[mine])
        self.weight.scales.copy_(scales if self.plan.units.has_one_scale else scales[mine])

    @torch.no_grad()
    def assign_changed(self, values: Tensor, before: Tensor | None = None) -> None:
        """Take over those units of a whole weight whose values are not the stored ones; the others keep their codes.

        Rounding stored values again would move them, since their largest need not be at the end of the grid.

        Args:
            values: whole weight in any floating dtype.
            before: stored values of the whole weight in that dtype; needed where all units share a scale, which
                changes as soon as any does. Without it they are then all taken over.

        Raises:
            ValueError: if a value is NaN or infinite.
        """
        if self.plan.units.has_one_scale:
            if before is None or not torch.equal(values, before):
                self.assign(values)
            return
        stored = self.weight.decode().to(values.dtype)
        keep = ~(self.mine(values) != stored).any(1)
        codes, scales = self.weight.codes[keep], self.weight.scales[keep]
        self.assign(values)
        self.weight.codes[keep] = codes
        self.weight.scales[keep] = scales

    def shard(self, state: dict[str, Tensor]) -> Shard:
        """The run as the step sees it."""
        cut = self.plan.units.has_one_scale and self.group is not None and self.group.size() > 1
        return Shard.of(self.weight, state, first_row=self.run.first, scale_group=self.group if cut else None)

    def mine(self, values: Tensor) -> Tensor:
        """This run's rows of a tensor in the weight's global shape (or flat)."""
        rows = values.reshape(-1, self.plan.units.columns)
        return rows[self.run.first : self.run.first + self.run.units]


_MOMENTS = {
    StateKey.EXP_AVG: (StateKey.EXP_AVG_SCALE, False),
    StateKey.EXP_AVG_SQ: (StateKey.EXP_AVG_SQ_SCALE, True),
}


class ShardOptimizer(ECOOptimizer):
    """The client's optimizer, with its parameter groups split and its parameters replaced by shards.

    A group of the client becomes one group for all that stays in high precision and one for each width of unit.
    Options (lr, betas, ...) changed on either side are taken over before a step.
    """

    def __init__(self, client: ECOOptimizer, groups: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        """Create it.

        Args:
            client: the optimizer the user made.
            groups: pairs of a group and the group of the client it comes from.
        """
        self._client = client
        self._rule = client._rule
        self._shards: dict[int, WeightShard] = {}
        super().__init__([dict(group) for group, _ in groups], client.defaults, seed=client.seed, nonfinite="skip")
        self._sources = [source for _, source in groups]
        self._seen = [dict(_options(source)) for source in self._sources]

    def _scalars(self, group: dict[str, Any]) -> dict[str, float]:
        return self._client._scalars(group)

    @property
    def client(self) -> ECOOptimizer:
        """The optimizer the user made."""
        return self._client

    def adopt(self, shard: WeightShard) -> None:
        """Make a shard's weight a parameter of this optimizer, with fresh state."""
        self._shards[id(shard.weight)] = shard
        self.state[shard.weight] = allocate_state(shard.weight, second_moment=self.has_second_moment)

    def follow_client(self) -> None:
        """Take over options changed in the client's groups (its scheduler), and show it those changed here."""
        for group, source, seen in zip(self.param_groups, self._sources, self._seen, strict=True):
            for key, value in _options(source):
                if value != seen.get(key):
                    group[key] = value
            source.update(_options(group))
            seen.update(_options(group))

    def state_dict(self) -> dict[str, Any]:
        """As any optimizer's, with what the client's scheduler has changed since the last step."""
        self.follow_client()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's; the client's groups show the options that were saved, such as the learning rate."""
        super().load_state_dict(state_dict)
        for group, source, seen in zip(self.param_groups, self._sources, self._seen, strict=True):
            source.update(_options(group))
            seen.update(_options(group))

    @torch.no_grad()
    def step_tensors(self, work: Sequence[tuple[Tensor, Tensor]], group: dict[str, Any], grad_scale: float) -> None:
        """Step some tensors of a group.

        Args:
            work: weights of shards, or fp32 tensors of high-precision elements; each with its gradient, same shape.
            group: their options.
            grad_scale: factor on the gradients.
        """
        self._check_group({**group, "params": [tensor for tensor, _ in work]})
        tasks = [self._task(tensor, group, _readable(grad), grad_scale) for tensor, grad in work]
        self._step_tasks([task for task in tasks if task is not None])

    def _shard(self, parameter: Tensor, state: dict[str, Tensor]) -> Shard:
        return self._shards[id(parameter)].shard(state)

    def read_state(self, shard: WeightShard, key: str) -> Tensor:
        """A moment of a shard in fp32, `[units, columns]`."""
        state = self.state[shard.weight]
        if key not in _MOMENTS or key not in state:
            raise ValueError(f"expected one of {', '.join(k for k in _MOMENTS if k in state)}, got '{key}'")
        scale, second = _MOMENTS[key]
        return decode_moment(state[key], state.get(scale), shard.plan.recipe.moments, second=second)

    def write_state(self, shard: WeightShard, key: str, values: Tensor) -> None:
        """Replace a moment of a shard by fp32 values of its shape, in the recipe's form."""
        scale_key, second = _MOMENTS[key]
        stored, scale = encode_moment(values.float(), shard.plan.recipe.moments, second=second)
        state = self.state[shard.weight]
        state[key].copy_(stored)
        if scale is not None:
            state[scale_key].copy_(scale)

    def fresh_targets(self, flat: Tensor, keys: Sequence[str], step: float) -> dict[str, Tensor]:
        """What a checkpoint's `weight` and moments of high-precision elements are copied into.

        Args:
            flat: fp32 elements that this optimizer steps; get fresh state if moments are among the keys.
            keys: `weight` and names of moments.
            step: steps taken.
        """
        if len(keys) > 1:
            self.state[flat] = allocate_state(flat, second_moment=self.has_second_moment)
            self.state[flat][StateKey.STEP].fill_(step)
        return {key: flat if key == "weight" else self.state[flat][key] for key in keys}


def _options(group: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    return [(key, value) for key, value in group.items() if key != "params"]


def _readable(grad: Tensor) -> Tensor:
    """Kernels read fp32 and bf16."""
    return grad if grad.dtype in (torch.float32, torch.bfloat16) else grad.float()
