"""Loss curves of one or several runs as a PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eco_dist.training.metrics import series

__all__ = ["MARKERS", "PALETTE", "canvas", "plot_expert_load", "plot_losses", "smooth"]

# Okabe and Ito: eight colours that stay apart for every common kind of colour blindness; black and yellow left out,
# black because it is the text's, yellow because it vanishes on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SMOOTHING = 40  # log lines of a run for each line of half a smoothing window
MARKERS = ("o", "s", "^", "D", "v", "P")


def smooth(values: Sequence[float], half_width: int) -> list[float]:
    """Centred moving average, s_i = mean of x_(i-w) .. x_(i+w), with w <= ``half_width`` shrinking towards both ends.

    Centred, because an average over the past alone lags behind a falling loss and would set it above the validation's.
    """
    smoothed: list[float] = []
    for index in range(len(values)):
        reach = min(half_width, index, len(values) - 1 - index)
        window = values[index - reach : index + reach + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed


def plot_losses(runs: Mapping[str, Sequence[dict[str, Any]]], file: Path, *, title: str | None = None) -> None:
    """Draw the training loss (smoothed, thin) and the validation loss (marked) of each run over the steps.

    Args:
        runs: label -> the lines of its ``metrics.jsonl``.
        file: the PNG to write; its folder is made.
        title: above the plot.

    Raises:
        ValueError: matplotlib is missing, or no run has a loss.
    """
    if not any(series(lines, "loss")[1] for lines in runs.values()):
        raise ValueError("expected a run with at least one logged loss, got none; train for some steps first")
    figure, axes = canvas()
    for index, (label, lines) in enumerate(runs.items()):
        _draw(axes, label, lines, PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)])
    axes.set_ylim(*_limits([value for lines in runs.values() for value in series(lines, "loss")[1][1:]]))
    axes.set_title(title or "Loss", loc="left", fontsize=12, fontweight="bold")
    axes.legend(frameon=False, fontsize=9, title="line: training (smoothed)   markers: validation", title_fontsize=8)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def canvas() -> tuple[Any, Any]:
    """A figure and its axes in this package's style, drawn without a display.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "expected the package matplotlib for a plot, found none; pip install eco-dist[plot]"
        ) from error
    # a Figure of its own, not pyplot: no display, no global state, safe on a machine without a screen
    figure = Figure(figsize=(8.0, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats a token)")
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_expert_load(lines: Sequence[dict[str, Any]], file: Path, *, title: str) -> None:
    """Draw how busy each expert was over the steps, a map a layer; nothing for a run without experts.

    Args:
        lines: of a run's ``metrics.jsonl``.
        file: the PNG to write.
        title: above the plot.

    Raises:
        ValueError: matplotlib is missing.
    """
    kept = [line for line in lines if line.get("expert_load") is not None]
    if not kept:
        return
    layers, experts = len(kept[0]["expert_load"]), len(kept[0]["expert_load"][0])
    figure, first = canvas()
    first.remove()
    figure.set_size_inches(8.0, 1.2 + 1.6 * layers)
    panels = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    steps = [line["step"] for line in kept]
    for layer, axes in enumerate(panels):
        # in units of an even share: 1 is balanced, 0 is idle
        load = [[line["expert_load"][layer][expert] * experts for line in kept] for expert in range(experts)]
        image = axes.pcolormesh(steps, range(experts), load, cmap="cividis", vmin=0.0, vmax=2.0, shading="nearest")
        axes.set_ylabel(f"layer {layer}\nexpert")
        axes.yaxis.get_major_locator().set_params(integer=True)
    panels[-1].set_xlabel("optimizer step")
    figure.colorbar(image, ax=list(panels), label="tokens, 1 = an even share", extend="max")
    figure.suptitle(f"Expert load: {title}", x=0.01, ha="left", fontsize=12, fontweight="bold")
    figure.savefig(file, dpi=150)


def _draw(axes: Any, label: str, lines: Sequence[dict[str, Any]], color: str, marker: str) -> None:
    steps, losses = series(lines, "loss")
    axes.plot(steps, smooth(losses, len(losses) // SMOOTHING), color=color, linewidth=1.4, alpha=0.6)
    steps, losses = series(lines, "val_loss")
    text = f"{label}: {losses[-1]:.3f}" if losses else label
    axes.plot(steps, losses, color=color, linewidth=0.9, linestyle=":", marker=marker, markersize=5, label=text)


def _limits(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Axis limits that show the course of the run: a start or a spike far above it may leave the picture."""
    if len(values) < 10:
        return None, None
    ordered = sorted(values)
    low, high = ordered[0], ordered[int(0.97 * (len(ordered) - 1))]
    margin = 0.05 * (high - low) or 0.1
    return low - margin, high + 3 * margin
