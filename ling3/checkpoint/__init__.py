"""Reads checkpoints into module trees and writes them back: `load`, `save`, and the names of the weights."""

from ling3.checkpoint.loading import load
from ling3.checkpoint.names import weight_names
from ling3.checkpoint.safetensors_file import CheckpointError
from ling3.checkpoint.saving import save

__all__ = ["CheckpointError", "load", "save", "weight_names"]
