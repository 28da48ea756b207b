"""A report as one self-contained HTML page: no script, no font, nothing fetched; for phone and desktop, light and dark.

Bars are boxes of the page, so that they follow its width; the timeline is an SVG with its labels outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from eco_dist.memory.categories import Category
from eco_dist.memory.render.page import COLOURS, Bar, Page
from eco_dist.memory.render.style import STYLE
from eco_dist.memory.report import format_bytes

_WIDTH, _HEIGHT = 1000, 300


def to_html(page: Page) -> str:
    """The whole page."""
    body = "\n".join(
        part
        for part in (
            _header(page),
            _section("Beside what it replaces", _bars(page.beside_baseline()), "Worst rank of each, between steps."),
            _section("Category by category", _categories(page), "Worst rank of each, between steps."),
            _section("Rank by rank", _bars(page.of_ranks()), _ranks_note(page)),
            _timeline_section(page),
            _section("Largest tensors", _tensors(page), "Of the worst rank, between steps."),
            _strays_section(page),
            _section("Assumptions", _list(page.notes())),
        )
        if part
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>Memory: {escape(page.title)}</title>\n<style>\n{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(page: Page) -> str:
    report = page.report
    saving = page.saving()
    facts = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in page.facts())
    mood = "" if report.fits is None else " good" if report.fits else " bad"
    return (
        f"<header>\n<p class=kicker>{escape(report.source)} memory of every rank</p>\n"
        f"<h1>{escape(page.title)}</h1>\n"
        f'<p class="verdict{mood}">{escape(page.verdict())}{_meter(page)}</p>\n'
        + (f"<p class=saving>{escape(saving)}</p>\n" if saving else "")
        + f"<dl>{facts}</dl>\n</header>"
    )


def _meter(page: Page) -> str:
    budget = page.report.budget
    if not budget:
        return ""
    share = min(100.0, 100 * page.report.worst.needed_bytes / budget)
    fill = f'<span style="width:{share:.2f}%"></span>'
    return f'<span class=meter role=img aria-label="{share:.0f} % of the budget">{fill}</span>'


def _section(title: str, content: str, note: str = "") -> str:
    lead = f"<p class=note>{escape(note)}</p>" if note else ""
    return f"<section>\n<h2>{escape(title)}</h2>\n{lead}{content}\n</section>"


def _bars(bars: Sequence[Bar]) -> str:
    longest = max((bar.total for bar in bars), default=0) or 1
    rows = "".join(
        f"<div class=bar><span class=label>{escape(bar.label)}</span><span class=track>{_boxes(bar, longest)}</span>"
        f"<span class=total>{format_bytes(bar.total)}</span></div>"
        for bar in bars
    )
    return f"<div class=bars>{rows}</div>{_legend(category for bar in bars for category, _ in bar.parts)}"


def _boxes(bar: Bar, longest: int) -> str:
    return "".join(
        f'<i style="width:{100 * count / longest:.3f}%;background:{COLOURS[category]}" '
        f'title="{escape(category.value)}: {format_bytes(count)}"></i>'
        for category, count in bar.parts
    )


def _legend(categories: Iterable[Category]) -> str:
    present = set(categories)
    items = "".join(
        f'<li><i style="background:{COLOURS[category]}"></i>{escape(category.value)}</li>'
        for category in Category
        if category in present
    )
    return f"<ul class=legend>{items}</ul>"


def _categories(page: Page) -> str:
    heads = ["category", *page.columns(), *(["measured - planned"] if page.measured is not None else [])]
    rows = []
    for name, counts, difference in page.categories():
        cells = [escape(name), *(format_bytes(count or 0) for count in counts)]
        if difference is not None:
            mood = "good" if difference == 0 else "bad"
            cells.append(f"<b class={mood}>{difference:+,} B</b>" if difference else f"<b class={mood}>0 B</b>")
        rows.append(cells)
    return _table(heads, rows, last_is_total=True)


def _ranks_note(page: Page) -> str:
    groups = len(page.report.groups)
    if groups == 1:
        return f"All {len(page.report.ranks):,} ranks hold the same." if len(page.report.ranks) > 1 else ""
    return f"{len(page.report.ranks):,} ranks, {groups:,} different holdings; the fullest first."


def _timeline_section(page: Page) -> str:
    return "\n".join(_timeline(report.source, bars, page.peak_check()) for report, bars in page.timelines())


def _timeline(source: str, bars: Sequence[Bar], check: str | None) -> str:
    highest = max(bars, key=lambda bar: bar.total)
    note = f"Worst rank; the peak is {format_bytes(highest.total)} at '{highest.label}'."
    if source == "planned":
        note += " What comes and goes within a step is a model."
    elif check is not None:
        note += f" {check}"
    axis = f"<div class=axis><span>{escape(bars[0].label)}</span><span>{escape(bars[-1].label)}</span></div>"
    legend = _legend(category for bar in bars for category, _ in bar.parts)
    return _section(f"Over one step, {source}", _areas(bars, highest) + axis + legend, note)


def _areas(bars: Sequence[Bar], highest: Bar) -> str:
    """Stacked areas, a step a moment; static bytes at the bottom."""
    top = highest.total * 1.05 or 1
    step = _WIDTH / len(bars)
    base = [0] * len(bars)
    shapes = []
    for category in Category:
        counts = [dict(bar.parts).get(category, 0) for bar in bars]
        if not any(counts):
            continue
        upper = [low + count for low, count in zip(base, counts, strict=True)]
        forth = [f"{x * step:.1f},{_y(y, top)} {(x + 1) * step:.1f},{_y(y, top)}" for x, y in enumerate(upper)]
        back = [f"{(x + 1) * step:.1f},{_y(y, top)} {x * step:.1f},{_y(y, top)}" for x, y in enumerate(base)][::-1]
        shapes.append(
            f'<polygon fill="{COLOURS[category]}" points="{" ".join([*forth, *back])}">'
            f"<title>{escape(category.value)}</title></polygon>"
        )
        base = upper
    peak = _y(highest.total, top)
    return (
        f'<svg class=areas viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio=none role=img '
        f'aria-label="bytes over one step">{"".join(shapes)}'
        f"<line x1=0 x2={_WIDTH} y1={peak} y2={peak} class=peak /></svg>"
    )


def _y(count: float, top: float) -> str:
    return f"{_HEIGHT * (1 - count / top):.1f}"


def _tensors(page: Page) -> str:
    rows = [
        [f"<code>{escape(name)}</code>", str(n), escape(kinds), format_bytes(count)]
        for name, n, kinds, count in page.largest_tensors()
    ]
    return _table(["tensor", "number", "holds", "bytes"], rows, words=(0, 2))


def _strays_section(page: Page) -> str:
    rows = [[str(rank), escape(description), format_bytes(count)] for rank, description, count in page.strays()]
    if not rows:
        return ""
    note = "Live tensors that belong to no parameter, state, gradient or buffer."
    return _section("Not attributed", _table(["rank", "tensor", "bytes"], rows, words=(1,)), note)


def _list(sentences: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in sentences)}</ul>"


def _table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, words: Sequence[int] = (0,), last_is_total: bool = False
) -> str:
    def cells(tag: str, values: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{'' if column in words else ' class=number'}>{value}</{tag}>" for column, value in enumerate(values)
        )

    lines = [f"<tr>{cells('td', row)}</tr>" for row in rows]
    if last_is_total and lines:
        lines[-1] = lines[-1].replace("<tr>", "<tr class=sum>", 1)
    head = cells("th", [escape(value) for value in heads])
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
