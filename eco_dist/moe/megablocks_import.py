"""Importing megablocks 0.10 where it is, with plain torch for what it lacks.

`pip install megablocks` would replace torch by 2.7: it is installed in two steps, `INSTALL`. Its extensions
`megablocks_ops` and `grouped_gemm` are used where they were built; otherwise `standins.py` takes their place, on CPU
and CUDA alike. Without Triton, or for tensors on the CPU, so do its functions for the Triton kernels of the grouped
path.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from eco_dist.moe import standins

INSTALL = "pip install --no-deps --no-build-isolation megablocks==0.10.0 stanford-stk==0.7.1"
"""How to install it next to the torch that is there; torch and setuptools must be installed first."""

VERSION = "0.10."

NEEDED = {
    "megablocks.layers.arguments": ("Arguments",),
    "megablocks.layers.dmoe": ("ParallelDroplessMLP",),
    "megablocks.layers.glu": ("GroupedGLU",),
    "megablocks.layers.moe": ("ParallelMLP",),
    "megablocks.layers.mlp": ("GroupedMLP", "resolve_dtensor"),
    "megablocks.backend.kernels": tuple(standins.KERNELS),
    "megablocks.grouped_gemm_util": ("ops", "backend"),
}
"""What we use of megablocks, module by module."""


STAND_INS = {"megablocks_ops": standins.megablocks_ops, "grouped_gemm": standins.grouped_gemm}
"""Modules of compiled code, and what makes them from plain torch."""


@functools.cache
def import_megablocks() -> types.ModuleType:
    """The package, importable from now on, its missing parts filled in.

    Raises:
        ValueError: if it is not installed, is not version 0.10, or lacks a name we use.
    """
    for name in ("megablocks", "stk"):
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"expected the package {name} for backend megablocks, found none; install it: {INSTALL}")
    version = importlib.metadata.version("megablocks")
    if not version.startswith(VERSION):
        raise ValueError(f"expected megablocks {VERSION}x, got {version}; install it: {INSTALL}")
    for name, make in STAND_INS.items():
        if name not in sys.modules and importlib.util.find_spec(name) is None:
            sys.modules[name] = make()
    with _some_triton(), warnings.catch_warnings():
        # torch.jit.script is deprecated; megablocks compiles one function with it.
        warnings.simplefilter("ignore")
        package = importlib.import_module("megablocks")
        missing = _missing()
    if missing:
        raise ValueError(f"expected megablocks {VERSION}x with {missing[0]}, got one without; install it: {INSTALL}")
    kernels = importlib.import_module("megablocks.backend.kernels")
    for name, function in standins.KERNELS.items():
        setattr(kernels, name, _where_triton_cannot(getattr(kernels, name), function))
    return package


def _missing() -> list[str]:
    """Names we use that this megablocks does not have."""
    wanted = [(importlib.import_module(module), name) for module, names in NEEDED.items() for name in names]
    return [f"{module.__name__}.{name}" for module, name in wanted if not hasattr(module, name)]


def describe() -> str:
    """What backend megablocks would run on here, or why it cannot, in one line."""
    try:
        import_megablocks()
    except ValueError as error:
        return str(error)
    version = importlib.metadata.version("megablocks")
    replaced = [name for name, make in STAND_INS.items() if sys.modules[name].__doc__ == make.__doc__]
    return f"{version}, {' and '.join(replaced)} in plain torch" if replaced else f"{version}, its own extensions"


def _where_triton_cannot(kernel: Callable[..., Tensor], function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel for tensors on a GPU, if Triton is there; the function for the rest."""
    has_triton = importlib.util.find_spec("triton") is not None

    @functools.wraps(function)
    def choose(x: Tensor, *arguments: Any) -> Tensor:
        return (kernel if has_triton and x.is_cuda else function)(x, *arguments)

    return choose


@contextmanager
def _some_triton() -> Iterator[None]:
    """A `triton` that only defines kernels, while megablocks and stk are imported on a machine without one."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    fakes = _triton_without_kernels()
    sys.modules.update(fakes)
    try:
        yield
    finally:
        for name in fakes:
            sys.modules.pop(name, None)


def _triton_without_kernels() -> dict[str, types.ModuleType]:
    triton, language = types.ModuleType("triton"), types.ModuleType("triton.language")

    def decorate(function: Any = None, **_: Any) -> Any:
        return decorate if function is None else function

    triton.__dict__.update(
        jit=decorate, autotune=decorate, Config=lambda *_, **__: None, language=language, __version__="0"
    )
    language.__dict__.update(constexpr=object, float32=None, int32=None)
    return {"triton": triton, "triton.language": language}
