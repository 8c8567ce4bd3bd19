"""What memory an engine takes: of the device, or on a CPU of the machine."""

import os
import pathlib

import equinox as eqx
import jax

from ling3.cache import State, pages_of, slots_of, window_of
from ling3.engine.pool import cache_dtype, new_memory
from ling3.engine.prefixes import Grid
from ling3.engine.settings import EngineSettings
from ling3.model import CausalLM

# Where Linux says what memory there is.
MEMORY = pathlib.Path("/proc/meminfo")


def pages_that_fit(model: CausalLM, settings: EngineSettings, most: int, mem_fraction: float) -> int:
    """As many pages as fit into `mem_fraction` of the free memory beside the slots, but at most `most` for each slot.

    Raises ValueError if that is not one.
    """
    slots, (slot, page), free = settings.max_running_requests, _bytes(model, settings), free_bytes()
    fit = int(mem_fraction * free - slots * slot) // max(page, 1)
    if fit < 1:
        raise ValueError(
            f"{slots} slots of {slot / 1e6:.1f} MB and one page of {page / 1e6:.1f} MB do not fit into mem_fraction "
            f"{mem_fraction} of the {free / 1e6:,.0f} MB free: lower max_running_requests or raise mem_fraction"
        )
    return min(fit, slots * most)


def check(model: CausalLM, settings: EngineSettings, pages: int) -> None:
    """ValueError if there is no memory for the slots and for so many pages."""
    slots, (slot, page), free = settings.max_running_requests, _bytes(model, settings), free_bytes()
    if slots * slot + pages * page > free:
        raise ValueError(
            f"max_running_requests {slots} of {slot / 1e6:.1f} MB and num_pages {pages} of {page / 1e6:.2g} MB take "
            f"{(slots * slot + pages * page) / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free: lower one of them"
        )


def _bytes(model: CausalLM, settings: EngineSettings) -> tuple[int, int]:
    """What a slot takes, and what a page does."""
    memory = _memory(model, settings)
    parts = (slots_of(memory), pages_of(memory))
    state, page = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in parts)
    return state + 8 * model.config.vocab_size, page  # a slot's states, and a bias and a count of each token


def prefix_grid(model: CausalLM, settings: EngineSettings, length: int) -> Grid | None:
    """Where the prefixes of prompts of up to `length` tokens may be kept; None if none are.

    The windows of a layer and the states of another are two things that a prefix would need at once: no family has
    both, and such a model keeps none.
    """
    slots = slots_of(_memory(model, settings))
    snapshot = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(slots))
    budget = int(settings.snapshot_fraction * settings.mem_fraction * free_bytes()) if snapshot else 0
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


def free_bytes() -> int:
    """What the default device has free; for the CPU, what the machine has, with the files that it would forget."""
    stats = jax.local_devices()[0].memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    if MEMORY.exists():
        return 1024 * int(MEMORY.read_text().partition("MemAvailable:")[2].split()[0])
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
