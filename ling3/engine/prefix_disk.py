"""Known prefixes on disk, for engines that start later: pages and states in files, by the steps of the prefix tree.

A step has a file of its pages, and one of the states after it if the prefix cache has a snapshot there. Their names are

    key_0 = H(origin, adapter)        key_i = H(key_(i-1), tokens of step i)

so that prompts share the files of the steps that they share. If a prompt has a longer prefix on disk than in memory,
that is first read into the tree, from which the prompt then continues as if an earlier prompt had left it there. The
bits are the same, as they were written by the same programs.
"""

import contextlib
import hashlib
import importlib.metadata
import itertools
import os
import platform
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ling3.cache import pages_of, slots_of
from ling3.engine.origins import origin
from ling3.engine.prefix_files import PrefixFiles, logger
from ling3.engine.prefixes import Prefixes
from ling3.engine.request import TokenSequence
from ling3.engine.runner import Runner
from ling3.engine.settings import EngineSettings
from ling3.mesh.sharded import placement_of
from ling3.version import __version__

MOST_PENDING = 2**29
"""The most bytes that wait to be written; while more do, further prefixes are not kept."""
PROGRAMS = ("jax_disable_most_optimizations", "jax_default_matmul_precision", "jax_enable_x64")
"""Settings of JAX that may change the bits of the engine's programs."""


class PrefixDisk:
    """Saves the prefixes that an engine computes, and restores those that its prompts begin with."""

    def __init__(self, runner: Runner, settings: EngineSettings, files: PrefixFiles):
        self._runner, self._settings, self._files = runner, settings, files
        self._writer = ThreadPoolExecutor(1, "ling3-prefixes")  # which the interpreter's exit waits for
        self._pending, self._lock = 0, threading.Lock()
        self._updates, self._roots = -1, dict[int | None, bytes]()
        self._root(None)  # reads all weights once, before the first request
        nowhere = [runner.shapes.pages] * (runner.shapes.step // runner.shapes.page_size)
        runner.write(nowhere, jax.device_get(runner.read(nowhere)))  # compiles both

    @staticmethod
    def of(runner: Runner, settings: EngineSettings) -> "PrefixDisk | None":
        """The prefixes on disk for the engine that uses `runner`; None if its settings name no directory.

        Raises ValueError for an engine that keeps no prefixes, or not in a form for files, and OSError for a directory
        that cannot be written.
        """
        if settings.prefix_dir is None:
            return None
        grid, shapes = runner.shapes.grid, runner.shapes
        why = None
        if placement_of(runner.model) is not None or not runner.forward.snapshots:
            why = "an engine on a mesh, or of attention and experts apart, keeps none on disk"
        elif shapes.window is not None:
            why = "a model with sliding-window attention keeps none on disk"
        elif grid is None:
            length = f"max_model_len {settings.max_model_len} is less than a step of {settings.prefix_step} tokens"
            why = f"this engine keeps none (prefix_cache is off, {length}, or snapshot_fraction is too small for one)"
        if why is not None:
            raise ValueError(f"engine settings: prefix_dir is for known prefixes: {why}")
        files = PrefixFiles(settings.prefix_dir, settings.prefix_disk_bytes)
        files.prepare()
        return PrefixDisk(runner, settings, files)

    def restore(self, prefixes: Prefixes, sequence: TokenSequence) -> None:
        """Puts the longest prefix of a prompt on disk into the tree, if it is longer than the one in the tree."""
        steps = prefixes.steps_of(sequence, len(sequence.prompt) - 1)
        match = prefixes.tree.match(steps)
        begin, every = match.node.end, self._names(sequence, len(steps), prefixes.step)
        self._touch(every[:begin])
        names = list(itertools.takewhile(lambda name: self._files.has(_pages(name)), every[begin:]))
        while names and self._stateful and not self._files.has(_states(names[-1])):
            names.pop()
        if not names:
            return
        lock = prefixes.tree.lock(match.node)
        pages = prefixes.take(len(names) * prefixes.unit)
        try:
            states = self._read(names, pages)
        finally:
            prefixes.tree.unlock(lock)
        if states is None:
            prefixes.put_back(pages)
            return
        prefixes.add(steps[: begin + len(names)], [*match.slots, *prefixes.units(pages)], states)
        self._touch(every[: begin + len(names)])

    def save(self, prefixes: Prefixes, sequence: TokenSequence, end: int, states: Sequence[Any]) -> None:
        """Writes the new ones of the first `end` steps of a prompt, and `states`, the snapshot after them, if any.

        The device copies what is written at once, and another thread waits for it.
        """
        pages, unit = sequence.memory.pages, prefixes.unit
        names = self._names(sequence, end, prefixes.step)
        for i in range(prefixes.shared(sequence) // unit, end):
            if not self._files.has(_pages(names[i])):
                self._write(_pages(names[i]), self._runner.read(pages[i * unit : (i + 1) * unit]))
        if states and not self._files.has(_states(names[-1])):
            self._write(_states(names[-1]), jax.tree.leaves(states))
        if end == sequence.prefill_end // prefixes.step:
            self._touch(names)

    def flush(self) -> None:
        """Waits until everything that was saved is written."""
        if (last := self._submit(lambda: None)) is not None:
            last.result()

    @property
    def _stateful(self) -> bool:
        """Whether sequences hold anything outside of their pages."""
        grid = self._runner.shapes.grid
        return grid is not None and grid.snapshot > 0

    def _read(self, names: Sequence[str], pages: list[int]) -> list[Any] | None:
        """Fills pages with the steps of these names; returns the states after them, or None if a file is missing."""
        pool, unit = self._runner.pool, len(pages) // len(names)
        if not pages:
            return None
        entries = [each.entries for each in pages_of(pool.layers)]
        shapes = [jax.ShapeDtypeStruct((unit, *x.shape[1:]), x.dtype) for x in entries]
        read = [self._files.read(_pages(name), shapes) for name in names]
        states = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), slots_of(pool.layers))
        leaves, structure = jax.tree.flatten(states)
        found = self._files.read(_states(names[-1]), leaves) if self._stateful else []
        if found is None or any(step is None for step in read):
            return None
        for i, step in enumerate(read):
            self._runner.write(pages[i * unit : (i + 1) * unit], step or ())
        return [jax.device_put(jax.tree.unflatten(structure, found))] if self._stateful else []

    def _write(self, name: str, arrays: Sequence[Any]) -> None:
        """Queues a file of arrays; drops it while too much is queued."""
        size = sum(x.nbytes for x in arrays)
        with self._lock:
            if self._pending and self._pending + size > MOST_PENDING:
                return
            self._pending += size
        self._submit(self._written, name, arrays, size)

    def _written(self, name: str, arrays: Sequence[Any], size: int) -> None:
        """Writes a file, unless a number in it is NaN."""
        try:
            found = [np.asarray(x) for x in arrays]
            if not any(_has_nan(x) for x in found):
                self._files.write(name, found)
        except Exception as error:  # a fault of the device is the engine's to report
            logger.warning("a known prefix is not kept on disk: %r", error)
        finally:
            with self._lock:
                self._pending -= size

    def _touch(self, names: Sequence[str]) -> None:
        """Makes the files of some steps the most recently used, the first step's last to be deleted."""
        if names:
            self._submit(self._files.touch, [part for name in names for part in (_pages(name), _states(name))])

    def _submit(self, function: Callable[..., Any], *args: Any) -> Future[Any] | None:
        """Calls a function on the writer's thread; does nothing once the interpreter exits."""
        with contextlib.suppress(RuntimeError):
            return self._writer.submit(function, *args)
        return None

    def _names(self, sequence: TokenSequence, end: int, step: int) -> list[str]:
        """The names of the first `end` steps of a prompt."""
        key, names = self._root(sequence.adapter), []
        for i in range(end):
            tokens = np.asarray(sequence.prompt[i * step : (i + 1) * step], np.int64)
            key = hashlib.sha256(key + tokens.tobytes()).digest()
            names.append(key.hex())
        return names

    def _root(self, adapter: int | None) -> bytes:
        """The hash of everything but its tokens that a prefix's bits depend on."""
        runner = self._runner
        if self._updates != runner.updates:
            self._updates, self._roots = runner.updates, {}
        if adapter not in self._roots:
            found = {**origin(runner.model, self._settings, runner.shapes, runner.execution), **_machine()}
            if adapter is not None and runner.adapters is not None:
                found |= runner.adapters.origin(list(runner.adapters.each)[adapter])
            said = re.sub(r" at 0x[0-9a-f]+", "", repr(sorted(found.items())))
            self._roots[adapter] = hashlib.sha256(said.encode()).digest()
        return self._roots[adapter]


def _machine() -> dict[str, Any]:
    """The programs' compiler, its settings and the processor: all may change the last bits."""
    found: dict[str, Any] = {name: jax.config.values.get(name) for name in PROGRAMS}
    found["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    found |= {"ling3": __version__, "jax": jax.__version__, "jaxlib": importlib.metadata.version("jaxlib")}
    return found | {"device": jax.devices()[0].device_kind, "processor": _processor()}


def _processor() -> str:
    """The processor and its instructions, where Linux reports them."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:  # noqa: PTH123
            wanted = (line for line in lines if line.startswith(("model name", "flags", "Features")))
            return platform.machine() + "".join(sorted(set(wanted)))
    except OSError:
        return platform.machine() + platform.processor()


def _pages(name: str) -> str:
    return f"{name}-pages"


def _states(name: str) -> str:
    return f"{name}-states"


def _has_nan(x: np.ndarray) -> bool:
    """Whether a number is NaN, with which no prefix may continue."""
    return jax.numpy.issubdtype(x.dtype, np.floating) and bool(np.isnan(x.astype(np.float32)).any())
