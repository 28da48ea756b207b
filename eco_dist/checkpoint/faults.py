"""Named points at which a test makes a process fail; in ordinary runs they do nothing.

``ECO_DIST_FAULT="save:before-rename:kill:1"`` ends rank 1 with SIGKILL when it comes to that point, ``...:raise:1``
lets it meet a full disk there, ``...:term:1`` sends it SIGTERM, ``...:stop:1`` SIGSTOP, so that it hangs. Without a
rank, all ranks fail. Several faults stand with commas between. With a path in ``ECO_DIST_FAULT_ONCE`` each is once:
``PATH-0``, ``PATH-1``, ... are made then, with the number of the process, and a restarted one passes.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

VARIABLE = "ECO_DIST_FAULT"
ONCE = "ECO_DIST_FAULT_ONCE"
_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}


def point(name: str) -> None:
    """A place with a name; fails here if the environment says so."""
    for number, wanted in enumerate(filter(None, os.environ.get(VARIABLE, "").split(","))):
        where, action, rank = _parse(wanted)
        if where == name and rank in (None, int(os.environ.get("RANK", "0"))) and _strikes(number):
            _fail(name, action)


def _strikes(number: int) -> bool:
    once = os.environ.get(ONCE)
    if not once:
        return True
    mark = Path(f"{once}-{number}")
    if mark.exists():
        return False
    mark.write_text(str(os.getpid()))
    return True


def _fail(name: str, action: str) -> None:
    if action == "raise":
        raise OSError(errno.ENOSPC, f"no space left on device (injected at {name})")
    os.kill(os.getpid(), _SIGNALS[action])


def _parse(text: str) -> tuple[str, str, int | None]:
    parts = text.split(":")
    rank = int(parts.pop()) if parts[-1].isdigit() else None
    action = parts.pop()
    if action not in ("raise", *_SIGNALS):
        raise ValueError(f"expected {VARIABLE} to be POINT:kill|term|stop|raise[:RANK], got {text!r}")
    return ":".join(parts), action, rank
