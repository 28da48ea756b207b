"""Checkpoints: whole or not at all, checked before use, for any number of ranks."""

from eco_dist.checkpoint.dcp import dcp_state, load_dcp
from eco_dist.checkpoint.export import export
from eco_dist.checkpoint.load import latest, load
from eco_dist.checkpoint.manifest import CheckpointCorruptError, CheckpointError, Manifest
from eco_dist.checkpoint.pieces import Description, Piece, describe
from eco_dist.checkpoint.save import AsyncSaver, save
from eco_dist.checkpoint.take_over import take_over

__all__ = [
    "AsyncSaver",
    "CheckpointCorruptError",
    "CheckpointError",
    "Description",
    "Manifest",
    "Piece",
    "dcp_state",
    "describe",
    "export",
    "latest",
    "load",
    "load_dcp",
    "save",
    "take_over",
]
