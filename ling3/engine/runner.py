"""The device's side of the engine: the pool and the compiled programs over it. The loop decides what runs when."""

import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array, Shaped

from ling3.cache import CacheSpec, State, pages_of, slots_of
from ling3.engine.adapters import ServedAdapters
from ling3.engine.calls import adapters_of
from ling3.engine.filters import Filter
from ling3.engine.forward import Batch, Extension, Programs
from ling3.engine.masks import words
from ling3.engine.pool import (
    PAGES_MOVED,
    Pool,
    Rows,
    SlotContents,
    cache_dtype,
    moves,
    read_pages,
    swap_in,
    swap_out,
    write_pages,
)
from ling3.engine.request import TokenSequence
from ling3.engine.sampling import Adjustments, Choice, Sampling
from ling3.engine.sampling_params import MAX_STOP_IDS, SamplingParams
from ling3.engine.settings import DECODE_STEPS
from ling3.engine.shapes import Shapes
from ling3.engine.snapshots import Snapshot
from ling3.engine.verification import Drafts, Verified
from ling3.execution import Execution
from ling3.intervention import stacked
from ling3.mesh.sharded import placement_of
from ling3.model import CausalLM

Extra = Literal["structured", "prompt_logprobs"]
"""Fields of `SamplingParams` that need further programs, which a warm-up compiles on request."""

# Programs compiled in parallel. XLA uses several cores for some of the work on one.
COMPILED_AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Saved:
    """The states and pages of a sequence: of a preempted one on the host, or copied for others on the device."""

    states: tuple[State, ...]
    pages: tuple[tuple[Any, ...], ...]


class Runner:
    """Owns the pool. Methods dispatch work and return; reading their results waits for the device.

    `adapters` are for requests that name one; calls of other requests run the programs of the model alone.
    """

    def __init__(
        self,
        model: CausalLM,
        shapes: Shapes,
        execution: Execution | None = None,
        programs: Programs | None = None,
        filters: tuple[Filter, ...] = (),
        adapters: ServedAdapters | None = None,
    ):
        self.model, self.shapes, self.filters, self.adapters = model, shapes, filters, adapters
        placement = placement_of(model)
        self._put: Callable[[Any], Any] = jax.device_put if placement is None else placement.everywhere
        # To the host and back; on a mesh each process copies its devices' shards.
        self._fetch: Callable[[Any], Any] = jax.device_get if placement is None else placement.fetch
        self._restore: Callable[[Any], Any] = jax.device_put if placement is None else placement.back
        self.forward = Programs() if programs is None else programs
        self.execution = Execution.default() if execution is None else execution
        self.compile_seconds = 0.0  # spent in `warmup`
        self.updates = 0  # of the weights
        self.reset()

    def update(self, model: CausalLM) -> None:
        """Replaces the weights. Programs take them as an argument, so none is compiled again (`updates.py`)."""
        self.adapters = None if self.adapters is None else self.adapters.beside(model)
        self.model = model
        self.updates += 1  # after the model: whoever reads the new number then reads the new weights

    def reset(self) -> None:
        """Replaces the pool by an empty one."""
        shapes = self.shapes
        rows = [(SamplingParams(), 0, 0, ())] * shapes.slots
        sampling = self._sampling(rows, self._adjustments(shapes.slots))
        dtype, packed = cache_dtype(self.model, shapes.cache_dtype), shapes.cache_dtype == "packed"
        spec = CacheSpec(shapes.slots, shapes.pages, shapes.page_size, dtype, packed, self._mtp)
        self.pool = Pool.empty(self.model, sampling, spec)
        self._unadjusted = self._adjustments(1)
        self._fresh = jax.tree.map(lambda x: self._zeros(x, 1), slots_of(self.pool.layers))
        self._no_pages = tuple(self._zeros(paged.entries, PAGES_MOVED) for paged in pages_of(self.pool.layers))

    def swap_in(self, sequence: TokenSequence) -> None:
        """Fills the sequence's slot and pages: from its saved memory, if it has any, or from a known prefix."""
        memory = sequence.memory
        saved, states = memory.saved, self._fresh if memory.states is None else memory.states
        states = states if saved is None else self._restore(saved.states)
        newest = (sequence.token_ids or sequence.prompt)[-1]
        row = (sequence.params, sequence.seed, len(sequence.prompt), sequence.ends)
        sampling = self._sampling([row], self._adjustments_of(sequence))
        until = len(sequence.prompt) + sequence.params.max_tokens
        numbers = np.asarray([memory.slot, sequence.held, newest, until], np.int32)
        slot, held, newest, until = self._put(tuple(numbers))
        self.pool = swap_in(slot, SlotContents(states, held, newest, until, sampling), self.pool)
        for pages, entries in zip(self._moves(memory.pages), () if saved is None else saved.pages, strict=False):
            whole = entries if isinstance(saved, Saved) else _filled_up(entries)  # a snapshot's pages are not padded
            self.pool = write_pages(pages, self._restore(whole), self.pool)
        memory.saved = None
        copies = memory.pages[: len(memory.copied)]
        for source, own in zip(self._moves(memory.copied), self._moves(copies), strict=True):
            self.pool = write_pages(own, read_pages(source, self.pool), self.pool)

    def state_of(self, sequence: TokenSequence) -> State:
        """A copy, on the device, of the state that a sequence holds outside its pages."""
        return swap_out(self._int(sequence.memory.slot), self.pool)

    def copied(self, sequence: TokenSequence) -> Saved | None:
        """Copies the states and pages of a sequence on the device; None if its memory is not all in this pool."""
        if placement_of(self.model) is not None or not self.forward.snapshots or self.shapes.window is not None:
            return None
        used = self._moves(sequence.memory.pages[: self._used(sequence)])
        return Saved(self.state_of(sequence), tuple(read_pages(pages, self.pool) for pages in used))

    def swap_out(self, sequence: TokenSequence) -> Saved:
        """Copies the states and pages of a sequence to the host; waits for the device."""
        used = self._moves(sequence.memory.pages[: self._used(sequence)])
        states = self._fetch(self.state_of(sequence))
        return Saved(states, tuple(self._fetch(read_pages(pages, self.pool)) for pages in used))

    def keep(self, sequence: TokenSequence) -> Snapshot:
        """Takes a snapshot of a finished sequence, on the host; waits for the device."""
        saved = self.swap_out(sequence)
        counts = moves(self._used(sequence))
        pages = tuple(tuple(np.array(x[:n]) for x in some) for n, some in zip(counts, saved.pages, strict=True))
        return Snapshot(
            (*sequence.prompt, *sequence.token_ids),
            len(sequence.earlier) + len(sequence.token_ids),
            sequence.held,
            sequence.memory.first_page,
            saved.states,
            pages,
            sequence.request.origin,
        )

    def read(self, pages: Sequence[int]) -> tuple[Shaped[Array, "moved _page ..."], ...]:
        """Copies pages on the device, of each paged array; a program for each number of pages."""
        return read_pages(self._put(np.asarray(pages, np.int32)), self.pool)

    def write(self, pages: Sequence[int], contents: Sequence[Shaped[np.ndarray, "moved _page ..."]]) -> None:
        """Fills pages with what `read` returned of as many; out-of-range pages are left out."""
        self.pool = write_pages(self._put(np.asarray(pages, np.int32)), self._restore(tuple(contents)), self.pool)

    def scrub(self, slot: int, pages: Sequence[int]) -> None:
        """Zeros a slot and pages, so that no NaN stays in them."""
        for some in self._moves(pages):
            self.pool = write_pages(some, self._no_pages, self.pool)
        self.pool = swap_in(self._int(slot), self._empty_contents(), self.pool)

    def extend(self, batch: Batch, rows: Sequence[int], sequences: Sequence[TokenSequence]) -> Extension:
        """Dispatches `extend` for sequences with the same key; `rows` has the row of each."""
        following = np.zeros_like(batch.tokens)
        for row, sequence in zip(rows, sequences, strict=True):
            after = sequence.prompt[sequence.prefilled + 1 :][: batch.lengths[row]]
            following[row, : len(after)] = after
        interventions = stacked([sequence.interventions for sequence in sequences], rows, len(batch.lengths))
        parts = {"interventions": interventions, "want": sequences[0].want}
        parts |= {"targets": following if sequences[0].scored else None, "following": following if self._mtp else None}
        parts["adapter"] = adapters_of(sequences, rows, len(batch.lengths))
        inputs = self._inputs(dataclasses.replace(batch, **parts))
        extension, self.pool = self.forward.extend(*inputs, self.pool, self.execution)
        return extension

    @property
    def _mtp(self) -> bool:
        return self.shapes.drafts is not None and self.shapes.drafts.mtp

    def decode(self, batch: Batch, rows: Sequence[int], sequences: Sequence[TokenSequence]) -> Choice | Verified:
        """Dispatches `decode` for sequences with the same key; `rows` has the row of each."""
        interventions = stacked([sequence.interventions for sequence in sequences], rows, len(batch.lengths))
        parts = {"interventions": interventions, "adapter": adapters_of(sequences, rows, len(batch.lengths))}
        inputs = self._inputs(dataclasses.replace(batch, **parts))
        choice, self.pool = self.forward.decode(*inputs, self.pool, self.execution)
        return choice

    def _inputs(self, batch: Batch) -> tuple[CausalLM, Batch]:
        """The model and the batch for a program: the model with adapters only if the batch's rows have any."""
        model = self.model if batch.adapter is None or self.adapters is None else self.adapters.model
        return model, self._put(batch)

    def warmup_size(self, first_token: bool, also: Sequence[Extra]) -> int:
        """The number of programs that a warm-up compiles."""
        return sum(1 for _ in self._empty_calls(first_token, also))

    def warmup(self, first_token: bool = False, *also: Extra) -> Generator[str, None, None]:
        """Compiles every program, several at once, and runs each on empty rows; yields their names.

        With `first_token`, only the programs for a request's first token: others are compiled when they are needed.
        Programs for an `Extra` are compiled only if `also` names it.
        """
        begin = time.perf_counter()
        compilers = ThreadPoolExecutor(COMPILED_AT_ONCE)
        try:
            # JAX caches the compiled program, so that the call below finds it.
            programs = [
                (name, function, inputs, compilers.submit(self._compiler(function, inputs, how)), how)
                for name, function, inputs, *how in self._empty_calls(first_token, also)
            ]
            for name, function, inputs, compiled, how in programs:
                compiled.result()
                self._run(function, inputs, how)
                yield name
        finally:
            compilers.shutdown(cancel_futures=True)
            self.compile_seconds += time.perf_counter() - begin

    def _empty_calls(self, first_token: bool = False, also: Sequence[Extra] = ()) -> Iterator[tuple[Any, ...]]:
        """Yields (name, program, inputs that change no slot and no page, the execution if the program takes one).

        The programs that take longest to compile come first.
        """
        for adapted in (False,) if self.adapters is None else (False, True):
            yield from self._empty_passes(first_token, also, adapted)
        yield "swap in", swap_in, (self._int(self.shapes.slots), self._empty_contents())
        if not first_token:
            nowhere = self._put(np.full(PAGES_MOVED, self.shapes.pages, np.int32))
            yield "write pages", write_pages, (nowhere, self._no_pages)
            yield "swap out", swap_out, (self._int(0),)
            yield "read pages", read_pages, (nowhere,)

    def _empty_passes(self, first_token: bool, also: Sequence[Extra], adapted: bool) -> Iterator[tuple[Any, ...]]:
        """The forward passes among the empty calls: those of the model alone, or with adapters."""
        (extend, decode, parts, _), groups = self.forward, self.shapes.groups

        def call(name: str, program: Any, rows: int, seq: int, **some: Any) -> tuple[Any, ...]:
            if adapted:
                name, some["adapter"] = f"{name} with adapters", np.full(rows * groups, -1, np.int32)
            return name, program, self._empty_batch(rows, seq, **some), self.execution

        def masks(rows: int) -> np.ndarray:
            return np.zeros((rows * groups, words(self.model.config.vocab_size)), np.uint32)

        masked = "structured" in also and "masks" in parts
        for rows in reversed(self.shapes.rows[:1] if first_token else self.shapes.rows):
            yield call(f"decode of {rows}", decode, rows, 0)
            if masked:
                yield call(f"masked decode of {rows}", decode, rows, DECODE_STEPS, masks=masks(rows))
        if (drafts := self.shapes.drafts) is not None:
            rows = drafts.sequences
            none = np.zeros(rows * groups, np.int32)
            guesses = np.full((rows * groups, drafts.tokens - 1), -1, np.int32)
            empty = Drafts(guesses, none, none, drafts.each, drafts.mtp)
            yield call(f"decode of {rows} with drafts", decode, rows, 0, drafts=empty)
            if masked:
                name = f"masked decode of {rows} with drafts"
                yield call(name, decode, rows, DECODE_STEPS, drafts=empty, masks=masks(rows))
        for width in reversed(self.shapes.buckets):
            zeros = np.zeros((groups, width), np.int32)
            more = {"following": zeros} if self._mtp else {}
            yield call(f"extend by {width}", extend, 1, width, **more)
            if "prompt_logprobs" in also and "targets" in parts:
                yield call(f"scores of {width}", extend, 1, width, targets=zeros, **more)

    def _compiler(self, function: Any, inputs: tuple[Any, ...], how: Sequence[Execution]) -> Callable[[], object]:
        """A function that compiles a program; a program that is not jitted compiles its parts when it runs."""
        lower = getattr(function, "lower", None)
        return (lambda: None) if lower is None else lower(*inputs, self.pool, *how).compile

    def _run(self, function: Any, inputs: tuple[Any, ...], how: Sequence[Execution]) -> None:
        """Runs a program on inputs of `_empty_calls`, and waits for it."""
        done = function(*inputs, self.pool, *how)
        if function in self.forward[:2]:
            done = done[1]
        if isinstance(done, Pool):
            self.pool = done
        jax.block_until_ready(done)

    @property
    def programs(self) -> int:
        """The number of compiled variants of the engine's programs that the process holds."""
        functions: tuple[Any, ...] = (*self.forward[:2], swap_in, swap_out, read_pages, write_pages)
        return sum(function._cache_size() for function in functions if hasattr(function, "_cache_size"))

    def _empty_batch(self, rows: int, seq: int, **parts: Any) -> tuple[CausalLM, Batch]:
        """The model, and a batch with `rows` unused rows for each group."""
        shapes, count = self.shapes, rows * self.shapes.groups
        table = np.full((count, shapes.columns), shapes.pages, np.int32)
        unused = Rows(np.full(count, shapes.slots, np.int32), table, in_place=count == shapes.slots)
        batch = Batch(unused, np.full((count, seq), -1, np.int32), np.zeros(count, np.int32), **parts)
        return self._inputs(batch)

    def _empty_contents(self) -> SlotContents:
        """The contents of a free slot."""
        sampling = self._sampling([(SamplingParams(), 0, 0, ())], self._unadjusted)
        zero = self._int(0)
        return SlotContents(self._fresh, zero, zero, zero, sampling)

    def _used(self, sequence: TokenSequence) -> int:
        """The number of the sequence's pages that hold tokens."""
        return -(-sequence.held // self.shapes.page_size) - sequence.memory.first_page

    def _moves(self, pages: Sequence[int]) -> Iterator[Array]:
        for start in range(0, len(pages), PAGES_MOVED):
            moved = np.full(PAGES_MOVED, self.shapes.pages, np.int32)
            some = pages[start : start + PAGES_MOVED]
            moved[: len(some)] = some
            yield self._put(moved)

    def _sampling(self, rows: Sequence[tuple[Any, int, int, Sequence[int]]], adjustments: Adjustments) -> Sampling:
        return Sampling.build(rows, self.model.config.vocab_size, MAX_STOP_IDS, adjustments, self._put, self.filters)

    def _adjustments_of(self, sequence: TokenSequence) -> Adjustments:
        if not sequence.params.adjusts and not self.filters:
            return self._unadjusted
        row = (sequence.params, sequence.prompt, [*sequence.earlier, *sequence.token_ids])
        return Adjustments.build([row], self.model.config.vocab_size, self._put)

    def _adjustments(self, rows: int) -> Adjustments:
        """Adjustments that change no row."""
        return Adjustments.build([(SamplingParams(), (), ())] * rows, self.model.config.vocab_size, self._put)

    def _int(self, value: int | None) -> Array:
        assert value is not None, "a sequence without a slot is in no call"
        return self._put(np.asarray(value, np.int32))

    def _zeros(self, like: Array, rows: int) -> Array:
        """Zeros in the form of `rows` rows of an array."""
        return self._put(np.zeros((rows, *like.shape[1:]), like.dtype))


def _filled_up(entries: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """The entries of some pages, padded with zeros to the number of pages that one call moves."""
    missing = PAGES_MOVED - len(entries[0]) if entries else 0
    if not missing:
        return entries
    return tuple(np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) for x in entries)
