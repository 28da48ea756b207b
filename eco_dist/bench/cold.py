"""Fresh processes: how long import and the first step take, once the kernel is built."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"
_STEP = """
import time, torch
from eco_dist import ECOAdamW, quantize_weights_
layer = torch.nn.Linear(1024, 1024)
quantize_weights_(layer, "fp8")
optimizer = ECOAdamW(layer.parameters(), lr=1e-3)
layer(torch.ones(1, 1024)).sum().backward()
start = time.perf_counter()
optimizer.step()
print(time.perf_counter() - start)
"""
SCRIPTS = {
    "import torch": _TIMED.format("import torch"),
    "import eco_dist, torch included": _TIMED.format("import eco_dist"),
    "first step of 1024 x 1024, kernel built before": _STEP,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Seconds of one thing in fresh processes: median, least and most."""

    name: str
    median: float
    least: float
    most: float


def run(*, rounds: int = 5) -> list[Start]:
    """Start every script `rounds` times in turn, after one start that is not counted (it builds the kernel)."""
    seconds: dict[str, list[float]] = {name: [] for name in SCRIPTS}
    for number in range(rounds + 1):
        for name, script in SCRIPTS.items():
            output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
            if number:
                seconds[name].append(float(output.split()[-1]))
    return [
        Start(name=name, median=statistics.median(times), least=min(times), most=max(times))
        for name, times in seconds.items()
    ]


def table(starts: list[Start]) -> Table:
    """Seconds for a terminal."""
    from rich.table import Table

    table = Table(title="fresh processes, seconds")
    table.add_column("what")
    for column in ("median", "least", "most"):
        table.add_column(column, justify="right")
    for start in starts:
        table.add_row(start.name, *(f"{value:.2f}" for value in (start.median, start.least, start.most)))
    return table
