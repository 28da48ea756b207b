"""What one rank holds under every engine, and nothing else about engines: the one place that knows their layouts."""

from eco_dist.memory.layouts.base import ENGINES, Layout, layout_of
from eco_dist.memory.layouts.pools import Entry, Pool, Segment, combine
from eco_dist.memory.layouts.zero import ZeroOptions

__all__ = ["ENGINES", "Entry", "Layout", "Pool", "Segment", "ZeroOptions", "combine", "layout_of"]
