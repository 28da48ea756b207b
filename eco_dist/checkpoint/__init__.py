"""Checkpoints: whole or not at all, checked before use, for any number of ranks."""

from eco_dist.checkpoint.export import export
from eco_dist.checkpoint.load import latest, load
from eco_dist.checkpoint.manifest import CheckpointCorruptError, CheckpointError, Manifest
from eco_dist.checkpoint.pieces import Description, Piece, describe
from eco_dist.checkpoint.save import AsyncSaver, save

__all__ = [
    "AsyncSaver",
    "CheckpointCorruptError",
    "CheckpointError",
    "Description",
    "Manifest",
    "Piece",
    "describe",
    "export",
    "latest",
    "load",
    "save",
]
