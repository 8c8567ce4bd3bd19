"""Many engines side by side, in processes of their own, on one machine or many: Ray starts and connects them."""

from ling3.fleet.fleet import Fleet
from ling3.fleet.work import FleetError

__all__ = ["Fleet", "FleetError"]
