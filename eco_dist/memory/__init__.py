"""What a rank holds: predicted from shapes, measured on live objects, reported per rank and category."""

from eco_dist.memory.categories import Category
from eco_dist.memory.measure import measure
from eco_dist.memory.plan import plan
from eco_dist.memory.report import MemoryReport, RankMemory, TensorMemory, compare_table
from eco_dist.memory.wire import WireMeter

__all__ = ["Category", "MemoryReport", "RankMemory", "TensorMemory", "WireMeter", "compare_table", "measure", "plan"]
