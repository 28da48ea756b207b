"""A report as Markdown, as one self-contained HTML page and as a PNG: one object, `Page`, behind all three."""

from eco_dist.memory.render.page import Page
from eco_dist.memory.render.write import write_reports

__all__ = ["Page", "write_reports"]
