"""All forms of a report in one directory."""

from __future__ import annotations

import json
from pathlib import Path

from eco_dist.memory.render.figure import write_png
from eco_dist.memory.render.html import to_html
from eco_dist.memory.render.markdown import to_markdown
from eco_dist.memory.render.page import Page


def write_reports(page: Page, directory: Path) -> list[Path]:
    """Write ``report.json``, ``report.md``, ``report.html``, and ``report.png`` where matplotlib is installed.

    The baseline and the measurement have JSON files of their own, ``baseline.json`` and ``measured.json``.

    Args:
        page: what to write.
        directory: where to; it is made.

    Returns:
        The files that were written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    texts = {"report.md": to_markdown(page), "report.html": to_html(page)}
    reports = {"report.json": page.report, "baseline.json": page.baseline, "measured.json": page.measured}
    for name, report in reports.items():
        if report is not None:
            texts[name] = json.dumps(report.to_json(), indent=1) + "\n"
    written = []
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
        written.append(directory / name)
    try:
        write_png(page, directory / "report.png")
    except ValueError:  # without matplotlib the other forms still stand
        return written
    return [*written, directory / "report.png"]
