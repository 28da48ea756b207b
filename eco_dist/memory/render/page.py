"""What a report page says, before it is Markdown, HTML or a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from eco_dist.memory.categories import Category
from eco_dist.memory.report import Holding, MemoryReport, categories_of, format_bytes

BARS_SHOWN = 12
TENSORS_SHOWN = 20

# Okabe and Ito's colours and their lighter relatives, so that neighbours stay apart for common colour blindness; warm
# colours for what a recipe without master weights saves.
COLOURS = {
    Category.CODES: "#0072B2",
    Category.SCALES: "#56B4E9",
    Category.HIGH_PRECISION: "#5B6C8F",
    Category.WORKING: "#8E9BB8",
    Category.MOMENTS: "#009E73",
    Category.MOMENT_SCALES: "#7CCBB1",
    Category.RESIDUAL: "#CC79A7",
    Category.MASTER: "#D55E00",
    Category.COUNTERS: "#B0A08A",
    Category.PADDING: "#C9C3B5",
    Category.OTHER_STATE: "#A3702C",
    Category.BUFFERS: "#7A7266",
    Category.FRAMEWORK: "#938B7F",
    Category.GRADIENTS: "#E69F00",
    Category.UNSHARDED: "#4C9BD0",
    Category.COMMUNICATION: "#9A7FD1",
    Category.ACTIVATIONS: "#E9C46A",
    Category.TEMPORARIES: "#B5B5B5",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bar:
    """A stacked bar: label, and bytes by category in order."""

    label: str
    parts: tuple[tuple[Category, int], ...]

    @property
    def total(self) -> int:
        """Length of the bar."""
        return sum(count for _, count in self.parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """A report and what it is held against.

    Attributes:
        report: the report.
        baseline: plan of what the recipe replaces.
        measured: measurement of the same ranks.
    """

    report: MemoryReport
    baseline: MemoryReport | None = None
    measured: MemoryReport | None = None

    @property
    def title(self) -> str:
        """Model and recipe."""
        return f"{self.report.model or 'model'}, {self.report.recipe or 'measured'}"

    def facts(self) -> list[tuple[str, str]]:
        """The header, line by line."""
        report = self.report
        packages = ", ".join(f"{name} {version}" for name, version in report.versions.items())
        said = [
            ("model", f"{report.model or 'unnamed'}, {report.parameters:,} parameters"),
            ("engine", f"{report.engine or 'live'} on {report.mesh or f'{len(report.ranks):,} ranks'}"),
            ("recipe", f"{report.recipe or 'whatever is there'}, optimizer {report.optimizer or 'none'}"),
            ("bytes a parameter", f"{report.bytes_per_parameter():.3f} over all ranks, between steps"),
            ("versions", packages),
        ]
        return [(name, value) for name, value in said if value]

    def verdict(self) -> str:
        """One sentence: the worst rank, and whether it fits."""
        worst, report = self.report.worst, self.report
        needs = f"Rank {worst.rank} needs the most: {format_bytes(worst.static_bytes)} between steps"
        if worst.peak_bytes is not None:
            model = " (a model)" if report.source == "planned" else ""
            needs += f", {format_bytes(worst.peak_bytes)} at the peak{model}"
        if len(report.groups) > 1:
            needs += f"; that is {report.imbalance:.1%} above the mean of all ranks between steps"
        if report.budget is None:
            return f"{needs}."
        word = "fits" if report.fits else "does NOT fit"
        return f"{needs}; it {word} into {format_bytes(report.budget)}."

    def saving(self) -> str | None:
        """How much less than the baseline the worst rank holds."""
        if self.baseline is None or not self.baseline.worst.static_bytes:
            return None
        own, other = self.report.worst.static_bytes, self.baseline.worst.static_bytes
        direction = "less" if own <= other else "more"
        return f"{abs(1 - own / other):.1%} {direction} between steps than {self.baseline.recipe}."

    def beside_baseline(self) -> list[Bar]:
        """Worst ranks of the report, the measurement and the baseline."""
        reports = [(self.report.recipe or "measured", self.report)]
        if self.measured is not None:
            reports.append(("measured", self.measured))
        if self.baseline is not None:
            reports.append((self.baseline.recipe, self.baseline))
        return [_static_bar(label, report.worst.holding) for label, report in reports]

    def of_ranks(self) -> list[Bar]:
        """A bar for each distinct holding, the fullest first; the emptiest last where there are many."""
        groups = sorted(self.report.groups, key=lambda group: -group[0].static_bytes)
        if len(groups) > BARS_SHOWN:
            groups = [*groups[: BARS_SHOWN - 1], groups[-1]]
        return [_static_bar(_ranks_label(ranks), holding) for holding, ranks in groups]

    def timelines(self) -> list[tuple[MemoryReport, list[Bar]]]:
        """The planned and the measured timeline, of those that exist."""
        reports = [report for report in (self.report, self.measured) if report is not None]
        return [(report, self._timeline(report)) for report in reports if report.worst.holding.timeline]

    def peak_check(self) -> str | None:
        """The modelled peak beside the measured one; None unless there are both."""
        peaks = [report.worst.peak_bytes for report in (self.report, self.measured) if report is not None]
        if len(peaks) < 2 or not peaks[0] or not peaks[1]:
            return None
        return f"Measured at the peak: {format_bytes(peaks[1])}; the model says {peaks[0] / peaks[1]:.2f} times that."

    @staticmethod
    def _timeline(report: MemoryReport) -> list[Bar]:
        """Static and transient bytes of the worst rank, moment by moment."""
        holding = report.worst.holding
        static = tuple((c, n) for c, n in holding.by_category.items() if c.is_static)
        order = [category for category in Category if not category.is_static]
        return [
            Bar(
                label=moment.name,
                parts=(*static, *((c, moment.bytes[c]) for c in order if moment.bytes.get(c))),
            )
            for moment in holding.timeline
        ]

    def categories(self) -> list[tuple[str, list[int | None], int | None]]:
        """Category, bytes of each column, and measured minus planned; columns as `columns` names them."""
        holdings = [report.worst.holding for report in self._columns()]
        lines = [
            (category.value, [holding.by_category.get(category, 0) for holding in holdings])
            for category in categories_of(holdings)
        ]
        lines.append(("static, in all", [holding.static_bytes for holding in holdings]))
        return [(name, list(counts), self._difference(counts)) for name, counts in lines]

    def columns(self) -> list[str]:
        """Names of the columns of `categories`."""
        return [report.recipe or "measured" for report in self._columns()]

    def largest_tensors(self) -> list[tuple[str, int, str, int]]:
        """Name, number of tensors, categories and bytes of what takes the most on the worst rank."""
        total: dict[str, int] = {}
        kinds: dict[str, list[str]] = {}
        count: dict[str, int] = {}
        for tensor in self.report.worst.tensors:
            if tensor.category.is_static:
                total[tensor.name] = total.get(tensor.name, 0) + tensor.bytes
                kinds.setdefault(tensor.name, []).append(tensor.category.value)
                count[tensor.name] = max(count.get(tensor.name, 0), tensor.count)
        names = sorted(total, key=lambda name: -total[name])[:TENSORS_SHOWN]
        return [(name, count[name], ", ".join(kinds[name]), total[name]) for name in names]

    def strays(self) -> list[tuple[int, str, int]]:
        """Rank, description and bytes of what no walk could attribute."""
        report = self.measured or self.report
        return [(rank.rank, stray.description, stray.bytes) for rank in report.ranks for stray in rank.unattributed]

    def notes(self) -> list[str]:
        """Assumptions, and what the process of the worst rank itself says."""
        measured = self.measured or self.report
        process = measured.worst.process
        checks = [] if process is None else [f"rank {measured.worst.rank}: {process}"]
        return [*self.report.assumptions, *checks]

    def _columns(self) -> list[MemoryReport]:
        return [report for report in (self.report, self.measured, self.baseline) if report is not None]

    def _difference(self, counts: Sequence[int]) -> int | None:
        return counts[1] - counts[0] if self.measured is not None else None


def _static_bar(label: str, holding: Holding) -> Bar:
    return Bar(label=label, parts=tuple((c, n) for c, n in holding.by_category.items() if c.is_static and n))


def _ranks_label(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if ranks[-1] - ranks[0] + 1 == len(ranks):
        return f"ranks {ranks[0]:,}-{ranks[-1]:,}"
    return f"{len(ranks):,} ranks from {ranks[0]:,}"
