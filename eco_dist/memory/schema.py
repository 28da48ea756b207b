"""The JSON form of a report: versioned, bytes as raw integers, ranks that hold the same written once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eco_dist.memory.categories import Category
from eco_dist.memory.report import (
    Holding,
    MemoryReport,
    Moment,
    ProcessMemory,
    RankMemory,
    TensorMemory,
    Unattributed,
)

SCHEMA_VERSION = 2
_RUN_FILE_KEYS = ("measured", "planned")
"""Reports in a run's ``memory.json``, the better one first."""


def to_json(report: MemoryReport) -> dict[str, Any]:
    """Plain dictionary of a report."""
    return {
        "schema_version": SCHEMA_VERSION,
        "source": report.source,
        "model": report.model,
        "engine": report.engine,
        "mesh": report.mesh,
        "recipe": report.recipe,
        "optimizer": report.optimizer,
        "world_size": len(report.ranks),
        "parameters": report.parameters,
        "bytes_per_parameter": report.bytes_per_parameter(),
        "worst_rank": report.worst.rank,
        "imbalance": report.imbalance,
        "budget": report.budget,
        "versions": dict(report.versions),
        "assumptions": list(report.assumptions),
        "holdings": [
            {"ranks": _intervals(ranks), "static_bytes": holding.static_bytes, **_holding(holding)}
            for holding, ranks in report.groups
        ],
        "checks": [_checks(rank) for rank in report.ranks if rank.process is not None or rank.unattributed],
    }


def read_report(file: Path) -> MemoryReport:
    """A report from its JSON file, or from the ``memory.json`` of a run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a report of this version.
    """
    if not file.is_file():
        raise FileNotFoundError(f"expected a memory report at {file}, found no file; write one with 'memory plan'")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"expected JSON in {file}, got: {error}; write the report again") from error
    if isinstance(content, dict) and "schema_version" not in content:
        content = next((content[key] for key in _RUN_FILE_KEYS if key in content), content)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(f"expected a memory report of schema {SCHEMA_VERSION} in {file}, got {version!r}")
    return from_json(content)


def from_json(content: Mapping[str, Any]) -> MemoryReport:
    """The report `to_json` wrote."""
    holdings: dict[int, Holding] = {}
    for entry in content["holdings"]:
        holding = _read_holding(entry)
        holdings.update((rank, holding) for first, last in entry["ranks"] for rank in range(first, last + 1))
    checks = {entry["rank"]: entry for entry in content["checks"]}
    return MemoryReport(
        source=content["source"],
        engine=content["engine"],
        recipe=content["recipe"],
        parameters=content["parameters"],
        ranks=tuple(_read_rank(rank, holdings[rank], checks.get(rank, {})) for rank in sorted(holdings)),
        model=content["model"],
        mesh=content["mesh"],
        optimizer=content["optimizer"],
        versions=content["versions"],
        assumptions=tuple(content["assumptions"]),
        budget=content["budget"],
    )


def _intervals(ranks: Sequence[int]) -> list[list[int]]:
    """Ascending ranks as closed intervals."""
    intervals: list[list[int]] = []
    for rank in ranks:
        if intervals and rank == intervals[-1][1] + 1:
            intervals[-1][1] = rank
        else:
            intervals.append([rank, rank])
    return intervals


def _holding(holding: Holding) -> dict[str, Any]:
    return {
        "peak_bytes": holding.peak_bytes,
        "quantized_bytes": holding.quantized_bytes,
        "quantized_parameters": holding.quantized_parameters,
        "by_category": _counts(holding.by_category),
        "tensors": [
            {"name": tensor.name, "category": tensor.category.value, "bytes": tensor.bytes, "count": tensor.count}
            for tensor in holding.tensors
        ],
        "timeline": [{"moment": moment.name, "bytes": _counts(moment.bytes)} for moment in holding.timeline],
    }


def _counts(counts: Mapping[Category, int]) -> dict[str, int]:
    return {category.value: count for category, count in counts.items()}


def _checks(rank: RankMemory) -> dict[str, Any]:
    process = rank.process
    return {
        "rank": rank.rank,
        "unattributed": [vars(tensor) for tensor in rank.unattributed],
        "process": None if process is None else vars(process),
    }


def _read_holding(entry: Mapping[str, Any]) -> Holding:
    return Holding(
        tensors=tuple(
            TensorMemory(name=t["name"], category=Category(t["category"]), bytes=t["bytes"], count=t["count"])
            for t in entry["tensors"]
        ),
        quantized_bytes=entry["quantized_bytes"],
        quantized_parameters=entry["quantized_parameters"],
        timeline=tuple(
            Moment(name=m["moment"], bytes={Category(key): count for key, count in m["bytes"].items()})
            for m in entry["timeline"]
        ),
    )


def _read_rank(rank: int, holding: Holding, checks: Mapping[str, Any]) -> RankMemory:
    process = checks.get("process")
    return RankMemory(
        rank=rank,
        holding=holding,
        unattributed=tuple(Unattributed(**tensor) for tensor in checks.get("unattributed", ())),
        process=None if process is None else ProcessMemory(**process),
    )
