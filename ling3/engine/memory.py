"""The memory that an engine takes on each device (on a CPU, of the machine), and how much is free."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

from ling3.cache import CacheSpec, State, pages_of, shared_axes, slots_of, window_of
from ling3.engine.pool import cache_dtype, new_memory
from ling3.engine.settings import EngineSettings
from ling3.mesh.placement import Placement
from ling3.mesh.sharded import placement_of
from ling3.model import CausalLM
from ling3.runtime.processes import least

# Where Linux reports free memory.
MEMORY = pathlib.Path("/proc/meminfo")


@dataclasses.dataclass(frozen=True)
class Footprint:
    """The bytes that an engine's memory takes on each device, and the bytes that are free there."""

    groups: int
    """The number of device groups, each of which has a part of the slots and pages."""
    states: int
    """Bytes of a slot's states; 0 if the model has none."""
    slot: int
    """Bytes of a slot: its states, and a logit bias and a count for each token of the vocabulary."""
    page: int
    window: int | None
    """The sliding window in tokens, behind which a sequence needs no pages; None if it needs all."""
    free: int

    @staticmethod
    def of(model: CausalLM, settings: EngineSettings) -> "Footprint":
        """The footprint of an engine that runs `model`."""
        dtype, packed = cache_dtype(model, settings.cache_dtype), settings.cache_dtype == "packed"
        spec = CacheSpec(1, 1, settings.page_size, dtype, packed, mtp=settings.speculation == "mtp")
        memory = eqx.filter_eval_shape(new_memory, model, spec)
        states, page = (_of_a_device(model, part) for part in (slots_of(memory), pages_of(memory)))
        placement = placement_of(model)
        return Footprint(
            groups=1 if placement is None else placement.row_groups,
            states=states,
            slot=states + 8 * model.config.vocab_size,
            page=page,
            window=window_of(memory),
            free=free_bytes(placement),
        )

    def pages_that_fit(self, slots: int, most: int, mem_fraction: float) -> int:
        """The pages that fit, with the slots, into `mem_fraction` of the free memory; at most `most` for each slot.

        Each group of devices has the same number of them. Raises ValueError if not one page fits.
        """
        slots //= self.groups
        fit = int(mem_fraction * self.free - slots * self.slot) // max(self.page, 1)
        if fit < 1:
            raise ValueError(
                f"{slots} slots of {self.slot / 1e6:.1f} MB and one page of {self.page / 1e6:.1f} MB do not fit into "
                f"mem_fraction {mem_fraction} of the {self.free / 1e6:,.0f} MB free: lower max_running_requests or "
                "raise mem_fraction"
            )
        return self.groups * min(fit, slots * most)

    def check(self, slots: int, pages: int) -> None:
        """Raises ValueError if the slots and pages need more memory than is free."""
        slots, pages = slots // self.groups, pages // self.groups
        taken = slots * self.slot + pages * self.page
        if taken > self.free:
            raise ValueError(
                f"max_running_requests {slots} of {self.slot / 1e6:.1f} MB and num_pages {pages} of "
                f"{self.page / 1e6:.2g} MB take {taken / 1e6:,.0f} MB, and {self.free / 1e6:,.0f} MB are free: lower "
                "one of them"
            )


def _of_a_device(model: CausalLM, states: State) -> int:
    """The bytes that some states take on each device."""
    placement = placement_of(model)
    sharers = 1 if placement is None else placement.sharers
    sizes = (x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
    return sum(size if axis is None else size // sharers for size, axis in zip(sizes, shared_axes(states), strict=True))


def free_bytes(placement: Placement | None = None) -> int:
    """Free bytes of the default device; on a mesh those of the fullest device, in whichever process.

    For CPU devices, the machine's available memory (page cache included), divided by their number.
    """
    if placement is None:
        return _free(jax.local_devices()[:1])
    own = _free(placement.mesh.local_devices)
    return own if placement.processes == 1 else least(own)


def _free(devices: Sequence[Any]) -> int:
    known = [device.memory_stats() for device in devices]
    if all(stats is not None and "bytes_limit" in stats for stats in known):
        return min(stats["bytes_limit"] - stats["bytes_in_use"] for stats in known)
    if MEMORY.exists():
        return 1024 * int(MEMORY.read_text().partition("MemAvailable:")[2].split()[0]) // len(devices)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
