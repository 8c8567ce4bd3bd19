"""What memory an engine takes: of each device, or on a CPU of the machine."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax

from ling3.cache import State, pages_of, shared_axes, slots_of, window_of
from ling3.engine.pool import cache_dtype, new_memory
from ling3.engine.prefixes import Grid
from ling3.engine.settings import EngineSettings
from ling3.model import CausalLM
from ling3.placement import Placement
from ling3.runtime.processes import least

# Where Linux says what memory there is.
MEMORY = pathlib.Path("/proc/meminfo")


def pages_that_fit(model: CausalLM, settings: EngineSettings, most: int, mem_fraction: float) -> int:
    """As many pages as fit into `mem_fraction` of the free memory beside the slots, but at most `most` for each slot.

    Groups of devices have as many each. Raises ValueError if that is not one.
    """
    count, free = groups(model), free_bytes(model.placement)
    slots, (slot, page) = settings.max_running_requests // count, _bytes(model, settings)
    fit = int(mem_fraction * free - slots * slot) // max(page, 1)
    if fit < 1:
        raise ValueError(
            f"{slots} slots of {slot / 1e6:.1f} MB and one page of {page / 1e6:.1f} MB do not fit into mem_fraction "
            f"{mem_fraction} of the {free / 1e6:,.0f} MB free: lower max_running_requests or raise mem_fraction"
        )
    return count * min(fit, slots * most)


def groups(model: CausalLM) -> int:
    """Groups of devices of which each has a part of the slots and pages."""
    return 1 if model.placement is None else model.placement.row_groups


def check(model: CausalLM, settings: EngineSettings, pages: int) -> None:
    """ValueError if there is no memory for the slots and for so many pages."""
    slots, (slot, page), free = settings.max_running_requests, _bytes(model, settings), free_bytes(model.placement)
    slots, pages = slots // groups(model), pages // groups(model)
    if slots * slot + pages * page > free:
        raise ValueError(
            f"max_running_requests {slots} of {slot / 1e6:.1f} MB and num_pages {pages} of {page / 1e6:.2g} MB take "
            f"{(slots * slot + pages * page) / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free: lower one of them"
        )


def _bytes(model: CausalLM, settings: EngineSettings) -> tuple[int, int]:
    """What a slot takes, and what a page does."""
    memory = _memory(model, settings)
    state, page = (_of_a_device(model, part) for part in (slots_of(memory), pages_of(memory)))
    return state + 8 * model.config.vocab_size, page  # a slot's states, and a bias and a count of each token


def prefix_grid(model: CausalLM, settings: EngineSettings, length: int) -> Grid | None:
    """Where the prefixes of prompts of up to `length` tokens may be kept; None if none are.

    The windows of a layer and the states of another are two things that a prefix would need at once: no family has
    both, and such a model keeps none.
    """
    snapshot = _of_a_device(model, slots_of(_memory(model, settings)))
    # Every group of devices has those of all groups.
    free = free_bytes(model.placement) // groups(model) if snapshot else 0
    budget = int(settings.snapshot_fraction * settings.mem_fraction * free)
    possible = snapshot <= budget and not (snapshot and window(model, settings))
    if not (settings.prefix_cache and possible and settings.prefix_step <= length):
        return None
    return Grid(settings.prefix_step, snapshot, budget)


def window(model: CausalLM, settings: EngineSettings) -> int | None:
    """The window behind which a sequence needs no pages; None if it needs all."""
    return window_of(_memory(model, settings))


def _memory(model: CausalLM, settings: EngineSettings) -> tuple[State, ...]:
    """The shapes of one slot and one page."""
    dtype, packed = cache_dtype(model, settings.cache_dtype), settings.cache_dtype == "packed"
    return eqx.filter_eval_shape(new_memory, model, 1, 1, settings.page_size, dtype, packed)


def _of_a_device(model: CausalLM, states: State) -> int:
    """Bytes of some states on each device."""
    sharers = 1 if model.placement is None else model.placement.sharers
    sizes = (x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
    return sum(size if axis is None else size // sharers for size, axis in zip(sizes, shared_axes(states), strict=True))


def free_bytes(placement: Placement | None = None) -> int:
    """What the default device has free, or on a mesh the fullest device, of whichever process.

    For the CPU, what the machine has, with the files that it would forget.
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
