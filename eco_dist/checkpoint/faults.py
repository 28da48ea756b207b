"""Named points at which a test makes a process fail; in ordinary runs they do nothing.

``ECO_DIST_FAULT="save:before-rename:kill:1"`` ends rank 1 with SIGKILL when it comes to that point, ``...:raise:1``
lets it meet a full disk there, ``...:term:1`` sends it SIGTERM. Without a rank, all ranks fail. With a path in
``ECO_DIST_FAULT_ONCE`` it happens once: the file is made then, and a restarted process passes.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

VARIABLE = "ECO_DIST_FAULT"
ONCE = "ECO_DIST_FAULT_ONCE"


def point(name: str) -> None:
    """A place with a name; fails here if the environment says so."""
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    where, action, rank = _parse(wanted)
    if where != name or rank not in (None, int(os.environ.get("RANK", "0"))):
        return
    done = os.environ.get(ONCE)
    if done:
        if Path(done).exists():
            return
        Path(done).touch()
    if action == "raise":
        raise OSError(errno.ENOSPC, f"no space left on device (injected at {name})")
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGTERM)


def _parse(text: str) -> tuple[str, str, int | None]:
    parts = text.split(":")
    rank = int(parts.pop()) if parts[-1].isdigit() else None
    action = parts.pop()
    if action not in ("kill", "term", "raise"):
        raise ValueError(f"expected {VARIABLE} to be POINT:kill|term|raise[:RANK], got {text!r}")
    return ":".join(parts), action, rank
