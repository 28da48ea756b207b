"""Which versions a report was made with."""

from __future__ import annotations

import functools
import importlib.metadata
import platform

_PACKAGES = {"eco_dist": "eco-dist", "torch": "torch", "deepspeed": "deepspeed", "transformers": "transformers"}


@functools.cache
def versions() -> dict[str, str]:
    """Name -> version of Python and of the installed packages that decide what a rank holds."""
    found = {"python": platform.python_version()}
    for name, distribution in _PACKAGES.items():
        try:
            found[name] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
