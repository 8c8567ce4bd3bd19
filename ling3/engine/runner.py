"""The device's side of the engine: the pool and the compiled programs over it. What runs when is the loop's."""

import dataclasses
import itertools
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Array

from ling3.cache import State, pages_of, slots_of
from ling3.engine import snapshots
from ling3.engine.masks import Masks
from ling3.engine.passes import Passes
from ling3.engine.plans import Plan
from ling3.engine.pool import (
    PAGES_MOVED,
    Pool,
    Rows,
    SlotContents,
    cache_dtype,
    read_pages,
    swap_in,
    swap_out,
    write_pages,
)
from ling3.engine.prefixes import Snapshot
from ling3.engine.request import TokenSequence
from ling3.engine.sampling import IN_PROMPT, Adjustments, Choice, Sampling
from ling3.engine.sampling_params import MAX_STOP_IDS, SamplingParams
from ling3.engine.settings import CacheDtype
from ling3.engine.shapes import Shapes, smallest
from ling3.execution import Execution
from ling3.intervention import Intervention, stacked
from ling3.model import CausalLM

Extra = Literal["structured", "prompt_logprobs", "keep"]
"""What takes programs that few engines run: a warm-up compiles those that are asked for."""

# Programs compiled at once. XLA spreads some of the work on one over more cores.
COMPILED_AT_ONCE = 4


@dataclasses.dataclass(frozen=True)
class Saved:
    """The states and pages of a preempted sequence, on the host."""

    states: tuple[State, ...]
    pages: tuple[tuple[Any, ...], ...]


class Runner:
    """Owns the pool. Methods dispatch work and return; reading what they return waits for it."""

    def __init__(
        self,
        model: CausalLM,
        shapes: Shapes,
        execution: Execution | None = None,
        cache: CacheDtype = "auto",
        passes: Passes | None = None,
    ):
        self.model, self.shapes = model, shapes
        placement = model.placement
        self._put: Callable[[Any], Any] = jax.device_put if placement is None else placement.everywhere
        # To the host and back, which on a mesh is each process's own.
        self._fetch: Callable[[Any], Any] = jax.device_get if placement is None else placement.fetch
        self._restore: Callable[[Any], Any] = jax.device_put if placement is None else placement.back
        self.passes = Passes() if passes is None else passes
        self.execution = Execution.default() if execution is None else execution
        self.compile_seconds = 0.0  # waited for, by calls and `warmup`
        self.decode_waits = False  # True: decode is not compiled yet, and a turn that has other work leaves it out
        self.dtype, self.packed = cache_dtype(model, cache), cache == "packed"
        self.reset()

    def reset(self) -> None:
        """An empty pool."""
        shapes, vocab = self.shapes, self.model.config.vocab_size
        rows = [(SamplingParams(), 0, 0, ())] * shapes.slots
        sampling = Sampling.build(rows, vocab, MAX_STOP_IDS, self._adjustments(shapes.slots), self._put)
        self.pool = Pool.empty(self.model, sampling, shapes.pages, shapes.page_size, self.dtype, self.packed)
        self._unadjusted = self._adjustments(1)
        self._fresh = jax.tree.map(lambda x: self._zeros(x, 1), slots_of(self.pool.layers))
        self._no_pages = tuple(self._zeros(paged.entries, PAGES_MOVED) for paged in pages_of(self.pool.layers))

    def swap_in(self, sequence: TokenSequence) -> None:
        """Fills the sequence's slot and pages: from what was saved of it if it was swapped out, or a known prefix."""
        saved, snapshot = sequence.saved, sequence.snapshot
        states = self._fresh if snapshot is None else snapshot.states
        states = states if saved is None else self._restore(saved.states)
        newest = (sequence.token_ids or sequence.prompt)[-1]
        sampling = Sampling.build(
            [(sequence.params, sequence.seed, len(sequence.prompt), sequence.ends)],
            self.model.config.vocab_size,
            MAX_STOP_IDS,
            self._adjustments_of(sequence),
            self._put,
        )
        numbers = np.asarray([sequence.slot, sequence.held, newest, sequence.until], np.int32)
        slot, held, newest, until, done = self._put((*numbers, np.asarray(not sequence.decoding)))
        self.pool = swap_in(slot, SlotContents(states, held, newest, until, done, sampling), self.pool)
        for pages, entries in zip(self._moves(sequence.pages), () if saved is None else saved.pages, strict=False):
            whole = _filled_up(entries) if isinstance(saved, snapshots.Snapshot) else entries
            self.pool = write_pages(pages, self._restore(whole), self.pool)
        sequence.saved = None
        copies = sequence.pages[: len(sequence.copied)]
        for source, own in zip(self._moves(sequence.copied), self._moves(copies), strict=True):
            self.pool = write_pages(own, read_pages(source, self.pool), self.pool)

    def snapshot(self, sequence: TokenSequence) -> Snapshot:
        """What the sequence holds outside its pages, copied on the device."""
        assert self.shapes.grid is not None, "asked where prefixes are kept"
        return Snapshot(swap_out(self._int(sequence.slot), self.pool), self.shapes.grid.snapshot)

    def swap_out(self, sequence: TokenSequence) -> Saved:
        """The states and pages of a sequence, copied to the host; waits for the device."""
        used = sequence.pages[: -(-sequence.held // self.shapes.page_size) - sequence.first_page]
        states = self._fetch(swap_out(self._int(sequence.slot), self.pool))
        return Saved(states, tuple(self._fetch(read_pages(pages, self.pool)) for pages in self._moves(used)))

    def keep(self, sequence: TokenSequence) -> snapshots.Snapshot:
        """What a finished sequence leaves behind, copied to the host; waits for the device."""
        saved, logits = self.swap_out(sequence), None if sequence.token_ids else np.asarray(sequence.logits)
        count = -(-sequence.held // self.shapes.page_size) - sequence.first_page
        own = [min(count - start, PAGES_MOVED) for start in range(0, count, PAGES_MOVED)]
        pages = tuple(tuple(np.array(x[:n]) for x in some) for n, some in zip(own, saved.pages, strict=True))
        return snapshots.Snapshot(
            (*sequence.prompt, *sequence.token_ids),
            len(sequence.earlier) + len(sequence.token_ids),
            sequence.held,
            sequence.first_page,
            saved.states,
            pages,
            logits,
            sequence.request.origin,
        )

    def scrub(self, slot: int, pages: Sequence[int]) -> None:
        """Zeros a slot and pages, so that no NaN stays in them."""
        for some in self._moves(pages):
            self.pool = write_pages(some, self._no_pages, self.pool)
        self.pool = swap_in(self._int(slot), self._empty_contents(), self.pool)

    def prefill(
        self, sequences: Sequence[TokenSequence], chunks: Sequence[Sequence[int]]
    ) -> tuple[Choice, Sequence[int]]:
        """Adds the sequences' next prompt tokens to their caches; with the last of them one gets its first new token.

        They are of different groups, and their chunks padded alike. Returns the row of each sequence too.
        """
        padded, lengths, end = self._no_tokens(smallest(self.shapes.buckets, len(chunks[0])))
        rows = self._places(sequences, 1)
        for row, sequence, tokens in zip(rows, sequences, chunks, strict=True):
            padded[row, : len(tokens)], lengths[row] = tokens, len(tokens)
            end[row] = sequence.prefilled + len(tokens) == len(sequence.prompt)
        inputs = (self._rows(sequences, 1), *self._put((padded, lengths, end)))
        how = self._interventions([sequence.interventions for sequence in sequences], rows, 1)
        choice, self.pool = self.passes.prefill(self.model, *inputs, self.pool, self.execution, **how)
        return choice, rows

    def decode(self, sequences: Sequence[TokenSequence], steps: int) -> tuple[Choice, Sequence[int]]:
        """Up to `steps` more tokens for each sequence, `[rows, DECODE_STEPS]`, and the row of each sequence."""
        rows = smallest(self.shapes.rows, max(Counter(sequence.group for sequence in sequences).values()))
        begin, places = time.perf_counter(), self._places(sequences, rows)
        inputs = (self._rows(sequences, rows), self._int(steps))
        how = self._interventions([sequence.later for sequence in sequences], places, rows)
        choice, self.pool = self.passes.decode(self.model, *inputs, self.pool, self.execution, **how)
        if self.decode_waits and not how:
            self.decode_waits = False
            self.compile_seconds += time.perf_counter() - begin
        return choice, places

    def score(
        self, sequences: Sequence[TokenSequence], chunks: Sequence[Sequence[int]]
    ) -> tuple[Choice, Sequence[int]]:
        """How likely the prompt's tokens after those of each chunk are, `[rows, tokens]`; to call before `prefill`."""
        assert self.passes.score is not None, "refused otherwise"
        padded, lengths, _ = self._no_tokens(smallest(self.shapes.buckets, len(chunks[0])))
        targets, alternatives = np.zeros_like(padded), np.zeros(len(lengths), bool)
        rows = self._places(sequences, 1)
        for row, sequence, tokens in zip(rows, sequences, chunks, strict=True):
            padded[row, : len(tokens)], lengths[row] = tokens, len(tokens)
            after = sequence.prompt[sequence.prefilled + 1 : sequence.prefilled + len(tokens) + 1]
            targets[row, : len(after)], alternatives[row] = after, bool(sequence.params.prompt_logprobs)
        inputs = (self._rows(sequences, 1), *self._put((padded, lengths, targets, alternatives)))
        how = self._interventions([sequence.interventions for sequence in sequences], rows, 1)
        choice, self.pool = self.passes.score(self.model, *inputs, self.pool, self.execution, **how)
        return choice, rows

    def prompt_end(self, sequence: TokenSequence, tokens: Sequence[int]) -> tuple[Choice, Sequence[int]]:
        """`prefill` of a prompt's last tokens, which chooses none, but leaves the sequence its logits."""
        assert self.passes.prompt_end is not None, "refused otherwise"
        padded, lengths, _ = self._no_tokens(smallest(self.shapes.buckets, len(tokens)))
        padded[0, : len(tokens)], lengths[0] = tokens, len(tokens)
        inputs = (self._rows([sequence], 1), *self._put((padded, lengths)))
        (choice, sequence.logits), self.pool = self.passes.prompt_end(self.model, *inputs, self.pool, self.execution)
        return choice, self._places([sequence], 1)

    def first_token(self, sequence: TokenSequence) -> tuple[Choice, Sequence[int]]:
        """The first token of a sequence whose prompt's logits are known."""
        assert self.passes.first_token is not None, "refused otherwise"
        inputs = (self._rows([sequence], 1), self._put(sequence.logits))
        choice, self.pool = self.passes.first_token(*inputs, self.pool, self.execution)
        sequence.logits = None
        return choice, self._places([sequence], 1)

    def watch(self, sequence: TokenSequence, chunk: Sequence[int]) -> tuple[dict[str, Any], Sequence[int]]:
        """Adds a watcher's next tokens to its caches; what was seen by path, `[rows, tokens, …]`, and its row."""
        assert self.passes.watch is not None, "refused otherwise"
        padded, lengths, _ = self._no_tokens(smallest(self.shapes.buckets, len(chunk)))
        rows = self._places([sequence], 1)
        padded[rows[0], : len(chunk)], lengths[rows[0]] = chunk, len(chunk)
        inputs = (self._rows([sequence], 1), *self._put((padded, lengths)), sequence.request.paths)
        how = self._interventions([sequence.interventions], rows, 1)
        seen, self.pool = self.passes.watch(self.model, *inputs, self.pool, self.execution, **how)
        return seen, rows

    def constrained(
        self, sequences: Sequence[TokenSequence], plans: Sequence[Plan], steps: int
    ) -> tuple[Choice, Sequence[int]]:
        """`decode` for sequences with grammars, whose plans have at most `steps` tokens."""
        assert self.passes.constrained is not None, "refused otherwise"
        rows = smallest(self.shapes.rows, max(Counter(sequence.group for sequence in sequences).values()))
        places, vocab = self._places(sequences, rows), self.model.config.vocab_size
        masks = Masks.build(rows * self.shapes.groups, vocab, places, plans, self._put)
        inputs = (self._rows(sequences, rows), self._int(steps), masks)
        how = self._interventions([sequence.later for sequence in sequences], places, rows)
        choice, self.pool = self.passes.constrained(self.model, *inputs, self.pool, self.execution, **how)
        return choice, places

    def warmup_size(self, first_token: bool, also: Sequence[Extra]) -> int:
        """How many programs a warm-up compiles."""
        extras = len(self.shapes.rows) * ("structured" in also and self.passes.constrained is not None)
        extras += len(self.shapes.buckets) * ("prompt_logprobs" in also and self.passes.score is not None)
        extras += (len(self.shapes.buckets) + 1) * ("keep" in also and self.passes.prompt_end is not None)
        return extras + len(self.shapes.buckets) + (1 if first_token else len(self.shapes.rows) + 4)

    def warmup(self, first_token: bool = False, *also: Extra) -> Generator[str, None, None]:
        """Compiles every program, several at once, and runs it on empty rows; yields the name of each.

        With `first_token` only what a request's first token needs: the others are compiled when they are needed. Those
        of an `Extra` are compiled only if `also` names it.
        """
        wanted = (swap_in, *self.passes[:1], *self.passes[2:])
        begin = time.perf_counter()
        compilers = ThreadPoolExecutor(COMPILED_AT_ONCE)
        try:
            # JAX keeps the compiled program where the call finds it.
            programs = [
                (name, function, inputs, compilers.submit(self._compiler(function, inputs, how)), how)
                for name, function, inputs, *how in itertools.chain(self._empty_calls(), self._extra_calls(also))
                if not first_token or function in wanted
            ]
            for name, function, inputs, compiled, how in programs:
                compiled.result()
                self._run(function, inputs, how)
                yield name
            self.decode_waits = first_token
        finally:
            compilers.shutdown(cancel_futures=True)
            self.compile_seconds += time.perf_counter() - begin

    def _empty_calls(self) -> Iterator[tuple[Any, ...]]:
        """Each program's name, the program, inputs that change no slot and no page, and the execution if it takes one.

        Those that compile longest come first.
        """
        for width in reversed(self.shapes.buckets):
            inputs = (self.model, self._rows([], 1), *self._put(self._no_tokens(width)))
            yield f"prefill of {width}", self.passes.prefill, inputs, self.execution
        for rows in reversed(self.shapes.rows):
            inputs = (self.model, self._rows([], rows), self._int(0))
            yield f"decode of {rows}", self.passes.decode, inputs, self.execution
        nowhere = self._put(np.full(PAGES_MOVED, self.shapes.pages, np.int32))
        yield "swap in", swap_in, (self._int(self.shapes.slots), self._empty_contents())
        yield "write pages", write_pages, (nowhere, self._no_pages)
        yield "swap out", swap_out, (self._int(0),)
        yield "read pages", read_pages, (nowhere,)

    def _extra_calls(self, also: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """The same for the programs of extras."""
        for width in reversed(self.shapes.buckets if "prompt_logprobs" in also and self.passes.score else ()):
            tokens, lengths, no = self._no_tokens(width)
            inputs = (self.model, self._rows([], 1), *self._put((tokens, lengths, tokens, no)))
            yield f"scores of {width}", self.passes.score, inputs, self.execution
        for width in reversed(self.shapes.buckets if "keep" in also and self.passes.prompt_end else ()):
            inputs = (self.model, self._rows([], 1), *self._put(self._no_tokens(width)[:2]))
            yield f"end of a prompt of {width}", self.passes.prompt_end, inputs, self.execution
        if "keep" in also and self.passes.first_token:
            logits = self._put(np.zeros((1, self.model.config.vocab_size), np.float32))
            yield "first token", self.passes.first_token, (self._rows([], 1), logits), self.execution
        for rows in reversed(self.shapes.rows if "structured" in also and self.passes.constrained else ()):
            masks = Masks.build(rows * self.shapes.groups, self.model.config.vocab_size, [], [], self._put)
            inputs = (self.model, self._rows([], rows), self._int(0), masks)
            yield f"masked decode of {rows}", self.passes.constrained, inputs, self.execution

    def _compiler(self, function: Any, inputs: tuple[Any, ...], how: Sequence[Execution]) -> Callable[[], object]:
        """What compiles a program; passes of several programs are compiled when they are run."""
        lower = getattr(function, "lower", None)
        return (lambda: None) if lower is None else lower(*inputs, self.pool, *how).compile

    def _run(self, function: Any, inputs: tuple[Any, ...], how: Sequence[Execution]) -> None:
        """Runs a program on such inputs, and waits for it."""
        done = function(*inputs, self.pool, *how)
        if function in self.passes:
            done = done[1]
        if isinstance(done, Pool):
            self.pool = done
        jax.block_until_ready(done)

    @property
    def programs(self) -> int:
        """How many compiled forms of the engine's programs the process holds."""
        functions: tuple[Any, ...] = (*self.passes, swap_in, swap_out, read_pages, write_pages)
        return sum(function._cache_size() for function in functions if hasattr(function, "_cache_size"))

    def _rows(self, sequences: Sequence[TokenSequence], rows: int) -> Rows:
        """Those of a call with so many rows for each group."""
        slots = np.full(rows * self.shapes.groups, self.shapes.slots, np.int32)
        table = np.full((len(slots), self.shapes.columns), self.shapes.pages, np.int32)
        for row, sequence in zip(self._places(sequences, rows), sequences, strict=True):
            assert sequence.slot is not None, "a sequence without a slot is in no call"
            slots[row] = sequence.slot
            first = sequence.first_page
            table[row, first : first + len(sequence.pages)] = sequence.pages
        return Rows(*self._put((slots, table)), in_place=self._in_place(rows))

    def _places(self, sequences: Sequence[TokenSequence], rows: int) -> Sequence[int]:
        """The row of each sequence: its slot in a call with a row for every slot, so that no state has to be moved."""
        if self._in_place(rows):
            return [sequence.slot for sequence in sequences if sequence.slot is not None]
        free = [itertools.count(group * rows) for group in range(self.shapes.groups)]
        return [next(free[sequence.group]) for sequence in sequences]

    def _interventions(
        self, own: Sequence[tuple[Intervention, ...]], places: Sequence[int], rows: int
    ) -> dict[str, Any]:
        """Those of a call's sequences, all alike, at their rows; without any, the argument is left out."""
        return {"interventions": self._put(stacked(own, places, rows))} if any(own) else {}

    def _in_place(self, rows: int) -> bool:
        """True if a call with so many rows for each group has one for every slot."""
        return rows * self.shapes.groups == self.shapes.slots

    def _no_tokens(self, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of a prefill call: each group's tokens, their number, and True where they end a prompt."""
        groups = self.shapes.groups
        return np.zeros((groups, width), np.int32), np.zeros(groups, np.int32), np.zeros(groups, bool)

    def _empty_contents(self) -> SlotContents:
        """The contents of a free slot."""
        row = (SamplingParams(), 0, 0, ())
        vocab = self.model.config.vocab_size
        sampling = Sampling.build([row], vocab, MAX_STOP_IDS, self._unadjusted, self._put)
        zero, done = self._int(0), self._put(np.asarray(True))
        return SlotContents(self._fresh, zero, zero, zero, done, sampling)

    def _moves(self, pages: Sequence[int]) -> Iterator[Array]:
        for start in range(0, len(pages), PAGES_MOVED):
            moved = np.full(PAGES_MOVED, self.shapes.pages, np.int32)
            some = pages[start : start + PAGES_MOVED]
            moved[: len(some)] = some
            yield self._put(moved)

    def _adjustments_of(self, sequence: TokenSequence) -> Adjustments:
        params = sequence.params
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        if penalties == (1.0, 0.0, 0.0) and not params.logit_bias:
            return self._unadjusted
        vocab = self.model.config.vocab_size
        bias, counts = np.zeros((1, vocab), np.float32), np.zeros((1, vocab), np.int32)
        for token, value in (params.logit_bias or {}).items():
            bias[0, token] = value
        counts[0, list(set(sequence.prompt))] = IN_PROMPT
        np.add.at(counts[0], [*sequence.earlier, *sequence.token_ids], 1)
        numbers = (np.asarray([value], np.float32) for value in penalties)
        return Adjustments(*self._put((np.asarray([True]), *numbers, bias, counts)))

    def _adjustments(self, rows: int) -> Adjustments:
        """Adjustments that change no row."""
        vocab = self.model.config.vocab_size
        ones, zeros = np.ones(rows, np.float32), np.zeros(rows, np.float32)
        bias, counts = np.zeros((rows, vocab), np.float32), np.zeros((rows, vocab), np.int32)
        return Adjustments(*self._put((np.zeros(rows, bool), ones, zeros, zeros.copy(), bias, counts)))

    def _int(self, value: int | None) -> Array:
        assert value is not None, "a sequence without a slot is in no call"
        return self._put(np.asarray(value, np.int32))

    def _zeros(self, like: Array, rows: int) -> Array:
        """Zeros for so many rows of an array."""
        return self._put(np.zeros((rows, *like.shape[1:]), like.dtype))


def _filled_up(entries: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Some pages with zeros after them, as many as one call moves."""
    missing = PAGES_MOVED - len(entries[0]) if entries else 0
    if not missing:
        return entries
    return tuple(np.concatenate([x, np.zeros((missing, *x.shape[1:]), x.dtype)]) for x in entries)
