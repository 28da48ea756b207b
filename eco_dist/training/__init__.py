"""The program that trains: configuration, text, loop, metrics, comparison."""

from eco_dist.training.compare import compare_runs
from eco_dist.training.config import TrainConfig
from eco_dist.training.loop import train
from eco_dist.training.overrides import load_config
from eco_dist.training.summary import Summary, read_summary

__all__ = ["Summary", "TrainConfig", "compare_runs", "load_config", "read_summary", "train"]
