"""Building the CPU kernel with the system's compiler, once for each instruction set, into a cache.

The source has a C ABI and no torch headers, so a build takes seconds. A wheel may carry built libraries beside the
source; they are used as they are.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "cpu"

ISA_FLAGS = {
    "avx512": ["-march=x86-64-v4"],
    "avx2": ["-march=x86-64-v3"],
    "portable": [],
}
"""Instruction sets, best first."""

# No fused multiply-add: every build must give the same bits as the plain torch reference.
FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp"]
FLAGS += ["-fPIC", "-shared", "-Wno-psabi", "-Wno-uninitialized"]


class BuildError(RuntimeError):
    """The kernel could not be built; the message says why."""


def supported_isas() -> list[str]:
    """Instruction sets this processor can run, best first."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["portable"]
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("flags"):
                flags = set(line.split(":", 1)[1].split())
                break
    has_avx2 = {"avx2", "bmi2", "f16c", "fma", "movbe"} <= flags
    has_avx512 = has_avx2 and {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"} <= flags
    return [isa for isa, has in (("avx512", has_avx512), ("avx2", has_avx2), ("portable", True)) if has]


def library(isa: str) -> Path:
    """Path of the built library for an instruction set: from the wheel, from the cache, or built now.

    Raises:
        BuildError: if there is no compiler, or it fails.
    """
    name = library_name(isa)
    if (SOURCE / name).exists():
        return SOURCE / name
    cached = _cache() / f"{_digest(isa)}-{name}"
    if not cached.exists():
        compile_library(isa, cached)
    return cached


def library_name(isa: str) -> str:
    """File name of the library for an instruction set."""
    return f"eco_step-{isa}.so"


def compiler() -> str | None:
    """The C++ compiler that builds the kernel; None if there is none."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def _cache() -> Path:
    root = os.environ.get("ECO_DIST_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "eco_dist"


def _digest(isa: str) -> str:
    content = hashlib.blake2s(" ".join([*FLAGS, *ISA_FLAGS[isa]]).encode(), digest_size=8)
    for file in sorted(SOURCE.glob("*.[hc]*")):
        content.update(file.read_bytes())
    return content.hexdigest()


def compile_library(isa: str, target: Path) -> None:
    """Build the library for an instruction set.

    Raises:
        BuildError: if there is no compiler, or it fails.
    """
    command = compiler()
    if command is None:
        raise BuildError("expected a C++ compiler (g++ or clang++), found none; install one or set CXX")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Ranks may build at the same time: each into a file of its own, the last rename wins.
        handle, temporary = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(handle)
    except OSError as error:
        raise BuildError(f"expected a writable cache directory, got {error}; set ECO_DIST_CACHE") from error
    arguments = [*FLAGS, *ISA_FLAGS[isa], "-o", temporary, str(SOURCE / "step.cpp")]
    run = subprocess.run([command, *arguments], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        Path(temporary).unlink(missing_ok=True)
        raise BuildError(f"{command} failed for {isa}: {run.stderr.strip().splitlines()[-1:]}")
    Path(temporary).replace(target)
