"""The Triton kernel without a GPU: interpreted against the reference, compiled ahead of time, and its absence."""

import importlib.util
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eco_dist.optim import kernels
from eco_dist.optim.kernels.build import BuildError
from eco_dist.optim.kernels.triton import load
from eco_dist.optim.rules import Rule
from eco_dist.recipe import RECIPES
from tests.unit.kernel_cases import shard_of, task_of

pytest.importorskip("triton", reason="triton is Linux-only")
ROOT = Path(__file__).parents[2]
INTERPRETED = ("tests/unit/kernels_triton_interpreted.py", "tests/unit/kernels_triton_launching.py")


@pytest.mark.timeout(600)
def test_in_the_interpreter() -> None:
    """A process of its own: triton decides at its import whether it interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *INTERPRETED]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 60
    assert "skipped" not in run.stdout


# --- ahead of time ----------------------------------------------------------------------------------------------------


@pytest.fixture
def aot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # or an earlier compilation would be what is tested
    from eco_dist.optim.kernels.triton import aot

    return aot


@pytest.mark.parametrize("name", ["fp8", "paper"])
def test_it_compiles_for_sm_90(aot, name: str) -> None:
    """Nothing spills; products, sums, roots, quotients round by themselves; subnormals are kept; loads are vectors."""
    for function, kind in aot.launches(name):
        kernel = aot.compile_for("sm_90", function, kind)
        taken = aot.resources(kernel)
        assert taken.spilled == 0
        assert 32 <= taken.registers <= 128
        ptx = kernel.asm["ptx"]
        arithmetic = set(re.findall(r"\b(?:fma|mad|mul|add|sub|div|sqrt|rcp|rsqrt|ex2)\.[\w.]*f32", ptx))
        assert arithmetic == {"mul.rn.f32", "add.rn.f32", "sub.rn.f32", "div.rn.f32", "sqrt.rn.f32"}
        assert ".ftz" not in ptx
        assert len(re.findall(r"ld\.global\.v4", ptx)) >= 3
        assert len(re.findall(r"st\.global\.v4", ptx)) >= 2


def test_the_command_prints_a_table(aot, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    aot.main(["--target", "sm_100", "--recipe", "bf16", "--json", str(tmp_path / "table.json")])
    assert re.search(r"\| `bf16` \| `step_blocks` \| \d+ / 0 / \d+ \|", capsys.readouterr().out)
    assert "registers" in (tmp_path / "table.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_compiles_for_every_target(aot, name: str, target: str) -> None:
    for grad_is_bf16 in (False, True):
        for function, kind in aot.launches(name, grad_is_bf16=grad_is_bf16):
            kernel = aot.compile_for(target, function, kind)
            assert aot.resources(kernel).spilled == 0
            licence = r"\bf(?:mul|add|sub|div) (?:\w+ )*(?:contract|fast|reassoc|afn|arcp)"
            assert not re.search(licence, kernel.asm["llir"])


class PretendedDriver:
    """Stands in for the driver of an H100, as far as compiling goes."""

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _: 0)

    def get_current_target(self):
        from eco_dist.optim.kernels.triton.aot import TARGETS

        return TARGETS["sm_90"]


@pytest.fixture
def compiled(aot, monkeypatch: pytest.MonkeyPatch):
    """Names of the functions that launches compile; they are compiled for an H100 but not launched."""
    import triton
    from triton.runtime.jit import JITFunction

    from eco_dist.optim.kernels.triton.device import step

    names: list[str] = []
    run, compile_ = JITFunction.run, JITFunction._do_compile
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: run(*args, **kwargs | {"warmup": True}))
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *args: names.append(args[0].__name__) or compile_(*args))
    monkeypatch.setattr(triton.runtime.driver, "_active", PretendedDriver())
    yield names
    for function in (step.step_blocks, step.measure_blocks, step.store_scales):
        function.device_caches.clear()


def test_nothing_is_compiled_again_when_numbers_change(compiled: list[str]) -> None:
    """Learning rate, step, seed and how many tensors of which sizes are no constants of the compiled kernel."""
    from eco_dist.optim.kernels.triton.kernel import TritonKernel

    kernel = TritonKernel()
    for step, shapes in ((1, [(2, 128)]), (2, [(2, 128)]), (3, [(5, 256)] * 16), (1_000_000, [(64, 2048), (0, 16)])):
        shards = [shard_of(RECIPES["fp8"], shape, Rule.ADAMW, 0) for shape in shapes]
        kernel.step([task_of(shard, Rule.ADAMW, step) for shard in shards], step * 2**40, None)
    assert compiled == ["step_blocks"]
    kernel.step([task_of(shard_of(RECIPES["fp8"], (2, 100), Rule.ADAMW, 0), Rule.ADAMW, 1)], 0, None)
    assert compiled == ["step_blocks"] * 2  # rows that are no multiples of 16: other loads


def test_one_scale_for_a_tensor_takes_three_launches(compiled: list[str]) -> None:
    from eco_dist.optim.kernels.triton.kernel import TritonKernel

    shards = [shard_of(RECIPES["int4"], shape, Rule.ADAMW, 0) for shape in ((2, 128), (4, 64))]
    TritonKernel().step([task_of(shard, Rule.ADAMW, 1) for shard in shards], 0, None)
    assert compiled == ["measure_blocks", "step_blocks", "store_scales"]


# --- which kernel a device gets ---------------------------------------------------------------------------------------


@pytest.fixture
def fresh_choice():
    kernels._triton.cache_clear()
    yield
    kernels._triton.cache_clear()


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BuildError, match="the package triton is not installed"):
        load(torch.device("cuda"))


def test_on_the_cpu_it_must_be_interpreted(fresh_choice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECO_DIST_KERNEL", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BuildError, match="expected TRITON_INTERPRET=1"):
        kernels.kernel_for(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_a_gpu_it_does_not_work_on_gets_the_reference_and_says_so_once(
    fresh_choice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ECO_DIST_KERNEL", raising=False)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert kernels.kernel_for(torch.device("cuda")).name == "plain torch, in chunks"
    assert len(caplog.records) == 1
    assert "the fused GPU step is not available (triton failed on cuda: " in caplog.text
    monkeypatch.setenv("ECO_DIST_KERNEL", "triton")
    with pytest.raises(BuildError, match="triton failed on cuda"):
        kernels.kernel_for(torch.device("cuda"))


def test_a_kernel_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eco_dist.optim.kernels.triton.reproduces_reference", lambda *_: False)
    with pytest.raises(BuildError, match="does not reproduce the reference step on cuda"):
        load(torch.device("cuda"))
