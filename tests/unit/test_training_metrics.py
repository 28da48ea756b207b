"""Metrics, plots and comparisons: fields, flushes, files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

from eco_dist.training.compare import compare_runs, format_bytes
from eco_dist.training.display import describe
from eco_dist.training.metrics import METRICS_FILE, MetricsWriter, StepMetrics, read_metrics, series
from eco_dist.training.plot import plot_losses, smooth
from eco_dist.training.summary import Summary, read_summary

METRICS = StepMetrics(
    step=1,
    loss=2.5,
    val_loss=None,
    lr=1e-3,
    tokens_per_second=1000.0,
    grad_norm=0.5,
    rms_quantization_error=0.02,
    moved_share=0.75,
    skipped_steps=0,
)
SUMMARY = Summary(
    recipe="fp8",
    engine="fsdp2",
    world_size=2,
    steps=100,
    seconds=5.0,
    loss=2.0,
    val_loss=2.1,
    parameters=1000,
    block_parameters=900,
    planned_static_bytes=[4500, 4500],
    measured_static_bytes=[4500, 4500],
    planned_bytes_per_parameter=9.0,
    measured_bytes_per_parameter=9.0,
    planned_quantized_bytes_per_parameter=9.03,
    measured_quantized_bytes_per_parameter=9.03,
    wire_bytes_per_step=[{"all_gather_into_tensor": 2048, "reduce_scatter_tensor": 3 * 2**20}, {}],
    skipped_steps=0,
)


def write_run(directory: Path, summary: Summary) -> None:
    directory.mkdir()
    summary.write(directory)
    with MetricsWriter(directory) as writer:
        for step in range(1, 21):
            val_loss = 3.0 - step / 20 if step % 10 == 0 else None
            writer.write(dataclasses.replace(METRICS, step=step, loss=3.0 - step / 21, val_loss=val_loss))


def test_each_line_is_complete_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(METRICS)
        lines = (tmp_path / METRICS_FILE).read_text().splitlines()
        assert [json.loads(line) for line in lines] == [dataclasses.asdict(METRICS)]


def test_values_that_are_not_finite_are_null_and_a_torn_line_is_left_out(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(dataclasses.replace(METRICS, loss=float("nan"), grad_norm=float("inf")))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 2, "lo')
    (line,) = read_metrics(tmp_path)
    assert line["loss"] is None
    assert line["grad_norm"] is None
    assert series([line], "loss") == ([], [])
    with pytest.raises(ValueError, match="val_loss"):
        series([line], "validation")


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with MetricsWriter(tmp_path, tensorboard=True) as writer:
        writer.write(METRICS)
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_a_line_for_people_says_what_matters() -> None:
    line = describe(dataclasses.replace(METRICS, val_loss=2.6))
    for part in ("loss 2.5000", "val 2.6000", "1.00e-03", "1,000 tok/s", "2.00%", "moved 75.0%", "skipped 0"):
        assert part in line
    assert "moved" not in describe(dataclasses.replace(METRICS, moved_share=None, rms_quantization_error=None))


def test_smoothing_is_centred() -> None:
    line = [float(i) for i in range(9)]
    assert smooth(line, 3) == pytest.approx(line)  # no lag: a straight line stays where it is
    assert smooth([0.0, 3.0, 0.0, 3.0], 1) == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert smooth([2.0, 1.0], 0) == [2.0, 1.0]


def test_a_plot_is_written(tmp_path: Path) -> None:
    write_run(tmp_path / "a", SUMMARY)
    plot_losses({"fp8": read_metrics(tmp_path / "a")}, tmp_path / "new" / "loss.png", title="t")
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="at least one logged loss"):
        plot_losses({"fp8": []}, tmp_path / "none.png")


def test_runs_are_compared_against_the_first_baseline(tmp_path: Path) -> None:
    baseline = dataclasses.replace(
        SUMMARY, recipe="fp32-master", measured_bytes_per_parameter=12.0, measured_quantized_bytes_per_parameter=None
    )
    off = dataclasses.replace(SUMMARY, measured_static_bytes=[4510, 4498])
    for name, summary in (("x", SUMMARY), ("y", baseline), ("z", off)):
        write_run(tmp_path / name, summary)
    table = compare_runs([tmp_path / name for name in "xyz"], tmp_path / "all.png")
    console = Console(width=220, record=True, quiet=False)
    with console.capture() as capture:
        console.print(table)
    rows = {line.split("│")[1].strip(): line for line in capture.get().splitlines() if line.startswith("│")}
    assert "25.0%" in rows["fp8 (x)"]
    assert "2.00 KiB" in rows["fp8 (x)"]
    assert "3.00 MiB" in rows["fp8 (x)"]
    assert "baseline" in rows["fp32-master"]
    assert " 12 " in rows["fp8 (z)"]
    assert (tmp_path / "all.png").exists()


def test_engines_stand_in_one_table(tmp_path: Path) -> None:
    """Runs of one recipe are told apart by engine; gradients count whichever way they were reduced."""
    zero = dataclasses.replace(SUMMARY, engine="zero2", wire_bytes_per_step=[{"all_reduce": 5 * 2**20}, {}])
    for name, summary in (("a", SUMMARY), ("b", zero)):
        write_run(tmp_path / name, summary)
    console = Console(width=220)
    with console.capture() as capture:
        console.print(compare_runs([tmp_path / "a", tmp_path / "b"]))
    assert "fp8 (fsdp2)" in capture.get()
    row = next(line for line in capture.get().splitlines() if "fp8 (zero2)" in line)
    assert "5.00 MiB" in row


def test_a_directory_without_a_finished_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="finished run"):
        compare_runs([tmp_path])
    with pytest.raises(ValueError, match="at least one"):
        compare_runs([])


def test_a_summary_survives_its_file_and_another_version_is_refused(tmp_path: Path) -> None:
    SUMMARY.write(tmp_path)
    assert read_summary(tmp_path) == SUMMARY
    (tmp_path / "summary.json").write_text('{"recipe": "fp8"}')
    with pytest.raises(ValueError, match="fields of a summary"):
        read_summary(tmp_path)


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (2**41, "2.00 TiB")])
def test_bytes_are_printed_in_binary_units(count: int, text: str) -> None:
    assert format_bytes(count) == text
