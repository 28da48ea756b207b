"""A measurement explains every tensor of the process, and refuses a master copy by whatever name."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eco_dist import ECOAdamW, measure, plan, quantize_weights_
from eco_dist.memory import Category, HoldsMemory, MasterCopyError, attribution
from eco_dist.memory.activations import Batch
from eco_dist.memory.callbacks import huggingface_callback, lightning_callback
from eco_dist.memory.schema import read_report
from eco_dist.memory.track import StepTracker
from eco_dist.models import Llama, llama_config, next_token_loss
from eco_dist.training.memory_report import transformer_shape

WIDTH = 136  # no other test's tensors have this many elements


def stepped(recipe: str = "fp8") -> tuple[nn.Sequential, ECOAdamW]:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 7))
    quantize_weights_(model, recipe)
    optimizer = ECOAdamW(model.parameters())
    model(torch.ones(3, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@pytest.fixture(autouse=True)
def no_tensors_of_other_tests() -> None:
    gc.collect()


def test_a_clean_step_is_accepted() -> None:
    model, optimizer = stepped()
    measure(model, optimizer, strict=True)


def test_without_strict_a_master_copy_is_listed_first() -> None:
    model, optimizer = stepped()
    shadow = torch.zeros(WIDTH, WIDTH)
    first, *others = measure(model, optimizer, check=True).ranks[0].unattributed
    assert first.is_weight_sized
    assert first.bytes == shadow.untyped_storage().nbytes()
    assert not any(stray.is_weight_sized for stray in others)


def test_a_shadow_weight_is_found_and_named() -> None:
    model, optimizer = stepped()
    model[0].__dict__["shadow"] = [torch.zeros(WIDTH, WIDTH)]
    sentence = rf"rank 0 a float32 tensor of shape \[{WIDTH}, {WIDTH}\] held by 'shadow' of Linear '0'"
    with pytest.raises(MasterCopyError, match=sentence):
        measure(model, optimizer, strict=True)


def test_a_flat_master_of_all_weights_is_found() -> None:
    model, optimizer = stepped()
    optimizer.__dict__["master"] = torch.zeros(WIDTH * WIDTH + WIDTH * 7, dtype=torch.float64)
    with pytest.raises(MasterCopyError, match=r"a float64 tensor .* held by 'master' of ECOAdamW"):
        measure(model, optimizer, strict=True)


def test_a_master_in_the_state_is_found() -> None:
    model, optimizer = stepped()
    optimizer.state[model[0].weight]["fp32"] = torch.zeros(WIDTH, WIDTH)
    with pytest.raises(MasterCopyError, match=r"held by 'fp32' of the optimizer's state of '0\.weight'"):
        measure(model, optimizer, strict=True)


@pytest.mark.parametrize(
    "innocent",
    [torch.zeros(WIDTH, WIDTH, dtype=torch.bfloat16), torch.zeros(WIDTH + 1, 5), torch.zeros(WIDTH, WIDTH).int()],
)
def test_other_tensors_are_listed_only(innocent: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attribution, "_LISTED", 10_000)  # other tests have left larger ones
    model, optimizer = stepped()
    listed = measure(model, optimizer, check=True).ranks[0].unattributed
    assert any(stray.bytes == innocent.untyped_storage().nbytes() for stray in listed)
    assert not any(stray.is_weight_sized for stray in listed)


@pytest.mark.parametrize("recipe", ["fp8-master", "fp8-residual", "fp32-master"])
def test_masters_and_residuals_of_a_recipe_are_no_strays(recipe: str) -> None:
    model, optimizer = stepped(recipe)
    assert not any(stray.is_weight_sized for stray in measure(model, optimizer, check=True).ranks[0].unattributed)


def test_an_engine_describes_what_it_owns() -> None:
    class Owner(nn.SiLU):
        def __init__(self) -> None:
            super().__init__()
            self.flat = torch.zeros(WIDTH, WIDTH)

        def memory_tensors(self) -> Iterable[tuple[str, str, Tensor]]:
            yield "flat", Category.FRAMEWORK, self.flat[:1]
            yield "0.weight", "exp_avg", self.flat[1]

        def quantized_weights(self) -> Iterable[tuple[str, int, int]]:
            return [("elsewhere", 1_237, 1_249)]  # sizes of no other tensor here

    model, optimizer = stepped()
    before = measure(model, optimizer).ranks[0].by_category()
    model[1] = Owner()
    assert isinstance(model[1], HoldsMemory)
    held = measure(model, optimizer, strict=True).ranks[0].by_category()
    assert held[Category.FRAMEWORK] == 4 * WIDTH
    assert held[Category.MOMENTS] - before[Category.MOMENTS] == 4 * WIDTH
    assert held[Category.PADDING] == 4 * WIDTH * (WIDTH - 2)  # what no view covers
    model[0].__dict__["shadow"] = torch.zeros(1_249)
    with pytest.raises(MasterCopyError, match=r"shape \[1249\] held by 'shadow'"):
        measure(model, optimizer, strict=True)


def test_the_process_holds_at_least_its_tensors() -> None:
    model, optimizer = stepped()
    process = measure(model, optimizer, check=True).ranks[0].process
    assert process is not None
    assert process.tensor_bytes >= measure(model, optimizer).static_bytes(0)
    assert process.source == "resident set"
    assert process.bytes > process.tensor_bytes


# --- a step's timeline ------------------------------------------------------------------------------------------------


def a_step(model: nn.Module, optimizer: ECOAdamW, tokens: Tensor) -> None:
    loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:].contiguous())
    loss.backward()
    del loss
    optimizer.step()


@pytest.mark.parametrize("recipe", ["fp8", "fp32-master"])
@pytest.mark.parametrize(("preset", "batch"), [("tiny", 4), ("nano", 8)])
def test_the_modelled_peak_of_one_process_is_near_the_measured_one(recipe: str, preset: str, batch: int) -> None:
    config = llama_config(preset, vocabulary=512)
    model = Llama(config)
    size = Batch(sequences=batch, length=64, compute_bytes=4)
    planned = plan(model, recipe, transformer=transformer_shape(config), batch=size).ranks[0]
    quantize_weights_(model, recipe)
    optimizer = ECOAdamW(model.parameters())
    tokens = torch.randint(0, 512, (batch, 65))
    a_step(model, optimizer, tokens)
    optimizer.zero_grad()
    tracker = StepTracker(model, optimizer)
    with tracker:
        a_step(model, optimizer, tokens)
    measured = measure(model, optimizer, check=False, timeline=tracker.timeline).ranks[0]
    assert measured.static_bytes == planned.static_bytes
    assert measured.peak_bytes == pytest.approx(planned.peak_bytes, rel=0.1)
    assert {moment.name.split()[0] for moment in tracker.timeline} == {"forward", "backward", "optimizer"}


def test_a_tracker_wants_a_step_before() -> None:
    model, _ = stepped()
    with pytest.raises(ValueError, match="expected an optimizer that has taken a step"):
        StepTracker(model, ECOAdamW(model.parameters()))


def test_a_tracker_refuses_frozen_parameters() -> None:
    model, optimizer = stepped()
    model[2].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"got the frozen '2\.bias'"):
        StepTracker(model, optimizer)


# --- other people's loops ---------------------------------------------------------------------------------------------


def test_the_callback_for_hugging_face(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model, optimizer = stepped()
    callback = huggingface_callback(tmp_path)
    wrapped = SimpleNamespace(optimizer=optimizer)  # as Accelerate hands it over
    callback.on_optimizer_step(None, None, None, model=model, optimizer=wrapped)
    assert read_report(tmp_path / "report.json").static_bytes(0) == measure(model, optimizer).static_bytes(0)
    first = callback.report
    callback.on_optimizer_step(None, None, None, model=model, optimizer=wrapped)
    assert callback.report is first


def test_the_callback_for_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    module: Any = SimpleNamespace(Callback=object)
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
        monkeypatch.setitem(sys.modules, name, module)
    model, optimizer = stepped()
    callback = lightning_callback(tmp_path)
    trainer = SimpleNamespace(global_step=0, optimizers=[optimizer])
    callback.on_train_batch_end(trainer, model, None, None, 0)
    assert callback.report is None
    trainer.global_step = 1
    callback.on_train_batch_end(trainer, model, None, None, 1)
    assert (tmp_path / "report.html").exists()


def test_a_missing_lightning_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "lightning.pytorch.callbacks", None)
    with pytest.raises(ImportError, match="expected lightning for this callback"):
        lightning_callback(tmp_path)
