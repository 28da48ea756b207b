"""Building the kernel: into a cache, once, and what happens where it cannot be built."""

import ctypes
import logging
import os
import platform
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from eco_dist.optim import kernels
from eco_dist.optim.kernels import build, cpu
from eco_dist.optim.step import StepStats, Task


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ECO_DIST_CACHE", str(tmp_path))
    return tmp_path


def test_it_is_built_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source of one line takes no time."""
    (cache / "step.cpp").write_text('extern "C" int answer() { return 42; }')
    monkeypatch.setattr(build, "SOURCE", cache)
    path = build.library("portable")
    assert ctypes.CDLL(str(path)).answer() == 42
    assert path.parent == cache / "eco_dist"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("built twice"))
    assert build.library("portable") == path
    assert [file.suffix for file in path.parent.iterdir()] == [".so"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64 compilers")
@pytest.mark.parametrize("isa", build.ISA_FLAGS)
def test_every_build_compiles_even_where_it_cannot_run(isa: str) -> None:
    """The AVX-512 build runs on few machines; this keeps its source compiling on all."""
    assert build.library(isa).stat().st_size > 10_000


def test_a_wheel_carries_the_library_and_needs_no_compiler(tmp_path: Path) -> None:
    root, isa = Path(build.__file__).parents[3], build.supported_isas()[0]
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    environment = os.environ | {"ECO_DIST_WHEEL_ISAS": isa}
    subprocess.run([*wheel, str(root)], env=environment, cwd=tmp_path, check=True, timeout=200)
    (file,) = tmp_path.glob("*.whl")
    assert "-py3-none-linux_" in file.name
    zipfile.ZipFile(file).extractall(tmp_path / "installed")
    ask = "import eco_dist.optim.kernels.cpu as c; print(c.__file__, c.load().name, sep='\\n')"
    variables = {"PYTHONPATH": str(tmp_path / "installed"), "CXX": "/bin/false", "ECO_DIST_CACHE": str(tmp_path)}
    run = [sys.executable, "-c", ask]
    answer = subprocess.run(run, env=os.environ | variables, cwd=tmp_path, check=True, capture_output=True, text=True)
    path, name = answer.stdout.splitlines()
    assert path.startswith(str(tmp_path))
    assert name == f"cpu, {isa}"


def test_another_source_is_another_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build._digest("avx2")
    assert build._digest("portable") != before
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-g"])
    assert build._digest("avx2") != before


@pytest.mark.parametrize(
    ("compiler", "sentence"), [("", r"expected a C\+\+ compiler"), ("/bin/false", "/bin/false failed for portable")]
)
def test_without_a_working_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, sentence: str) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(build.shutil, "which", lambda _: None)
    with pytest.raises(build.BuildError, match=sentence):
        build.library("portable")
    assert not list(cache.rglob("*.so"))


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ECO_DIST_CACHE", str(tmp_path / "file"))
    with pytest.raises(build.BuildError, match="expected a writable cache directory"):
        build.library("portable")


def test_the_fallback_is_said_once_and_refused_when_the_kernel_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise build.BuildError("no compiler here")

    monkeypatch.setattr(kernels, "load", broken)
    kernels._cpu.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            names = [kernels._cpu(False).name for _ in range(3)]
        assert names == ["plain torch, in chunks"] * 3
        assert [record.message.count("no compiler here") for record in caplog.records] == [1]
        with pytest.raises(build.BuildError):
            kernels._cpu(True)
    finally:
        kernels._cpu.cache_clear()


def test_a_build_that_differs_from_the_reference_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the best build flips one bit of a code; the next one is taken."""
    isas = build.supported_isas()
    honest = cpu.CpuKernel.step

    def step(self: cpu.CpuKernel, tasks: list[Task], seed: int, stats: StepStats | None) -> None:
        honest(self, tasks, seed, stats)
        if isas[0] in self.name:
            tasks[0].shard.codes[0, 0] ^= 1

    monkeypatch.setattr(cpu.CpuKernel, "step", step)
    if len(isas) == 1:
        with pytest.raises(build.BuildError, match="does not reproduce the reference"):
            cpu.load()
    else:
        assert isas[1] in cpu.load().name
