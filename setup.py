"""What pyproject.toml cannot say: a wheel carries the built CPU kernel where there is a compiler.

Without a compiler the wheel is pure Python, and the kernel is built on first use (eco_dist/optim/kernels/build.py).
ECO_DIST_WHEEL_ISAS names other instruction sets to build than all that the compiler's target has.
"""

import importlib.util
import os
import platform
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("eco_dist/optim/kernels")


def _kernel_builder() -> ModuleType:
    # By its path: importing the package would import torch, which a build environment does not have.
    spec = importlib.util.spec_from_file_location("kernel_build", Path(__file__).parent / KERNELS / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BUILD = _kernel_builder()


def _isas() -> list[str]:
    """Instruction sets the wheel is to carry; none without a compiler."""
    if sys.platform != "linux" or BUILD.compiler() is None:
        return []
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    default = ",".join(BUILD.ISA_FLAGS) if on_x86 else "portable"
    return [isa for isa in os.environ.get("ECO_DIST_WHEEL_ISAS", default).split(",") if isa]


class BuildWithKernel(build_py):
    """Compiles the kernel beside its source, in the build folder; an editable install builds it on first use."""

    def run(self) -> None:
        """Copy the sources, then build."""
        super().run()
        if self.editable_mode:
            return
        for isa in _isas():
            BUILD.compile_library(isa, Path(self.build_lib) / KERNELS / "cpu" / BUILD.library_name(isa))


class WithLibraries(Distribution):
    """Goes where platform-dependent packages go, if it carries libraries."""

    def has_ext_modules(self) -> bool:
        """Whether there are libraries in it."""
        return bool(_isas())


class AnyPython(bdist_wheel):
    """The libraries have a C ABI and know nothing of Python's, so any Python 3 takes the wheel."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform."""
        python, abi, tag = super().get_tag()
        return (python, abi, tag) if self.root_is_pure else ("py3", "none", tag)


setup(distclass=WithLibraries, cmdclass={"build_py": BuildWithKernel, "bdist_wheel": AnyPython})
