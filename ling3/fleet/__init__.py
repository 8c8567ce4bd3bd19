"""Many engines side by side, one per process, on one machine or many: Ray starts and connects them."""

from ling3.fleet.fleet import Fleet
from ling3.fleet.work import FleetError

__all__ = ["Fleet", "FleetError"]
