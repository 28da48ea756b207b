"""Pictures of the injection study: what an event does to the training loss, and what each form costs in the end."""

from __future__ import annotations

from pathlib import Path

from eco_dist.experiments.injection import Result
from eco_dist.experiments.scenarios import ARMS, BASELINE, SCENARIOS, Scenario
from eco_dist.training.plot import MARKERS, PALETTE, canvas, smooth

HALF_WIDTH = 4
"""Steps on either side that a drawn training loss is averaged over."""


def draw(result: Result, directory: Path) -> list[Path]:
    """One picture a scenario with an event, and one of the final losses; returns the files.

    Raises:
        ValueError: matplotlib is missing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drawn = [
        _event(result, scenario, directory / f"injection-{scenario.name}.png")
        for scenario in SCENARIOS
        if scenario.event is not None and scenario.name in result.courses
    ]
    return [*drawn, _gaps(result, directory / "injection-gaps.png")]


def _event(result: Result, scenario: Scenario, file: Path) -> Path:
    """Training loss over the steps, first seed, smoothed."""
    figure, axes = canvas()
    courses = result.courses[scenario.name]
    for index, arm in enumerate(arm for arm in ARMS if arm in courses):
        losses = smooth(courses[arm][0].losses, HALF_WIDTH)
        color = "0.35" if arm == BASELINE else PALETTE[index - 1]
        axes.plot(range(1, len(losses) + 1), losses, color=color, linewidth=1.3, label=_label(arm))
    assert scenario.event is not None
    axes.axvline(scenario.event + 1, color="0.75", linewidth=1)
    axes.set_title(scenario.story, loc="left", fontsize=12, fontweight="bold")
    axes.set_ylabel("training loss (nats a token)")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(file, dpi=150)
    return file


def _gaps(result: Result, file: Path) -> Path:
    """Final validation loss over FP8 master weights, a point a seed."""
    figure, axes = canvas()
    names = [scenario.name for scenario in SCENARIOS if scenario.name in result.courses]
    arms = [arm for arm in ARMS if arm != BASELINE]
    for index, arm in enumerate(arms):
        for place, name in enumerate(names):
            if arm not in result.courses[name]:
                continue
            gaps = result.gaps(name, arm)
            rows = [place + 0.18 * (index - 1)] * len(gaps)
            label = _label(arm) if place == 0 else None
            axes.plot(gaps, rows, MARKERS[index], color=PALETTE[index], markersize=6, linestyle="", label=label)
    axes.axvline(0.0, color="0.35", linewidth=1)
    axes.set_xscale("symlog", linthresh=0.01)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="validation loss over FP8 master weights (nats; linear below 0.01)", ylabel="")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(file, dpi=150)
    return file


def _label(arm: str) -> str:
    return "FP8 master weights" if arm == BASELINE else f"{arm} injection"
