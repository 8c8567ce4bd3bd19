"""A model over many devices: which axis each array is cut along, and how it gets there and back."""

from ling3.mesh.rules import Rules
from ling3.mesh.sharding import gathered, place

__all__ = ["Rules", "gathered", "place"]
