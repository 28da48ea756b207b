"""What an ECO checkpoint adds to DeepSpeed's files, and how a checkpoint with fp32 masters is taken over.

A rank's file holds codes, scales and optimizer state of its shards under `eco`, and the stored weights in fp32 where
DeepSpeed keeps masters, for the tools that read those. Codes are what is loaded.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from eco_dist.engines.flat.shards import ShardOptimizer, WeightShard
from eco_dist.optim import StateKey

ECO = "eco"
_VERSION = 2
MOMENT_KEYS = (StateKey.EXP_AVG, StateKey.EXP_AVG_SQ)
_NO_MOMENTS = (
    "expected flat fp32 moments, got a checkpoint of codes, whose moments are not stored so: write it with "
    "eco_dist.checkpoint.save and convert it with `eco-dist export --format universal`"
)


def save_shards(shards: Iterable[WeightShard], optimizer_state: Mapping[str, Any]) -> dict[str, Any]:
    """Codes, scales and optimizer state of this rank's shards, as plain tensors and values."""
    return {
        "version": _VERSION,
        "optimizer": optimizer_state,
        "shards": {
            shard.plan.name: {
                "recipe": shard.plan.recipe.to_dict(),
                "shape": tuple(shard.plan.shape),
                "first_unit": shard.run.first,
                "codes": shard.weight.codes.clone(),
                "scales": shard.weight.scales.clone(),
            }
            for shard in shards
        },
    }


def without_moments(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state for DeepSpeed's place of it: `ds_to_universal`, which asks it for a group's, says why not.

    Nothing of this package is needed to unpickle it. Without any entry the tool would ask for none, and go on with the
    16-bit weights alone.
    """
    refuse = functools.partial(torch._assert, False, _NO_MOMENTS)
    return {**state_dict, "state": defaultdict(refuse, {-1: {}})}


@torch.no_grad()
def load_shards(shards: Sequence[WeightShard], saved: Mapping[str, Any]) -> None:
    """Restore codes and scales; nothing is changed if any does not fit.

    Raises:
        ValueError: if names, shapes, recipes or cuts differ from those saved.
    """
    entries = saved["shards"]
    for shard in shards:
        entry = entries.get(shard.plan.name)
        if entry is None:
            raise ValueError(
                f"expected codes of '{shard.plan.name}' in the checkpoint, got codes of {len(entries)} other weights; "
                "use the 'skip' and 'also_skip' of the run that saved it"
            )
        expected = (shard.plan.recipe.to_dict(), tuple(shard.plan.shape), shard.run.first, shard.weight.codes.shape)
        got = (entry["recipe"], tuple(entry["shape"]), entry["first_unit"], entry["codes"].shape)
        if expected != got:
            raise ValueError(
                f"expected codes of '{shard.plan.name}' with recipe, shape, first unit and length {expected}, got "
                f"{got}; load with the recipe and the number of ranks that saved them"
            )
    for shard in shards:
        shard.weight.codes.copy_(entries[shard.plan.name]["codes"])
        shard.weight.scales.copy_(entries[shard.plan.name]["scales"])


class Masters:
    """A rank's file of a checkpoint with fp32 masters, and its way to whole parameters.

    A rank holds consecutive elements of a parameter, ranks in order: which ones follows from how many each has.
    """

    def __init__(self, fragments: Mapping[str, Mapping[str, Tensor]], step: float, keys: Sequence[str]) -> None:
        """Hold one rank's fragments.

        Args:
            fragments: name of a parameter -> `weight` and moments of this rank's elements, flat.
            step: steps taken.
            keys: what to read of each.
        """
        self._fragments = fragments
        self.step = step
        self.keys = tuple(keys)

    def whole(self, name: str, elements: int, group: dist.ProcessGroup, device: torch.device) -> dict[str, Tensor]:
        """`weight` and moments of a whole parameter, flat fp32. Collective.

        Raises:
            ValueError: if the ranks' files do not have all of it.
        """
        mine = self._fragments.get(name, {})
        length = mine["weight"].numel() if mine else 0
        lengths = torch.zeros(group.size(), dtype=torch.int64, device=device)
        lengths[group.rank()] = length
        dist.all_reduce(lengths, group=group)
        if int(lengths.sum()) != elements:
            raise ValueError(
                f"expected {elements} elements of '{name}' in the checkpoint, got {int(lengths.sum())}; load it into "
                "the model, and on the number of ranks, that saved it"
            )
        start = int(lengths[: group.rank()].sum())
        together = torch.zeros((len(self.keys), elements), device=device)
        for row, key in enumerate(self.keys if mine else ()):
            together[row, start : start + length] = mine[key].to(device)
        dist.all_reduce(together, group=group)
        return dict(zip(self.keys, together, strict=True))


def take_over_shards(optimizer: ShardOptimizer, shards: Iterable[WeightShard], masters: Masters) -> None:
    """Quantize the masters of a checkpoint that had them, and bring its moments into the recipe's form. Collective.

    Raises:
        ValueError: if the checkpoint lacks a parameter.
    """
    for shard in shards:
        assert shard.group is not None
        whole = masters.whole(shard.plan.name, shard.plan.elements, shard.group, shard.weight.device)
        shard.assign(whole.pop("weight").view(shard.plan.shape))
        for key, values in whole.items():
            optimizer.write_state(shard, key, shard.mine(values))
            optimizer.state[shard.weight][StateKey.STEP].fill_(masters.step)


def masters_of_flat_groups(file: Mapping[str, Any], keys: Mapping[str, str], *, moments: bool) -> Masters:
    """Read a rank's file of a stage 1 or 2 checkpoint.

    Args:
        file: optimizer state of this rank.
        keys: DeepSpeed's names for `masters`, `optimizer` and `slices`.
        moments: whether to take them over too.

    Raises:
        ValueError: if there is no Adam state in it, but should be.
    """
    fragments: dict[str, dict[str, Tensor]] = {}
    for group, slices in enumerate(file[keys["slices"]]):
        flat = {"weight": file[keys["masters"]][group]}
        if moments:
            flat.update(_moments(file[keys["optimizer"]], group))
        for name, address in slices.items():
            run = slice(address.start, address.start + address.numel)
            fragments[name] = {key: values.detach()[run].float() for key, values in flat.items()}
    return _masters(fragments, file[keys["optimizer"]], moments=moments)


def masters_of_sub_groups(
    file: Mapping[str, Any],
    keys: Mapping[str, str],
    parameters: Sequence[tuple[str, int]],
    rank: int,
    ranks: int,
    *,
    moments: bool,
) -> Masters:
    """Read a rank's file of a stage 3 checkpoint.

    Args:
        file: optimizer state of this rank.
        keys: DeepSpeed's names for `masters` and `optimizer`.
        parameters: name and number of elements of every trainable parameter, in the order of the client's groups.
        rank: this rank.
        ranks: number of ranks.
        moments: whether to take them over too.

    Raises:
        ValueError: if there is no Adam state in it, but should be.
    """
    groups = range(len(file[keys["masters"]]))
    flat = {"weight": torch.cat([masters.detach() for masters in file[keys["masters"]]])}
    if moments:
        states = [_moments(file[keys["optimizer"]], group) for group in groups]
        flat.update({key: torch.cat([state[key] for state in states]) for key in MOMENT_KEYS})
    fragments, offset = {}, 0
    for name, elements in parameters:
        share = -(-elements // ranks)
        length = min(max(elements - rank * share, 0), share)
        fragments[name] = {key: values[offset : offset + length].float() for key, values in flat.items()}
        offset += share
    return _masters(fragments, file[keys["optimizer"]], moments=moments)


def _masters(fragments: Mapping[str, Mapping[str, Tensor]], optimizer: Mapping[str, Any], *, moments: bool) -> Masters:
    state = optimizer["state"].get(0, {})
    step = state.get("step", optimizer["param_groups"][0].get("step", 0))  # fused optimizers keep it in the group
    return Masters(fragments, float(step), ("weight", *MOMENT_KEYS) if moments else ("weight",))


def _moments(optimizer: Mapping[str, Any], group: int) -> dict[str, Tensor]:
    state = optimizer["state"].get(group, {})
    if any(key not in state for key in MOMENT_KEYS):
        raise ValueError(
            f"expected the state of an Adam optimizer (exp_avg, exp_avg_sq), got {sorted(state)}; load with "
            "load_optimizer_states=False to take over the weights alone"
        )
    return {key: state[key] for key in MOMENT_KEYS}
