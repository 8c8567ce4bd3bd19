"""The device's side of the engine: the pool, the programs over it, and nothing about who runs when."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from ling3.cache import State, pages_of, slots_of
from ling3.engine.pool import (
    PAGES_MOVED,
    Arrival,
    Pool,
    Rows,
    arrive,
    cache_dtype,
    decode,
    depart,
    prefill,
    read_pages,
    write_pages,
)
from ling3.engine.request import Run
from ling3.engine.sampling import IN_PROMPT, Adjustments, Choice, Sampling
from ling3.engine.sampling_params import MAX_STOP_IDS, SamplingParams
from ling3.execution import Execution
from ling3.model import CausalLM

# Programs compiled at once. XLA spreads some of the work on one over more cores.
COMPILED_AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What the compiled programs are compiled for."""

    slots: int
    pages: int
    page_size: int
    columns: int
    """Pages of the longest request."""
    widths: tuple[int, ...]
    """Tokens of a prefill call, padded to the smallest that holds them."""
    rows: tuple[int, ...]
    """Rows of a decode call, padded likewise."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """A preempted run's memory, on the host."""

    states: tuple[State, ...]
    pages: tuple[tuple[Float[np.ndarray, "moved page *entry"], ...], ...]


class Runner:
    """Owns the pool. Every method returns at once; what it returns is awaited by reading it."""

    def __init__(self, model: CausalLM, shapes: Shapes, execution: Execution | None = None):
        self.model, self.shapes = model, shapes
        self.execution = Execution.default() if execution is None else execution
        self.compile_seconds = 0.0  # that calls and `warmup` have waited for
        self.decode_waits = False  # for being compiled, until there is nothing else to do
        self.dtype = cache_dtype(model)
        self.reset()

    def reset(self) -> None:
        """An empty pool."""
        shapes, vocab = self.shapes, self.model.config.vocab_size
        sampling = Sampling.build([(SamplingParams(), 0, 0, ())] * shapes.slots, vocab, MAX_STOP_IDS)
        sampling = dataclasses.replace(sampling, adjustments=_adjustments(shapes.slots, vocab))
        self.pool = Pool.empty(self.model, sampling, shapes.pages, shapes.page_size, self.dtype)
        self._unadjusted = _adjustments(1, vocab)
        self._fresh = jax.tree.map(lambda x: _zeros(x, 1), slots_of(self.pool.layers))
        self._no_pages = tuple(_zeros(paged.entries, PAGES_MOVED) for paged in pages_of(self.pool.layers))

    def arrive(self, run: Run) -> None:
        """Fills the run's slot: from nothing, or from what was saved of it."""
        saved = run.saved
        states = self._fresh if saved is None else jax.device_put(saved.states)
        newest = run.token_ids[-1] if run.token_ids else 0
        sampling = Sampling.build(
            [(run.params, run.seed, len(run.prompt), run.ends)], self.model.config.vocab_size, MAX_STOP_IDS
        )
        sampling = dataclasses.replace(sampling, adjustments=self._adjustments_of(run))
        done = jax.device_put(np.asarray(not run.decoding))
        arrival = Arrival(states, _int(run.held), _int(newest), _int(run.until), done, sampling)
        self.pool = arrive(_int(run.slot), arrival, self.pool)
        for pages, contents in zip(self._moves(run.pages), () if saved is None else saved.pages, strict=False):
            self.pool = write_pages(pages, jax.device_put(contents), self.pool)
        run.saved = None

    def depart(self, run: Run) -> Saved:
        """What must be kept of a run that gives up its slot; waits for the device."""
        used = run.pages[: -(-run.held // self.shapes.page_size)]
        states = jax.device_get(depart(_int(run.slot), self.pool))
        return Saved(states, tuple(jax.device_get(read_pages(pages, self.pool)) for pages in self._moves(used)))

    def scrub(self, run: Run) -> None:
        """Zeros in the run's slot and pages."""
        for pages in self._moves(run.pages):
            self.pool = write_pages(pages, self._no_pages, self.pool)
        self._clear(run.slot)

    def prefill(self, run: Run, tokens: Sequence[int]) -> Choice:
        """Brings the run's next prompt tokens into its caches; a token for it, if they are its last."""
        width = smallest(self.shapes.widths, len(tokens))
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(tokens)] = tokens
        end = run.prefilled + len(tokens) == len(run.prompt)
        inputs = jax.device_put((padded, np.asarray([len(tokens)], np.int32), np.asarray([end])))
        choice, self.pool = prefill(self.model, self._rows([run], 1), *inputs, self.pool, self.execution)
        return choice

    def decode(self, runs: Sequence[Run], steps: int) -> tuple[Choice, Sequence[int]]:
        """Up to `steps` more tokens for each run, `[rows, DECODE_STEPS]`, and which row is whose."""
        rows = smallest(self.shapes.rows, len(runs))
        begin = time.perf_counter()
        choice, self.pool = decode(self.model, self._rows(runs, rows), _int(steps), self.pool, self.execution)
        if self.decode_waits:
            self.decode_waits = False
            self.compile_seconds += time.perf_counter() - begin
        return choice, self._places(runs, rows)

    def warmup(self, first_token: bool = False) -> Iterator[str]:
        """Compiles every program, several at once, and runs it on nothing; one an item.

        With `first_token` only what a request's first token needs: the others are compiled when they are needed.
        """
        begin = time.perf_counter()
        compilers = ThreadPoolExecutor(COMPILED_AT_ONCE)
        try:
            # The compiled program stays with the lowered one, where the call finds it.
            programs = [
                (name, function, inputs, compilers.submit(function.lower(*inputs, self.pool, *how).compile), how)
                for name, function, inputs, *how in self._nothing()
                if not first_token or function in (prefill, arrive)
            ]
            for name, function, inputs, compiled, how in programs:
                compiled.result()
                self._run(function, inputs, how)
                yield name
            self.decode_waits = first_token
        finally:
            compilers.shutdown(cancel_futures=True)
            self.compile_seconds += time.perf_counter() - begin

    def _nothing(self) -> Iterator[tuple[Any, ...]]:
        """Each program's name, the program, inputs that change no slot and no page, and the execution if it takes one.

        Those that compile longest come first.
        """
        for width in reversed(self.shapes.widths):
            inputs = (np.zeros((1, width), np.int32), np.zeros(1, np.int32), np.zeros(1, bool))
            yield (
                f"prefill of {width}",
                prefill,
                (self.model, self._rows([], 1), *jax.device_put(inputs)),
                self.execution,
            )
        for rows in reversed(self.shapes.rows):
            yield f"decode of {rows}", decode, (self.model, self._rows([], rows), _int(0)), self.execution
        nowhere = jax.device_put(np.full(PAGES_MOVED, self.shapes.pages, np.int32))
        yield "arrive", arrive, (_int(self.shapes.slots), self._nobody())
        yield "write pages", write_pages, (nowhere, self._no_pages)
        yield "depart", depart, (_int(0),)
        yield "read pages", read_pages, (nowhere,)

    def _run(self, function: Any, inputs: tuple[Any, ...], how: Sequence[Execution]) -> None:
        """Runs a program for nothing but the pool, and waits for it."""
        done = function(*inputs, self.pool, *how)
        if function in (prefill, decode):
            done = done[1]
        if isinstance(done, Pool):
            self.pool = done
        jax.block_until_ready(done)

    @property
    def programs(self) -> int:
        """How many compiled programs the process holds of those the engine runs."""
        functions: tuple[Any, ...] = (prefill, decode, arrive, depart, read_pages, write_pages)
        return sum(function._cache_size() for function in functions)

    def _rows(self, runs: Sequence[Run], rows: int) -> Rows:
        slots = np.full(rows, self.shapes.slots, np.int32)
        table = np.full((rows, self.shapes.columns), self.shapes.pages, np.int32)
        for row, run in zip(self._places(runs, rows), runs, strict=True):
            assert run.slot is not None, "a run without a slot has no row"
            slots[row] = run.slot
            table[row, : len(run.pages)] = run.pages
        return Rows(*jax.device_put((slots, table)), in_place=rows == self.shapes.slots)

    def _places(self, runs: Sequence[Run], rows: int) -> Sequence[int]:
        """The row of each run: in a call of as many rows as there are slots its slot, so that no state has to move."""
        slots = [run.slot for run in runs if run.slot is not None]
        return slots if rows == self.shapes.slots else range(len(runs))

    def _clear(self, slot: int | None) -> None:
        self.pool = arrive(_int(slot), self._nobody(), self.pool)

    def _nobody(self) -> Arrival:
        """No request: what a slot holds that waits for one."""
        sampling = Sampling.build([(SamplingParams(), 0, 0, ())], self.model.config.vocab_size, MAX_STOP_IDS)
        sampling = dataclasses.replace(sampling, adjustments=self._unadjusted)
        return Arrival(self._fresh, _int(0), _int(0), _int(0), jax.device_put(np.asarray(True)), sampling)

    def _moves(self, pages: Sequence[int]) -> Iterator[Array]:
        for start in range(0, len(pages), PAGES_MOVED):
            moved = np.full(PAGES_MOVED, self.shapes.pages, np.int32)
            some = pages[start : start + PAGES_MOVED]
            moved[: len(some)] = some
            yield jax.device_put(moved)

    def _adjustments_of(self, run: Run) -> Adjustments:
        params = run.params
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if penalties == (1.0, 0.0, 0.0) and not params.logit_bias:
            return self._unadjusted
        vocab = self.model.config.vocab_size
        bias, counts = np.zeros((1, vocab), np.float32), np.zeros((1, vocab), np.int32)
        for token, value in (params.logit_bias or {}).items():
            bias[0, token] = value
        counts[0, list(set(run.prompt))] = IN_PROMPT
        np.add.at(counts[0], run.token_ids, 1)
        numbers = (np.asarray([value], np.float32) for value in penalties)
        return Adjustments(*jax.device_put((np.asarray([True]), *numbers, bias, counts)))


def smallest(sizes: Sequence[int], needed: int) -> int:
    """The first of the ascending `sizes` that is enough."""
    return next(size for size in sizes if size >= needed)


def _adjustments(rows: int, vocab: int) -> Adjustments:
    """None for any of the rows."""
    ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.float32)
    bias, counts = np.zeros((rows, vocab), np.float32), np.zeros((rows, vocab), np.int32)
    return Adjustments(*jax.device_put((np.zeros(rows, bool), ones, zeros, zeros.copy(), bias, counts)))


def _int(value: int | None) -> Array:
    assert value is not None, "a run without a slot has no row"
    return jax.device_put(np.asarray(value, np.int32))


def _zeros(like: Array, rows: int) -> Array:
    """Zeros for so many rows of an array."""
    return jax.device_put(np.zeros((rows, *like.shape[1:]), like.dtype))
