"""A model over many devices: the axis along which each array is sharded, and the placement of its shards."""

from ling3.mesh.rules import MeshError, Rules
from ling3.mesh.sharding import Layout, place, plan

__all__ = ["Layout", "MeshError", "Rules", "place", "plan"]
