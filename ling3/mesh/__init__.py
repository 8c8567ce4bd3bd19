"""A model over many devices: which axis each array is cut along, and where the parts lie."""

from ling3.mesh.rules import MeshError, Rules
from ling3.mesh.sharding import Layout, place, plan

__all__ = ["Layout", "MeshError", "Rules", "place", "plan"]
