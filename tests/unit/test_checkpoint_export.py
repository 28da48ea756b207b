"""Exports: what other tools read is what we decode; the virtual weight is the stored one with its errors paid back."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from eco_dist import ECOSGD, ECOAdamW, quantize_weights_
from eco_dist.checkpoint import CheckpointError, export, save
from eco_dist.checkpoint.reader import CheckpointReader
from eco_dist.optim import ECOOptimizer
from eco_dist.recipe import RECIPES, Recipe
from eco_dist.weights import QuantizedWeight


def saved(
    root: Path,
    recipe: str | Recipe,
    steps: int = 3,
    sgd: bool = False,
    columns: int = 256,
    rows: int = 96,
    last: bool = True,
) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(columns, rows), nn.BatchNorm1d(rows), *([nn.Linear(rows, 5)] if last else [])]
    model = nn.Sequential(*layers)
    quantize_weights_(model, recipe)
    optimizer: ECOOptimizer = (ECOSGD if sgd else ECOAdamW)(model.parameters(), lr=1e-2)
    for step in range(steps):
        inputs = torch.randn(16, columns, generator=torch.Generator().manual_seed(step))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(root, model, optimizer, step=steps)
    return model


def decoded(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.detach().decode() if isinstance(parameter, QuantizedWeight) else parameter.detach()
        for name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.quantizes])
def test_fp32_is_the_stored_weight(recipe: str, tmp_path: Path) -> None:
    model = saved(tmp_path / "run", recipe)
    (file,) = export(tmp_path / "run", tmp_path / "out", format="fp32")
    got = load_file(file)
    for name, weight in decoded(model).items():
        assert torch.equal(got[name], weight), name
    assert torch.equal(got["1.running_var"], model[1].running_var)
    export(tmp_path / "run", tmp_path / "low", format="bf16")
    low = load_file(tmp_path / "low" / "model.safetensors")
    assert all(torch.equal(low[name], weight.bfloat16()) for name, weight in decoded(model).items())


@pytest.mark.parametrize("granularity", ["block", "row", "tensor"])
def test_compressed_tensors_decodes_to_our_weights(granularity: str, tmp_path: Path) -> None:
    """With that package's own code and the configuration we wrote; a width that is no multiple of 128 it has not."""
    quantization = pytest.importorskip("compressed_tensors.quantization", reason="an extra of its own, not in CI")
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    recipe = RECIPES["fp8"].replace(granularity=granularity)
    model = saved(tmp_path / "run", recipe)
    weights, config = export(tmp_path / "run", tmp_path / "out", format="compressed-tensors")
    content = json.loads(config.read_text())["quantization_config"]
    parsed = quantization.QuantizationConfig.model_validate(content)
    arguments = parsed.config_groups["group_0"].weights
    got = load_file(weights)
    assert got["0.weight"].dtype == torch.float8_e4m3fn
    restored = dequantize(got["0.weight"], got["0.weight_scale"], args=arguments, dtype=torch.float32)
    assert torch.equal(restored, decoded(model)["0.weight"])


def test_the_virtual_weight_pays_the_pending_errors_back(tmp_path: Path) -> None:
    """SGD with a constant learning rate: theta-hat - lr beta/(1-beta) m takes plain SGD steps on the gradients.

    Lemma 3.5 of the paper: the virtual sequence makes exact gradient steps, whatever was rounded.
    """
    torch.manual_seed(0)
    layer = nn.Linear(256, 8, bias=False)
    quantize_weights_(layer, "fp8")
    optimizer = ECOSGD(layer.parameters(), lr=0.1, momentum=0.9)
    expected = layer.weight.detach().decode().double()
    for step in range(20):
        inputs = torch.randn(16, 256, generator=torch.Generator().manual_seed(step))
        layer(inputs).square().mean().backward()
        expected -= 0.1 * layer.weight.grad.double()
        optimizer.step()
        optimizer.zero_grad()
    save(tmp_path / "run", layer, optimizer, step=20)
    virtual = CheckpointReader(tmp_path / "run").virtual_weight("weight").double()
    stored = layer.weight.detach().decode().double()
    assert float((virtual - expected).abs().max()) < 1e-5
    assert float((stored - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("injection", ["paper", "auto", "displacement"])
def test_a_virtual_export(injection: str, tmp_path: Path) -> None:
    """It differs from the stored weight where errors are pending, and not where none can be."""
    recipe = RECIPES["fp8-8bit"].replace(injection=injection)
    model = saved(tmp_path / "run", recipe)
    export(tmp_path / "run", tmp_path / "out", format="fp32", virtual=True)
    got = load_file(tmp_path / "out" / "model.safetensors")
    stored = decoded(model)
    difference = (got["0.weight"] - stored["0.weight"]).abs()
    assert 0 < float(difference.mean()) < float("inf")
    assert torch.equal(got["0.bias"], stored["0.bias"])


def test_virtual_weights_after_rounding_to_nearest_are_refused_unless_forced(tmp_path: Path) -> None:
    saved(tmp_path / "run", RECIPES["fp8"].replace(rounding="nearest"))
    with pytest.raises(ValueError, match=r"expected stochastic rounding for virtual weights, got '0\.weight'"):
        export(tmp_path / "run", tmp_path / "out", virtual=True)
    assert not (tmp_path / "out").exists()
    export(tmp_path / "run", tmp_path / "out", virtual=True, force=True)


@pytest.mark.parametrize(
    ("recipe", "options", "sentence"),
    [
        ("fp8", {"format": "gguf"}, r"one of .*, got 'gguf'"),
        ("int4", {"format": "compressed-tensors"}, "expected E4M3 weights"),
        ("fp8", {"format": "compressed-tensors", "virtual": True}, "which stores codes"),
    ],
)
def test_impossible_exports(recipe: str, options: dict[str, object], sentence: str, tmp_path: Path) -> None:
    saved(tmp_path / "run", recipe, steps=1)
    with pytest.raises(ValueError, match=sentence):
        export(tmp_path / "run", tmp_path / "out", **options)


@pytest.mark.parametrize("format", ["dcp", "universal"])
def test_moments_that_masters_cannot_go_on_with_are_refused(format: str, tmp_path: Path) -> None:
    saved(tmp_path / "sgd", "fp8", steps=1, sgd=True)
    saved(tmp_path / "run", RECIPES["fp8"].replace(injection="displacement"), steps=1)
    for run, sentence in (("sgd", "those of SGD for '0.bias'"), ("run", "displacements of the weight '0.weight'")):
        with pytest.raises(ValueError, match=sentence):
            export(tmp_path / run, tmp_path / "out", format=format)


def test_a_universal_checkpoint_has_one_number_of_steps_and_the_masters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 96), nn.Linear(96, 5))
    quantize_weights_(model, "fp8-master")
    optimizer = ECOAdamW(model.parameters(), lr=1e-2)
    model(torch.randn(16, 256)).square().mean().backward()
    optimizer.step()
    save(tmp_path / "run", model, optimizer, step=1)
    export(tmp_path / "run", tmp_path / "out", format="universal")
    written = torch.load(tmp_path / "out" / "global_step1" / "zero" / "0.weight" / "fp32.pt")["param"]
    assert torch.equal(written, optimizer.state[model[0].weight]["master"])
    states = torch.load(tmp_path / "out" / "global_step1" / "mp_rank_00_model_states.pt")
    other = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(other, lambda number: 10.0 + number)
    schedule.load_state_dict(states["lr_scheduler"])
    other.step()
    schedule.step()
    assert other.param_groups[0]["lr"] == 12.0  # after the second step
    optimizer.state[model[1].bias]["step"] += 1
    save(tmp_path / "run", model, optimizer, step=2)
    with pytest.raises(ValueError, match=r"got 1 of '0\.bias' and 2 of '1\.bias'"):
        export(tmp_path / "run", tmp_path / "other", format="universal")


def test_a_folder_with_files_and_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "run", "fp8", steps=1)
    with pytest.raises(ValueError, match="expected an empty folder"):
        export(tmp_path / "run", tmp_path / "run")
    with pytest.raises(CheckpointError, match="found none"):
        export(tmp_path / "nothing", tmp_path / "out")


def test_large_exports_are_cut_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = saved(tmp_path / "run", "fp8", steps=1)
    monkeypatch.setattr(sys.modules["eco_dist.checkpoint.export"], "FILE_BYTES", 50_000)
    files = export(tmp_path / "run", tmp_path / "out", format="fp32")
    index = json.loads(files[-1].read_text())["weight_map"]
    assert len(set(index.values())) > 1
    for name, weight in decoded(model).items():
        assert torch.equal(load_file(tmp_path / "out" / index[name])[name], weight)
