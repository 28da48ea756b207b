"""What a rank holds: predicted from shapes, measured on live objects, reported per rank and category."""

from eco_dist.memory.attribution import MasterCopyError
from eco_dist.memory.categories import Category
from eco_dist.memory.measure import HoldsMemory, measure
from eco_dist.memory.plan import plan
from eco_dist.memory.report import MemoryReport, RankMemory, TensorMemory
from eco_dist.memory.tables import compare_table
from eco_dist.memory.wire import WireMeter

__all__ = [
    "Category",
    "HoldsMemory",
    "MasterCopyError",
    "MemoryReport",
    "RankMemory",
    "TensorMemory",
    "WireMeter",
    "compare_table",
    "measure",
    "plan",
]
