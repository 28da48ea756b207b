"""Starting from what other tools have left: weights, and moments where there are some."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from eco_dist.checkpoint.collective import agreed
from eco_dist.checkpoint.holders import Held, Holder, holder_of, named_parameters
from eco_dist.checkpoint.manifest import CheckpointError
from eco_dist.checkpoint.sources import MOMENTS, Source, source_of
from eco_dist.numerics import Format, Granularity, encode_checked, encode_moment
from eco_dist.optim import ECOOptimizer, StateKey
from eco_dist.recipe import Recipe
from eco_dist.weights import QuantizedWeight

_SCALES = {StateKey.EXP_AVG: StateKey.EXP_AVG_SCALE, StateKey.EXP_AVG_SQ: StateKey.EXP_AVG_SQ_SCALE}


@torch.no_grad()
def take_over(
    where: Path | str | Mapping[str, Tensor],
    model: nn.Module,
    optimizer: ECOOptimizer | Holder | None = None,
    *,
    moments: bool = True,
) -> int:
    """Start from weights in another format; collective.

    Values are rounded to nearest. E4M3 codes whose scales the recipe can hold are taken as they are, bit for bit.
    Moments come along from checkpoints with fp32 masters; without any, the optimizer state becomes fresh.

    Args:
        where: a safetensors file or a folder of them, a `torch.distributed.checkpoint`, a DeepSpeed universal
            checkpoint, or tensors by name.
        model: converted or not, whole or sharded by FSDP2; or a DeepSpeed engine.
        optimizer: its optimizer (`engine.optimizer`); None leaves out the moments.
        moments: whether moments come along, where there are some; the optimizer state becomes fresh without.

    Returns:
        The number of steps behind the moments; 0 without any.

    Raises:
        CheckpointError: a parameter is missing, has another shape, cannot be read, or has a NaN or infinite value; on
            all ranks. Names, shapes and scales are looked at before anything is changed.
    """
    source = agreed(lambda: source_of(where))
    holder = holder_of(optimizer, model)
    parameters = named_parameters(model, holder)
    runs = holder.checkpoint_runs(parameters)
    agreed(lambda: _check(source, runs))
    steps = agreed(lambda: [_fill(name, run, source, moments) for name, run in runs.items()])
    holder.checkpoint_loaded(None, [])
    return int(max(steps, default=0))


def _check(source: Source, runs: Mapping[str, Held]) -> None:
    for name, run in runs.items():
        shape = source.shape(name)
        if shape is None:
            raise CheckpointError(f"expected '{name}' among the weights to start from, got none of that name")
        if shape not in (tuple(run.shape), (torch.Size(run.shape).numel(),)):
            raise CheckpointError(f"expected '{name}' of shape {list(run.shape)}, got {list(shape)}; build that model")
        source.codes(name)  # whether it has its scales


def _fill(name: str, run: Held, source: Source, with_moments: bool) -> float:
    """Write this rank's run of a parameter and its moments; the number of steps behind them."""
    weight = run.tensor
    if isinstance(weight, QuantizedWeight):
        _fill_quantized(name, run, weight, source)
    else:
        weight.view(-1).copy_(_mine(source.values(name), run).flatten())
    if not run.state:
        return 0.0
    moments, step = source.moments(name) if with_moments else ({}, 0.0)
    recipe = weight.recipe if isinstance(weight, QuantizedWeight) else None
    for key in MOMENTS:
        if key in run.state:
            _fill_moment(key, run, moments.get(key), recipe)
    for key in (StateKey.LR_PEAK, StateKey.LR_LAST, StateKey.RESIDUAL):
        if key in run.state:
            run.state[key].zero_()
    run.state[StateKey.STEP].fill_(step)
    return step


def _fill_quantized(name: str, run: Held, weight: QuantizedWeight, source: Source) -> None:
    recipe = weight.recipe
    assert recipe.format is not None
    stored = source.codes(name)
    scales = None if stored is None else _own_scales(stored[1], recipe)
    exact = source.as_stored(name, recipe)
    if exact is not None:
        codes, scales = exact
    elif stored is not None and scales is not None:
        codes = stored[0].view(torch.uint8)
    else:
        codes, scales = encode_checked(source.values(name).view(run.shape), recipe.format, recipe.granularity)
    weight.codes.copy_(_mine(codes, run).view_as(weight.codes))
    is_whole = recipe.granularity is Granularity.TENSOR
    weight.scales.copy_((scales if is_whole else _mine(scales, run)).view_as(weight.scales))
    if StateKey.MASTER in run.state:
        run.state[StateKey.MASTER].copy_(_mine(source.values(name), run).view_as(run.state[StateKey.MASTER]))


def _own_scales(scales: Tensor, recipe: Recipe) -> Tensor | None:
    """A scale for each block of each row as the recipe has them; None if it cannot hold these."""
    if recipe.format is not Format.E4M3:
        return None
    if recipe.granularity is Granularity.BLOCK:
        return scales
    own = scales[:, :1] if recipe.granularity is Granularity.ROW else scales[:1, :1]
    return own if torch.equal(own.expand_as(scales), scales) else None


def _fill_moment(key: str, run: Held, values: Tensor | None, recipe: Recipe | None) -> None:
    target = run.state[key]
    if values is None:
        values = torch.zeros(run.shape)
    second, own = key == StateKey.EXP_AVG_SQ, _mine(values, run)
    if recipe is None:
        target.view(-1).copy_(own.flatten())
        return
    stored, scales = encode_moment(own.view(target.shape), recipe.moments, second=second)
    target.copy_(stored)
    if scales is not None:
        run.state[_SCALES[key]].copy_(scales)


def _mine(whole: Tensor, run: Held) -> Tensor:
    """This rank's run of a tensor that is cut as the parameter is: its elements, codes or scales."""
    elements = torch.Size(run.shape).numel()
    flat = whole.reshape(-1)
    start, count = (number * flat.numel() // max(elements, 1) for number in (run.start, run.tensor.numel()))
    return flat[start : start + count]
