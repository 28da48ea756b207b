"""`torch.distributed.checkpoint`: our tensors through it, and ordinary checkpoints of it with fp32 masters."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from eco_dist import ECOAdamW, Recipe, quantize_weights_
from eco_dist.checkpoint import CheckpointError, dcp_state, export, load_dcp, save, take_over
from eco_dist.checkpoint.reader import CheckpointReader
from eco_dist.numerics import decode_moment
from eco_dist.optim.shard import local
from tests.distributed.models import Net, build, train
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint import contents, prepared, whole

Held = dict[str, Tensor]


def save_here(recipe: str, root: str) -> tuple[Held, list[float]]:
    """In the background; training goes on at once and must not leak into it."""
    model, optimizer = prepared(recipe, seed=0)
    train(model, optimizer, 2)
    held = contents(model, optimizer)
    group = dist.new_group(backend="gloo")  # of its own: it works beside the collectives of training
    saving = dcp.async_save(dcp_state(model, optimizer), checkpoint_id=root, process_group=group)
    losses = train(model, optimizer, 3, first=2)
    saving.result()
    return held, losses


def load_here(recipe: str, root: str) -> tuple[Held, list[float]]:
    model, optimizer = prepared(recipe, seed=5)
    load_dcp(root, model, optimizer)
    held = contents(model, optimizer)
    return held, train(model, optimizer, 3, first=2)


@pytest.mark.parametrize("recipe", ["fp8-8bit", "int4"])
def test_an_asynchronous_save_is_exact_on_any_number_of_ranks(recipe: str, tmp_path: Path) -> None:
    held, losses = run_ranks(2, save_here, recipe, str(tmp_path))[0]
    for world in (1, 2, 3):
        got, continued = run_ranks(world, load_here, recipe, str(tmp_path))[0]
        assert got.keys() == held.keys()
        assert all(torch.equal(got[name], tensor) for name, tensor in held.items())
        if world != 3:  # where adding up gradients rounds alike
            assert continued == losses


def refused(root: str, recipe: str) -> tuple[str, bool]:
    model, optimizer = prepared(recipe, seed=5)
    train(model, optimizer, 1)
    before = contents(model, optimizer)
    try:
        load_dcp(root, model, optimizer)
    except CheckpointError as error:
        after = contents(model, optimizer)
        return str(error), all(torch.equal(after[name], value) for name, value in before.items())
    return "loaded", False


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    run_ranks(2, save_here, "fp8-8bit", str(tmp_path))
    for recipe, sentence in (("fp8", "expected 'blocks.0.up.weight.exp_avg' as torch.float32"), ("int4", "as torch")):
        answers = run_ranks(2, refused, str(tmp_path), recipe)
        assert all(sentence in said and unchanged for said, unchanged in answers)


def staged_alone(root: str) -> str:
    model, _ = prepared("fp8", seed=0)
    group = dist.new_group(backend="gloo")
    with pytest.raises(NotImplementedError) as caught:
        dcp.async_save(get_model_state_dict(model), checkpoint_id=root, process_group=group)
    return str(caught.value)


def test_the_weights_alone_cannot_be_staged_which_is_said(tmp_path: Path) -> None:
    sentences = run_ranks(2, staged_alone, str(tmp_path))
    assert all("use dcp.async_save(eco_dist.checkpoint.dcp_state(model, optimizer)" in said for said in sentences)


def parameters_alone(root: str) -> bool:
    """torch's own way to a model's state: the quantized weights themselves."""
    model, _ = prepared("fp8", seed=0)
    dcp.save(get_model_state_dict(model), checkpoint_id=root)
    other, _ = prepared("fp8", seed=5)
    dcp.load(get_model_state_dict(other), checkpoint_id=root)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(_stored(a), _stored(b)) for a, b in pairs)


def _stored(parameter: Tensor) -> Tensor:
    weight = local(parameter).detach()
    return weight.decode() if hasattr(weight, "codes") else weight


def test_get_model_state_dict_goes_through_dcp(tmp_path: Path) -> None:
    assert run_ranks(2, parameters_alone, str(tmp_path)) == [True, True]


# --- ordinary checkpoints with fp32 masters ------------------------------------------------------------------------


def plain(seed: int) -> tuple[Net, torch.optim.AdamW]:
    """FSDP2 with fp32 weights and torch's AdamW."""
    model = build(seed=seed)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)


def save_masters(root: str) -> tuple[Held, list[float]]:
    model, optimizer = plain(seed=0)
    train(model, optimizer, 4)
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": moments}, checkpoint_id=root)
    held = {}
    for name, parameter in model.named_parameters():
        held[name] = whole(parameter.detach(), parameter)
        for key in ("exp_avg", "exp_avg_sq"):
            held[f"{name} {key}"] = whole(optimizer.state[parameter][key], parameter)
    return held, train(model, optimizer, 2, first=4)


def continue_without_masters(recipe: str, root: str) -> tuple[int, Held, list[float]]:
    model, optimizer = prepared(recipe, seed=5)
    steps = take_over(root, model, optimizer)
    held = contents(model, optimizer)
    return steps, held, train(model, optimizer, 2, first=4)


def test_a_checkpoint_with_masters_is_taken_over(tmp_path: Path) -> None:
    """Weights rounded to nearest, moments as they are, on another number of ranks; and training goes on."""
    masters, losses = run_ranks(2, save_masters, str(tmp_path))[0]
    for world, recipe in ((3, "fp8"), (1, "fp8-8bit")):
        steps, held, continued = run_ranks(world, continue_without_masters, recipe, str(tmp_path))[0]
        moments = Recipe.from_name(recipe).moments
        assert steps == 4
        for name in [key for key in masters if " " not in key]:
            if f"{name} scale" in held:
                codes = held[name].view(torch.float8_e4m3fn).float()
                scales = held[f"{name} scale"].repeat_interleave(128, 1)[:, : codes.shape[1]]
                assert float((codes * scales - masters[name]).abs().max()) <= float(scales.max()) * 16
                first = decode_moment(held[f"{name} exp_avg"], held.get(f"{name} exp_avg_scale"), moments, second=False)
                tolerance = 0.0 if recipe == "fp8" else 2**-4 * float(masters[f"{name} exp_avg"].abs().max())
                assert float((first - masters[f"{name} exp_avg"]).abs().max()) <= tolerance
            else:
                assert torch.equal(held[name], masters[name])
                assert torch.equal(held[f"{name} exp_avg_sq"], masters[f"{name} exp_avg_sq"])
        assert continued == pytest.approx(losses, rel=0.05)


def masters_again(root: str) -> tuple[Held, list[float]]:
    """What `eco-dist export --format dcp` wrote, read as torch reads its own checkpoints."""
    model, optimizer = plain(seed=7)
    state, moments = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optim": {"state": moments["state"]}}, checkpoint_id=root)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    held = {}
    for name, parameter in model.named_parameters():
        held[name] = whole(parameter.detach(), parameter)
        held[f"{name} exp_avg"] = whole(optimizer.state[parameter]["exp_avg"], parameter)
        assert float(optimizer.state[parameter]["step"]) == 2.0
    return held, train(model, optimizer, 2, first=2)


def test_and_back_to_masters(tmp_path: Path) -> None:
    model = build(seed=0)
    quantize_weights_(model, "fp8-8bit")
    optimizer = ECOAdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    train(model, optimizer, 2)
    save(tmp_path / "run", model, optimizer, step=2)
    losses = train(model, optimizer, 2, first=2)
    export(tmp_path / "run", tmp_path / "out", format="dcp")
    reader = CheckpointReader(tmp_path / "run")
    held, continued = run_ranks(2, masters_again, str(tmp_path / "out"))[0]
    for name in reader.manifest.parameters:
        assert torch.equal(held[name], reader.weight(name))
        assert torch.equal(held[f"{name} exp_avg"], reader.moments(name)["exp_avg"])
    assert continued == pytest.approx(losses, rel=0.05)


def missing() -> str:
    model, optimizer = prepared("fp8", seed=0)
    try:
        take_over({"embed.weight": torch.zeros(3)}, model, optimizer)
    except CheckpointError as error:
        return str(error)
    return "taken"


def test_another_model_is_refused() -> None:
    for said in run_ranks(2, missing):
        assert "expected 'embed.weight' of shape [23, 37], got [3]; build that model" in said
