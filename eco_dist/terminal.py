"""What commands print to."""

from __future__ import annotations

import os

from rich.console import Console

__all__ = ["console", "is_first_rank"]


def console() -> Console:
    """A console as wide as the terminal; 200 columns where there is none."""
    found = Console()
    return found if found.is_terminal else Console(width=200)


def is_first_rank() -> bool:
    """Whether this process is the one that prints."""
    return os.environ.get("RANK", "0") == "0"
