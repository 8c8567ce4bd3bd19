"""The engine: continuous batching over one model, in one loop.

Sequences join and leave a running batch between two calls of the device (continuous batching: Orca, Yu et al., OSDI
2022), and their caches are in pages (vLLM, Kwon et al., SOSP 2023). One turn of the loop is `Loop.turn`:

    make room   for the next tokens of all decoding sequences; if pages run out, the youngest is preempted
    admit       the oldest waiting sequences, while there are slots and pages: first come, first served; each continues
                from the longest known prefix of its prompt
    extend      puts the next chunks of prompts into the caches, up to `chunked_prefill_size` tokens; samples nothing
    decode      samples tokens for every sequence whose prompt is in the caches except its last token: several steps
                in one call, but one step while prompts are being prefilled
    read        takes the tokens of the *previous* turn, while the device works on this one

Every call has a fixed shape, and a row's result depends only on its inputs. So the tokens and log-probabilities of a
sequence are bit for bit the same whatever runs beside it, at any time, and after being preempted. The loop is
deterministic: it reads no clock and draws no random numbers, so that several processes can run it in step.

The device's side is in `engine/forward.py` (the two programs) and `engine/runner.py` (the pool and its calls), memory
in `engine/scheduler.py`, a sequence and its text in `engine/request.py`, threads and asyncio in `engine/front.py`.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ling3 import checkpoint
from ling3.adapters import Adapter
from ling3.checkpoint import hub
from ling3.engine import lockstep
from ling3.engine.actor import join_abandoned
from ling3.engine.adapters import ServedAdapters
from ling3.engine.calls import Call, Decoded, Extended, Passed, block_table, pass_batch, prompt_batch, step_batch
from ling3.engine.filters import Filter, checked
from ling3.engine.forward import Programs
from ling3.engine.front import Front, Server
from ling3.engine.intake import Intake
from ling3.engine.plans import common_steps
from ling3.engine.request import TokenSequence
from ling3.engine.requests import QueueFull, Requests
from ling3.engine.runner import Runner
from ling3.engine.settings import EngineSettings, changed
from ling3.engine.shapes import settle, smallest
from ling3.engine.speculation import Speculation
from ling3.engine.speculator import Speculator
from ling3.execution import Execution
from ling3.model import CausalLM
from ling3.runtime import compilation_cache
from ling3.runtime.entry_checks import refuse_fork
from ling3.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Engine", "Loop", "QueueFull", "Server"]

BESIDE = 4
"""The most steps of a decode call while synchronous sequences run, which wait for the host after each call."""


class Loop(Requests):
    """Continuous batching: decides which sequences run next, dispatches their calls, and gives them the results.

    With `settings.overlap` the host reads the results of a turn while the device works on the next; without it, each
    turn waits for its own results. The bits are the same.
    """

    def __init__(self, runner: Runner, settings: EngineSettings, *, alike: bool = False):
        super().__init__(runner, settings)
        self.speculator = Speculator(runner.shapes, overlap=settings.overlap, alike=alike)

    def turn(self) -> Iterator[Call]:
        """Runs one turn. Yields each call before it reads its results, so that the caller can wait for the device."""
        self.counts["steps"] += 1
        self.refill()
        self._make_room()
        self._admit()
        extended = self._extend()
        synchronous, others = self._decode()
        self._foresee()
        now, later = [], [*extended, *others]
        if synchronous:  # read in this turn, and the calls that were dispatched before them first
            now, later = [*extended, *synchronous], others
        if not self.settings.overlap:
            now, later = [*now, *later], []
        before, self.in_flight = self.in_flight, later
        for call in [*before, *now]:
            yield call
            self._read(call)
        self.speculator.end([*before, *now], later)

    def _make_room(self) -> None:
        """Gives every decoding sequence pages for its next call, the oldest first, by preempting the youngest."""
        for sequence in list(self.scheduler.running):
            while sequence.memory.slot is not None and sequence.decoding and sequence.left > 0:
                if self.scheduler.reserve(sequence, self._goal(sequence)):
                    break
                if self.in_flight:  # some may finish, and a sequence is swapped out only once its tokens are read
                    calls, self.in_flight = self.in_flight, []
                    for call in calls:
                        self._read(call)
                else:
                    self._preempt(self.scheduler.youngest(self.scheduler.group_of(sequence)))

    def _preempt(self, sequence: TokenSequence) -> None:
        """Preempts a sequence: copies its states and pages to the host, bit for bit, and queues it again."""
        self.scheduler.group_of(sequence).free_behind(sequence)
        sequence.memory.saved = self.runner.swap_out(sequence) if sequence.held else None
        sequence.times.preemptions += 1
        self.counts["preemptions"] += 1
        self.scheduler.release(sequence)
        self.scheduler.enqueue(sequence)

    def _admit(self) -> None:
        """Gives waiting sequences slots and pages, while there are any."""
        while (head := self.scheduler.head()) is not None:
            known = head.cached
            if self.scheduler.admit(self._goal(head)) is None:
                return
            self.counts["cached_tokens"] += 0 if head.times.preemptions else known
            head.times.admit()
            self._fill(head, known)

    def _fill(self, sequence: TokenSequence, known: int) -> None:
        """Fills a sequence's slot; `known` is the value of `cached` before it adopted its present prefix."""
        self.runner.swap_in(sequence)
        if sequence.cached > known:
            self.scheduler.prefixes_of(sequence).settled(sequence)
            self.counts["cached_tokens"] += sequence.cached - known
        if sequence.decoding and not sequence.params.max_tokens:  # nothing is to be computed
            self.settle(sequence, sequence.finish("length"))

    def _extend(self) -> list[Call]:
        """Dispatches the next chunks of prompts, the oldest sequence's first, up to a chunk of padded tokens in all.

        A call has one row for each group of devices: chunks of several groups share it if they have the same bucket.
        """
        calls, spent = [], 0
        while heads := self._next_prompts():
            width = self._width(heads[0])
            spent += width
            if calls and spent > self.settings.chunked_prefill_size:
                break
            alike = [each for each in heads if self._width(each) == width and each.key == heads[0].key]
            calls.append(self._extend_together(alike))
        return calls

    def _next_prompts(self) -> list[TokenSequence]:
        """The oldest sequence of each group whose prompt is not yet prefilled, the oldest of all first."""
        found: dict[int, TokenSequence] = {}
        for sequence in list(self.scheduler.running):
            if sequence.decoding or sequence.memory.group in found:
                continue
            known = sequence.cached
            # Earlier prompts may have added a longer known prefix since it was admitted.
            if self.scheduler.prefixes_of(sequence).adopt(sequence):
                self._fill(sequence, known)
            if not sequence.decoding:
                found[sequence.memory.group] = sequence
        return list(found.values())

    def _chunk(self, sequence: TokenSequence) -> int:
        """Tokens of the next chunk of a sequence's prompt."""
        chunk = self.settings.chunked_prefill_size
        return min(chunk - sequence.prefilled % chunk, sequence.prefill_end - sequence.prefilled)

    def _width(self, sequence: TokenSequence) -> int:
        """The prefill bucket of the next chunk."""
        return smallest(self.runner.shapes.buckets, self._chunk(sequence))

    def _extend_together(self, sequences: list[TokenSequence]) -> Call:
        """Dispatches the next chunks of sequences of different groups, in one call."""
        chunks = []
        for sequence in sequences:
            reserved = self.scheduler.reserve(sequence, self._goal(sequence))
            assert reserved, "a sequence is admitted with the pages for any one of its chunks"
            chunks.append(sequence.prompt[sequence.prefilled : sequence.prefilled + self._chunk(sequence)])
        where, rows = block_table(sequences, 1, self.runner.shapes)
        batch = prompt_batch(where, rows, chunks, self._width(sequences[0]))
        results = self.runner.extend(batch, rows, sequences)
        self.counts["prefill_calls"] += 1
        for sequence, chunk in zip(sequences, chunks, strict=True):
            sequence.prefilled += len(chunk)
            self.counts["prompt_tokens"] += len(chunk)
            self.scheduler.prefixes_of(sequence).keep(sequence, self.runner.state_of)
            if sequence.decoding and len(sequence.request.sequences) > 1:
                self._hand_on(sequence)
        return Extended(results, sequences, rows, list(map(len, chunks)), [each.decoding for each in sequences])

    def _hand_on(self, sequence: TokenSequence) -> None:
        """Copies the caches of a short prompt for the request's other sequences, so that it is prefilled once.

        A longer prompt is a known prefix by now, but for its last tokens.
        """
        others = [each for each in sequence.request.sequences if not each.prefilled and each.completion is None]
        if not others or sequence.prefill_end >= self.settings.prefix_step:
            return
        if (copy := self.runner.copied(sequence)) is None:
            return
        for other in others:
            runs = other.memory.slot is not None
            if runs and not self.scheduler.reserve(other, self._goal(other)):
                continue  # it prefills the prompt itself, once there are pages
            other.memory.saved, other.prefilled, other.cached = copy, sequence.prefilled, sequence.prefilled
            if runs:
                self.runner.swap_in(other)
                self.counts["cached_tokens"] += other.cached

    def _decode(self) -> tuple[list[Call], list[Call]]:
        """Dispatches decode calls; returns those of synchronous sequences, which are read in this turn, and the others.

        If one of the others gets its first token, a call of one step goes first, so that its first token does not wait
        for further steps.
        """
        running, calls = self.scheduler.running, []
        guess = self.speculator.begin(running)  # sequences that guess wait for the host, as synchronous ones do

        def waits(sequence: TokenSequence) -> bool:
            return sequence.synchronous or (guess and sequence.speculation is not None)

        ready = [each for each in running if each.decoding and each.left > 0 and not (waits(each) and each.ahead)]
        ready = [each for each in ready if self.scheduler.reserve(each, self._goal(each))]
        if guess:
            ready = [each for each in ready if self._guesses(each, Speculation.guess, each.left - 1)]
            guess = self.speculator.choose([each.speculation for each in ready if each.speculation is not None])
        first = [each for each in ready if not (each.token_ids or each.ahead)]
        self.counts["prompt_tokens"] += len(first)  # each prompt's last token
        synchronous = self._decode_in(list(filter(waits, ready)), self.settings.decode_steps, 2)
        others, steps = [each for each in ready if not waits(each)], self.settings.decode_steps
        if not all(each.decoding for each in running):
            steps = 1
        elif any(map(waits, running)):
            steps = min(BESIDE, steps)
        if steps > 1 and any(not waits(each) for each in first):
            calls = self._decode_in(others, 1, 8)
            others, steps = [each for each in others if each.left > 0], steps - 1
        return synchronous, calls + self._decode_in(others, steps, 8)

    def _decode_in(self, sequences: Sequence[TokenSequence], steps: int, idle: int) -> list[Call]:
        """Dispatches calls of at most `steps` steps, of which at most 1/`idle` of the row-steps give no token."""
        calls, sizes, drafts = [], self.runner.shapes.rows, self.runner.shapes.drafts
        for some in self.scheduler.alike(sequences, sizes[-1], sizes[-1] if drafts is None else drafts.sequences):
            checked = drafts if any(sequence.drafts is not None for sequence in some) else None
            if checked is not None:
                plans, count = [sequence.plan(checked.tokens) for sequence in some], checked.sequences
            else:
                plans = [sequence.plan(steps) for sequence in some]
                if (together := common_steps(plans, idle)) < max(plan.count for plan in plans):
                    plans = [sequence.plan(together) for sequence in some]
                count = smallest(sizes, max(Counter(sequence.memory.group for sequence in some).values()))
            where, rows = block_table(some, count, self.runner.shapes)
            if checked is None:
                batch, kind = step_batch(where, rows, plans), Decoded
            else:
                depths = [0 if plan.drafts is None else plan.depth for plan in plans]
                batch, kind = pass_batch(where, rows, plans, checked, steps), functools.partial(Passed, depths=depths)
            results: Any = self.runner.decode(batch, rows, some)
            self.counts["decode_calls"] += 1
            for sequence, plan in zip(some, plans, strict=True):
                sequence.ahead += plan.count
            calls.append(kind(results, some, rows, [plan.count for plan in plans]))
        return calls

    def _foresee(self) -> None:
        """Lets sequences in calls in flight foresee their tokens, which shows whether it would pay to check guesses."""
        for sequence in list(self.scheduler.running):
            if sequence.ahead and not sequence.synchronous:
                self._guesses(sequence, Speculation.foresee)

    def _guesses(self, sequence: TokenSequence, how: Callable[..., None], *most: int) -> bool:
        """Lets the sequence guess its next tokens; False if that failed, which ends it."""
        try:
            if sequence.speculation is not None:
                how(sequence.speculation, [*sequence.prompt, *sequence.token_ids], *most)
        except Exception as error:
            self.settle(sequence, sequence.fail(f"speculation: its tokens could not be guessed: {error!r}"))
            return False
        return True

    def _goal(self, sequence: TokenSequence) -> int:
        """Tokens that the sequence's caches may have to hold after the next decode call."""
        held = sequence.prefill_end + len(sequence.token_ids) + sequence.ahead
        return held + min(self.settings.most_steps, sequence.left)

    def _read(self, call: Call) -> None:
        """Reads the results of a call, waiting for them if necessary."""
        for sequence, count in zip(call.sequences, call.ahead, strict=True):
            sequence.ahead -= count
        if all(sequence.completion is not None for sequence in call.sequences):
            return
        results: Any = call.on_host()
        for i, sequence in enumerate(call.sequences):
            if sequence.completion is not None:  # it ended before this call, or when an earlier one was read
                continue
            self.counts.subtract(sequence.tally)
            try:
                delta = call.take(results, i)
            except Exception as error:
                sequence.decoder = None  # it may have raised, and `fail` would flush it
                delta = sequence.fail(f"its tokens could not be read: {error!r}")
            self.counts.update(sequence.tally)
            self.settle(sequence, delta)


class Engine(Front):
    """Continuous batching over one model, in this process.

    Slots hold the running requests' states, and pages their paged caches; `settings` says how many there are, and how
    prompts and decode steps are batched. Results do not depend on other requests, bit for bit.

    Methods may be called from any thread. The engine's thread runs all requests while a caller waits for the deltas of
    any, and does one turn for each `step`. It also calls the callbacks of `submit`, which may submit and abort, but not
    wait for the engine (RuntimeError). A KeyboardInterrupt or SystemExit in a callback is raised in the current `step`
    or `abort`, or else in all callers that wait for deltas.

    Ctrl-C interrupts a caller's wait at once; the current turn is completed, so that no request is lost. A fault of the
    engine itself, such as a device out of memory, ends every request in `error` and is raised in all callers that wait
    for one; then the engine starts again. Memory and thread are freed as soon as the engine is dropped, and the
    interpreter's exit waits for the current turn.

    JAX's context managers act on one thread. The engine copies the values of `jax.default_device` and
    `jax.default_matmul_precision` when it is made, and no others; `jax.config.update` acts on all threads.

    `settings` may be given as one object, by name (`Engine(model, tokenizer, page_size=16)`), or both, where a name
    replaces a single field; `engine.settings` is what it runs with, every None replaced by its value. `execution` is
    how the model runs (chunk sizes, kernels), by default as suits the platform. `programs` are its two forward programs
    over the pool, by default `extend` and `decode` of `engine/forward.py` (`ling3.afd` has others). `filters` are
    functions f(logits, so_far) of one request's logits [vocab], applied to all requests in this order
    (`ling3.engine.filters`). `adapters` are LoRA adapters, or paths that `ling3.load_adapter` reads, by the names that
    `SamplingParams.adapter` takes. Compiled programs are cached for later processes, see
    `ling3.runtime.compilation_cache`.

    Raises TypeError for unknown settings, ValueError for invalid ones and for more slots and pages than fit into
    memory, TokenizerError if tokenizer and model do not fit, and AdapterError for an adapter that does not fit and for
    a model that has one already.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None = None,
        settings: EngineSettings | None = None,
        *,
        execution: Execution | None = None,
        programs: Programs | None = None,
        filters: Sequence[Filter] = (),
        adapters: Mapping[str, Adapter | str | os.PathLike[str]] | None = None,
        **changes: Any,
    ):
        refuse_fork()
        join_abandoned()
        compilation_cache.switch_on()
        if tokenizer is not None:
            tokenizer.check_fits(model.config.vocab_size)
        execution = Execution.default() if execution is None else execution
        settings, wire = changed(settings, changes), lockstep.wire_of(model)
        settings = settings if wire is None else lockstep.shared(settings, wire)
        if settings.speculation is not None and programs is not None and "drafts" not in programs.parts:
            raise ValueError("engine settings: speculation: the forward programs of this engine take no drafts")
        if adapters and programs is not None and "adapter" not in programs.parts:
            raise ValueError("adapters: the forward programs of this engine take none")
        served = ServedAdapters.of(model, adapters) if adapters else None
        settings, shapes = settle(settings, model, execution)
        filters = checked(filters, model.config.vocab_size)
        runner = Runner(model, shapes, execution, programs, filters, served)
        loop = Loop(runner, settings, alike=wire is not None)
        intake = Intake.of(runner, tokenizer, settings, lockstep.leads(wire))
        Front.__init__(self, intake, loop, wire)

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        dtype: Any = None,
        settings: EngineSettings | None = None,
        *,
        revision: str | None = None,
        execution: Execution | None = None,
        filters: Sequence[Filter] = (),
        adapters: Mapping[str, Adapter | str | os.PathLike[str]] | None = None,
        **changes: Any,
    ) -> "Engine":
        """Makes an engine from what `ling3.load` takes, such as a directory, with the tokenizer of the same commit.

        `dtype` and `revision` are as in `ling3.load`; the others are the constructor's.
        """
        settings = changed(settings, changes)
        commit = hub.pin(path, revision)
        tokenizer = load_tokenizer(path, revision=commit)
        model = checkpoint.load(path, dtype, revision=commit, mtp=settings.speculation == "mtp")
        return cls(model, tokenizer, settings, execution=execution, filters=filters, adapters=adapters)
