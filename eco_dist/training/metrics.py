"""Metrics of a run: one JSON line a log step, always; TensorBoard events as an extra.

Note: the fields of a line
    ``step`` (1 is the first), ``loss`` (mean training loss in nats a token since the last line), ``val_loss`` (null
    between validations), ``lr`` (of this step), ``tokens_per_second`` (all ranks, since the last line), ``grad_norm``
    (before clipping), ``rms_quantization_error`` (sqrt(sum e^2 / sum weight^2), null for a recipe without codes),
    ``moved_share`` (share of the stored weights this step changed, null likewise), ``skipped_steps`` (so far).
    Of a model with experts also, since the last line: ``expert_load`` (layer by layer, the share of the rows that chose
    each expert), ``load_evenness`` (entropy of that share over log E, mean of the layers, 1 when even),
    ``router_entropy`` (of a token's scores, in nats, mean), ``dropped_share`` (of the rows, whose expert was full; 0
    without ``model.expert_capacity``).
    A value that is not finite is written as null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

__all__ = ["METRICS_FILE", "MetricsWriter", "StepMetrics", "read_metrics"]

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One line of ``metrics.jsonl``; the module's note explains each field."""

    step: int
    loss: float
    val_loss: float | None
    lr: float
    tokens_per_second: float
    grad_norm: float
    rms_quantization_error: float | None
    moved_share: float | None
    skipped_steps: int
    expert_load: list[list[float]] | None = None
    load_evenness: float | None = None
    router_entropy: float | None = None
    dropped_share: float | None = None


class MetricsWriter:
    """Appends `StepMetrics` to the files of a run directory; use it as a context manager, on rank 0 only.

    Args:
        directory: of the run.
        after: step the run goes on from; later lines of an earlier ``metrics.jsonl`` there are replaced.
        tensorboard: write TensorBoard events below ``directory/tensorboard`` too.

    Raises:
        ValueError: TensorBoard is asked for and not installed.
    """

    def __init__(self, directory: Path, *, after: int = 0, tensorboard: bool = False) -> None:
        """Open the files."""
        kept = [line for line in read_metrics(directory) if line["step"] <= after] if after else []
        self._file = (directory / METRICS_FILE).open("w", encoding="utf-8")
        self._file.writelines(json.dumps(line) + "\n" for line in kept)
        self._events = _open_events(directory / "tensorboard") if tensorboard else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, metrics: StepMetrics) -> None:
        """Write one line and flush it, so that a run that is killed keeps all of its lines."""
        values = {name: _finite(value) for name, value in asdict(metrics).items()}
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                if isinstance(value, int | float) and name != "step":
                    self._events.add_scalar(name, value, metrics.step)


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The lines of a run, oldest first; a last line cut short by a kill is left out.

    Raises:
        FileNotFoundError: the directory holds no run.
    """
    file = directory / METRICS_FILE
    if not file.is_file():
        raise FileNotFoundError(f"expected the run directory of a training run at {directory}, found no {METRICS_FILE}")
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def series(lines: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one field, without the lines where it is null.

    Raises:
        ValueError: there is no such field.
    """
    known = [part.name for part in fields(StepMetrics)]
    if name not in known:
        raise ValueError(f"expected a metric out of {', '.join(known)}, got {name!r}; choose one of them")
    kept = [line for line in lines if line.get(name) is not None]
    return [line["step"] for line in kept], [line[name] for line in kept]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _open_events(directory: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            "expected the package tensorboard for run.tensorboard=true, found none; pip install eco-dist[tensorboard]"
        ) from error
    return SummaryWriter(str(directory))
