"""What a run amounts to: one JSON file, ``summary.json``, that comparisons read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["SUMMARY_FILE", "Summary", "read_summary"]

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run; bytes are integers, lists have one entry a rank.

    Attributes:
        recipe: name of the recipe, or its parts where it has no name.
        engine, world_size, steps: how it ran.
        seconds: wall time of the steps and validations together.
        loss: mean training loss since the last log line before the end; val_loss: of the last validation.
        parameters, block_parameters: numbers of weights, all and without embedding and head.
        planned_static_bytes, measured_static_bytes: static memory, predicted before and measured after the first step.
        planned_bytes_per_parameter, measured_bytes_per_parameter: of the whole model, all ranks together.
        planned_quantized_bytes_per_parameter, measured_quantized_bytes_per_parameter: of its quantized weights
            alone; None where there are none.
        wire_bytes_per_step: bytes a rank puts into collectives in one step, by operation.
        skipped_steps: steps left out because a gradient was not finite.
    """

    recipe: str
    engine: str
    world_size: int
    steps: int
    seconds: float
    loss: float
    val_loss: float
    parameters: int
    block_parameters: int
    planned_static_bytes: list[int]
    measured_static_bytes: list[int]
    planned_bytes_per_parameter: float
    measured_bytes_per_parameter: float
    planned_quantized_bytes_per_parameter: float | None
    measured_quantized_bytes_per_parameter: float | None
    wire_bytes_per_step: list[dict[str, int]]
    skipped_steps: int

    def write(self, directory: Path) -> None:
        """Write ``summary.json`` into a run directory."""
        (directory / SUMMARY_FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def read_summary(directory: Path) -> Summary:
    """The summary of a finished run.

    Raises:
        FileNotFoundError: the directory holds no finished run.
        ValueError: the file is not a summary of this version.
    """
    file = directory / SUMMARY_FILE
    if not file.is_file():
        raise FileNotFoundError(f"expected a finished run at {directory}, found no {SUMMARY_FILE}; let it end")
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"expected JSON in {file}, got: {error}; run the training again") from error
    expected = {part.name for part in fields(Summary)}
    if set(content) != expected:
        different = ", ".join(sorted(expected ^ set(content)))
        raise ValueError(f"expected the fields of a summary in {file}, got other {different}; train again")
    return Summary(**content)
