"""One report, four forms: JSON that reads back equal, a page that stands alone, Markdown, a picture; and diffs."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from eco_dist import ECOAdamW, cli, measure, plan, quantize_weights_
from eco_dist.memory.activations import Batch
from eco_dist.memory.baselines import resolve
from eco_dist.memory.command import OVER_BUDGET
from eco_dist.memory.diff import by_category, by_tensor
from eco_dist.memory.plan import mesh_for, plan_shape
from eco_dist.memory.public import find_architecture
from eco_dist.memory.render import Page, write_reports
from eco_dist.memory.render.html import to_html
from eco_dist.memory.render.markdown import to_markdown
from eco_dist.memory.report import MemoryReport, format_bytes
from eco_dist.memory.schema import from_json, read_report, to_json

ROOT = Path(__file__).parents[2]
VOID = {"meta", "line"}


def of_a_cluster(recipe: str, budget: int | None = 80 << 30) -> MemoryReport:
    architecture = find_architecture("mixtral-8x7b", experts="stacked")
    assert architecture is not None
    mesh = mesh_for("fsdp2", 64, ep=2)
    return plan_shape(
        architecture.stored(resolve(recipe)), engine="fsdp2", mesh=mesh, batch=Batch(checkpoints=True), budget=budget
    )


def live() -> tuple[MemoryReport, MemoryReport]:
    model = nn.Sequential(nn.Linear(64, 64))
    planned = plan(model, "fp8")
    quantize_weights_(model, "fp8")
    optimizer = ECOAdamW(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return planned, measure(model, optimizer)


class Balance(HTMLParser):
    """Every tag that is opened is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("report", [of_a_cluster("fp8"), live()[1]], ids=["planned", "measured"])
def test_json_reads_back_equal(report: MemoryReport) -> None:
    content = json.loads(json.dumps(to_json(report)))
    assert from_json(content) == report
    assert content["holdings"][0]["static_bytes"] == report.static_bytes(0)


def test_json_is_as_large_as_what_differs() -> None:
    """64 ranks of Mixtral, a few distinct holdings, layers folded: kilobytes."""
    report = of_a_cluster("fp8")
    assert len(report.groups) < 8
    assert len(json.dumps(to_json(report))) < 200_000


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("[", "expected JSON"),
        ('{"schema_version": 1}', "expected a memory report of schema 2 .* got 1"),
        ("[]", "expected a memory report of schema 2"),
    ],
)
def test_files_that_are_no_report(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=sentence):
        read_report(tmp_path / "a.json")


def test_the_page_stands_alone() -> None:
    planned, measured = live()
    for page in (
        Page(report=of_a_cluster("fp8"), baseline=of_a_cluster("bf16-master")),
        Page(report=planned, measured=measured),
        Page(report=measured),
    ):
        html = to_html(page)
        parser = Balance()
        parser.feed(html)
        assert parser.open == []
        assert not parser.seen & {"script", "link", "img", "iframe"}
        assert parser.addresses == []
        assert "http" not in html
        assert "url(" not in html


def test_the_page_says_what_matters() -> None:
    page = Page(report=of_a_cluster("fp8", budget=1 << 30), baseline=of_a_cluster("bf16-master"))
    worst = page.report.worst
    for text in (to_html(page), to_markdown(page)):
        assert f"Rank {worst.rank} needs the most: {format_bytes(worst.static_bytes)} between steps" in text
        assert "it does NOT fit into 1.00 GiB" in text
        assert "less between steps than bf16-master" in text
        assert "a model" in text
        assert all(sentence in text.replace("&#x27;", "'") for sentence in page.report.assumptions)


def test_planned_and_measured_side_by_side() -> None:
    planned, measured = live()
    differences = {name: difference for name, _, difference in Page(report=planned, measured=measured).categories()}
    assert set(differences.values()) == {0}
    assert "measured - planned" in to_html(Page(report=planned, measured=measured))


def test_names_are_escaped() -> None:
    model = nn.Module()
    model.register_parameter("<script>", nn.Parameter(torch.zeros(3)))
    assert "<script>" not in to_html(Page(report=plan(model, "fp8")))


def test_all_forms_are_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = Page(report=of_a_cluster("fp8"), baseline=of_a_cluster("bf16-master"))
    written = write_reports(page, tmp_path / "new")
    names = {"report.json", "baseline.json", "report.md", "report.html", "report.png"}
    assert {file.name for file in written} == names
    assert (tmp_path / "new" / "report.png").read_bytes().startswith(b"\x89PNG")
    assert read_report(tmp_path / "new" / "baseline.json") == page.baseline


def test_a_diff_adds_up() -> None:
    before, after = of_a_cluster("fp8"), of_a_cluster("bf16-master")
    change = after.worst.static_bytes - before.worst.static_bytes
    assert sum(line.change for line in by_category(before, after)) == change
    assert sum(line.change for line in by_tensor(before, after)) == change
    assert by_tensor(before, before) == []


# --- the command ------------------------------------------------------------------------------------------------------


def test_plan_and_diff_as_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["memory", "plan", "llama-3.2-1b", "--world-size", "8", "--budget", "80GiB", "--out", str(tmp_path)]
    assert cli.main(arguments) == 0
    assert "Largest batch that fits into 80.00 GiB" in capsys.readouterr().out
    assert cli.main(["memory", "diff", str(tmp_path / "report.json"), str(tmp_path / "baseline.json")]) == 0
    assert "master weights" in capsys.readouterr().out


def test_over_budget_is_exit_code_3_with_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["memory", "plan", "llama-3-8b", "--world-size", "2", "--budget", "24GiB", "--baseline", "none"]
    assert cli.main(arguments) == OVER_BUDGET == 3
    printed = capsys.readouterr().out
    assert "does NOT fit into 24.00 GiB" in printed
    assert "ranks on (powers of two tried)" in printed


def test_a_preset_of_the_training_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", "plan", "nano", "--engine", "single"]) == 0
    assert "1 rank" in capsys.readouterr().out
    assert cli.main(["memory", "plan", "smoe-nano", "--world-size", "4", "--ep", "2"]) == 0
    printed = capsys.readouterr().out
    assert "experts on 2 x 2" in printed
    assert "verified against live ranks" in printed
    assert cli.main(["memory", "plan", "nano", "--engine", "fsdp1"]) == 0
    assert "layout of engine 'fsdp1' verified against live ranks" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["llama-3-8c"], "did you mean 'llama-3-8b'?"),
        (["nano", "--recipe", "fp9"], "did you mean 'fp8'?"),
        (["nano", "--budget", "80"], "expected a positive size"),
        (["nano", "--engine", "single", "--world-size", "2"], "expected world_size 1 for engine 'single'"),
        (["mixtral-8x7b", "--ep", "3"], "expected ep to divide the 8 ranks"),
        (["nano", "--tp", "2"], "expected tp 1, got 2"),
        (["nano", "--engine", "zero3", "--ep", "2"], "expected engine fsdp2, zero1, zero2 for expert parallelism"),
        (["nano", "--shards", "3"], "expected shards to divide the world size 8, got 3"),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["memory", "plan", *arguments]) == 2
    printed = capsys.readouterr().err.strip()
    assert "\n" not in printed
    assert sentence in printed


def test_measuring_a_run(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"line {i}\n" for i in range(2000)))
    overrides = [f"data.path={tmp_path / 'text.txt'}", "model=nano", "data.seq_len=16", "data.batch=4"]
    arguments = ["memory", "measure", *overrides, "--out", str(tmp_path / "out"), "--budget", "1KiB"]
    # A process of its own: the command refuses whatever looks like a master copy, other tests' tensors too.
    done = subprocess.run(
        [sys.executable, "-m", "eco_dist", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == OVER_BUDGET, done.stderr
    assert "does NOT fit into 1.00 KiB" in done.stdout
    measured, planned = (read_report(tmp_path / "out" / name) for name in ("measured.json", "report.json"))
    assert measured.static_bytes(0) == planned.static_bytes(0)
    assert measured.worst.peak_bytes == pytest.approx(planned.worst.peak_bytes, rel=0.1)
    for name in ("report.md", "report.html"):
        assert "Measured at the peak:" in (tmp_path / "out" / name).read_text()
