"""The engine: requests come and go, a fixed set of compiled programs runs, and an answer never depends on its company.

One turn of the loop (`Engine.step`):

    make room   for the next tokens of all who decode; when pages run out, the youngest gives up its slot
    admit       the oldest waiting requests, while there are slots and pages: first come, first served
    prefill     the next chunks of their prompts, up to `chunked_prefill_size` tokens
    decode      `decode_steps` tokens for every request past its prompt, `decode_rows` requests to a call
    read        the tokens of the *last* turn, while the device works on this one

Every program has fixed shapes, and a row's result depends on its own inputs alone. So a request's tokens and
log-probabilities are bit for bit the same whoever runs beside it, whenever it comes, and after being preempted.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import os
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import jax
import numpy as np

from ling3 import checkpoint
from ling3.interrupts import Interrupt, held_back
from ling3.model import Ling3ForCausalLM
from ling3.outputs import FINISH_REASONS, Delta, RequestOutput
from ling3.params import SamplingParams, check_prompt, check_room, is_whole, shown
from ling3.pool import DECODE_STEPS
from ling3.progress import progress
from ling3.request import Request, Run, draw_seed
from ling3.runner import Runner, Shapes, pages_that_fit, smallest
from ling3.sampling import Choice
from ling3.scheduler import Scheduler
from ling3.streaming import StopStrings
from ling3.tokenizer import Tokenizer, load_tokenizer

Truncate = Literal["prompt", "output"] | None
"""What gives way where prompt and max_tokens do not fit: the prompt's beginning, max_tokens, or nothing (an error)."""


class QueueFull(RuntimeError):
    """`max_queue` requests are waiting already: let some finish first."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """The engine's books. `submitted` completions are waiting, running or finished, and pages and slots add up."""

    submitted: int
    waiting: int
    running: int
    finished: dict[str, int]
    """By finish reason."""
    slots: int
    free_slots: int
    pages: int
    free_pages: int
    page_size: int
    prompt_tokens: int
    """Brought into the caches."""
    output_tokens: int
    preemptions: int
    steps: int
    """Turns of the loop."""
    prefill_calls: int
    decode_calls: int


@dataclasses.dataclass
class _Call:
    """Work on its way: whose rows, the most tokens each can get, and what will come of it."""

    choice: Choice
    runs: Sequence[Run]
    most: Sequence[int]


class Engine:
    """Continuous batching over one model, in this process.

    `max_running_requests` slots hold the running requests' states; pages of `page_size` tokens hold their latents, as
    many as fit into `mem_fraction` of the memory that the weights leave free, or `num_pages`. Prompts go in by chunks
    at multiples of `chunked_prefill_size` tokens, padded to the smallest of `token_paddings` that holds them. A request
    may have `max_model_len` tokens (the config's max_position_embeddings without it), and `max_queue` may wait.

    `decode_rows` requests share a decode call of `decode_steps` tokens: 16 on a CPU, all slots elsewhere. With
    `batch_invariant=False` few running requests share a smaller call instead, which is faster for them; then the last
    bits of an answer may depend on how many there are.

    Methods may be called from any thread; one at a time moves the loop. A callback may submit and abort, but cannot
    move the loop that called it. Ctrl-C waits for the end of a turn. A fault of the engine's own, such as a device out
    of memory, ends every request in `error` and is raised in everyone who waits for one; the engine begins anew.

    Raises ValueError for senseless settings, and if tokenizer and model do not fit.
    """

    def __init__(
        self,
        model: Ling3ForCausalLM,
        tokenizer: Tokenizer | None = None,
        max_running_requests: int = 64,
        page_size: int = 256,
        chunked_prefill_size: int = 512,
        token_paddings: Sequence[int] = (16, 128, 512),
        max_model_len: int | None = None,
        mem_fraction: float = 0.6,
        max_queue: int = 1024,
        num_pages: int | None = None,
        decode_rows: int | None = None,
        decode_steps: int = 8,
        batch_invariant: bool = True,
    ):
        config = model.config
        if tokenizer is not None:
            tokenizer.check_fits(config.vocab_size)
        max_model_len = config.max_position_embeddings if max_model_len is None else max_model_len
        if decode_rows is None:
            decode_rows = 16 if jax.default_backend() == "cpu" else max_running_requests
        _check_settings(
            max_running_requests=(max_running_requests, 1, None),
            page_size=(page_size, 1, None),
            chunked_prefill_size=(chunked_prefill_size, 1, None),
            max_model_len=(max_model_len, 1, config.max_position_embeddings),
            max_queue=(max_queue, 1, None),
            decode_rows=(decode_rows, 1, None),
            decode_steps=(decode_steps, 1, DECODE_STEPS),
            **{f"token_paddings[{i}]": (width, 1, None) for i, width in enumerate(token_paddings)},
            **({} if num_pages is None else {"num_pages": (num_pages, 1, None)}),
        )
        if max(token_paddings, default=0) < chunked_prefill_size:
            raise ValueError(
                f"token_paddings are {tuple(token_paddings)}, expected one of at least chunked_prefill_size, which is "
                f"{chunked_prefill_size}"
            )
        if not 0 < mem_fraction <= 1:
            raise ValueError(f"engine settings: mem_fraction is {mem_fraction!r}, expected a number in (0, 1]")
        columns = -(-max_model_len // page_size)
        if num_pages is None:
            num_pages = pages_that_fit(model, max_running_requests, columns, page_size, float(mem_fraction))
        widths = sorted(set(token_paddings))
        self.tokenizer = tokenizer
        self.max_model_len, self.max_queue = max_model_len, max_queue
        self.chunk, self.decode_rows, self.decode_steps = chunked_prefill_size, decode_rows, decode_steps
        self.batch_invariant = batch_invariant
        self._ends = tuple(sorted({*config.eos_token_id, *(tokenizer.eos_token_ids if tokenizer else ())}))
        self._runner = Runner(
            model,
            Shapes(
                slots=max_running_requests,
                pages=num_pages,
                page_size=page_size,
                columns=columns,
                widths=tuple(widths[: widths.index(smallest(widths, chunked_prefill_size)) + 1]),
                rows=(decode_rows,) if batch_invariant else _doublings(max_running_requests),
            ),
        )
        self._scheduler = Scheduler(max_running_requests, num_pages, page_size)
        self._requests: dict[int, Request] = {}
        self._ids, self._order = itertools.count(), itertools.count()
        self._in_flight: list[_Call] = []
        self._outbox: list[Delta] = []
        self._dropped: deque[Request] = deque()  # their readers have left
        self._raised: list[BaseException] = []  # by callbacks, to be raised when the books are in order
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._drivers: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}
        self._turn = threading.Lock()  # held by who moves the loop
        self._lock = threading.RLock()  # held while the books change; see `_books`
        self._changing = 0  # depth of the changes under way; 0 in callbacks
        self._calling: int | None = None  # the thread that is in a callback

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], dtype: Any = None, **settings: Any) -> "Engine":
        """The engine over a checkpoint directory, a hub id, or `"nano"`, with its tokenizer.

        `dtype` is `ling3.load`'s; `settings` are the constructor's.
        """
        tokenizer = load_tokenizer(path)
        return cls(checkpoint.load(path, dtype), tokenizer, **settings)

    # Asking

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        truncate: Truncate = None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> int:
        """Puts a request in the queue and returns its id; `step` moves it on and returns its deltas.

        `prompt` is a text, a list of token ids, or a list of chat messages (dicts with `role` and `content`). With
        `on_delta` the deltas go there instead; if it raises, the request ends in `error`. Raises QueueFull, and
        ValueError for what can never be answered.
        """
        request = self._request(prompt, params, truncate, "prompt")
        request.report = self._outbox_append
        if on_delta is not None:
            request.deliver = on_delta
        try:
            self._enqueue(request)
        except BaseException:
            self._abort(request)
            raise
        return request.request_id

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate: Truncate = None,
        on_delta: Callable[[Delta], None] | None = None,
        on_interrupt: Literal["raise", "return"] = "raise",
    ) -> list[RequestOutput]:
        """The answers to prompts, in their order, with a progress bar once it takes over two seconds.

        `prompts` is a list of what `submit` takes, or just one of them; `params` are for all, or one for each. All are
        checked before the first runs, and as many wait at once as the queue holds. On Ctrl-C every slot is freed;
        `on_interrupt="return"` then returns what there is, with `abort` for what was not finished.
        """
        prompts = _listed(prompts)
        several = isinstance(params, Sequence)
        each = list(params) if several else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params for {len(prompts)} prompts, expected one for all or one for each")
        requests = [
            self._request(prompt, p, truncate, f"prompt {i}")
            for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))
        ]
        with held_back() as interrupt, progress("generating", sum(r.params.n for r in requests)) as advance:
            for request in requests:
                request.deliver = _counted(on_delta, advance)
            coming, unfinished = deque(requests), deque(requests)
            try:
                while unfinished:
                    while coming and self._enqueued(coming[0]):
                        coming.popleft()
                    self._move()
                    interrupt.pass_on()
                    while unfinished and unfinished[0].finished:
                        unfinished.popleft()
            except KeyboardInterrupt:
                if on_interrupt == "raise":
                    raise
            finally:
                with self._books():
                    for request in requests:
                        self._abort(request)
                    self._raised = []
        fault = next((request.fault for request in requests if request.fault is not None), None)
        if fault is not None:
            raise fault
        return [output for request in requests if (output := request.output()) is not None]

    def stream(
        self, prompt: Any, params: SamplingParams | None = None, *, truncate: Truncate = None
    ) -> Iterator[Delta]:
        """A request's deltas as they come; leaving the loop aborts it. Checked and queued when called."""
        deltas: deque[Delta] = deque()
        request = self._request(prompt, params, truncate, "prompt")
        request.deliver = deltas.append
        reader = self._stream(request, deltas)
        next(reader)  # an iterator that was never begun would not notice that it is dropped
        self._enqueue(request)
        return reader

    def _stream(self, request: Request, deltas: deque[Delta]) -> Iterator[Any]:
        try:
            yield None
            finished = 0
            while finished < request.params.n:
                if not deltas:
                    self._move()
                while deltas:
                    delta = deltas.popleft()
                    finished += delta.finish_reason is not None
                    yield delta
            if request.fault is not None:
                raise request.fault
        finally:
            self._drop(request)

    async def astream(
        self, prompt: Any, params: SamplingParams | None = None, *, truncate: Truncate = None
    ) -> AsyncIterator[Delta]:
        """The same for asyncio, any number of them at once; the loop moves in a thread, and leaving it aborts.

        Checked and queued when the first delta is asked for.
        """
        events, news, deltas = asyncio.get_running_loop(), asyncio.Event(), deque[Delta]()

        def deliver(delta: Delta) -> None:
            deltas.append(delta)
            events.call_soon_threadsafe(news.set)

        request = self._request(prompt, params, truncate, "prompt")
        request.deliver = deliver
        try:
            await asyncio.to_thread(self._enqueue, request)  # the books may be in use for as long as a program compiles
            finished, driver = 0, None
            while finished < request.params.n:
                if driver is None or driver.done():
                    driver = self._drive(events)
                    driver.add_done_callback(lambda _: news.set())
                await news.wait()
                news.clear()
                while deltas:
                    delta = deltas.popleft()
                    finished += delta.finish_reason is not None
                    yield delta
            if request.fault is not None:
                raise request.fault
        finally:
            self._drop(request)

    def _drive(self, events: asyncio.AbstractEventLoop) -> "asyncio.Task[None]":
        """The task that moves the loop for all streams of an event loop, while there is work."""

        async def drive() -> None:
            while self._requests or self._in_flight:
                await asyncio.to_thread(self._move)

        def driven(driver: "asyncio.Task[None]") -> None:
            if self._drivers.get(events) is driver:
                del self._drivers[events]
            if not driver.cancelled():
                driver.exception()  # every reader raises it

        if events not in self._drivers or self._drivers[events].done():
            self._drivers[events] = events.create_task(drive())
            self._drivers[events].add_done_callback(driven)
        return self._drivers[events]

    def abort(self, request_id: int) -> bool:
        """Ends a request with `abort`, wherever it is; False if there is none of this id (any more)."""
        with self._books():
            request = self._requests.get(request_id)
            aborted = request is not None and self._abort(request)
        self._raise()
        return aborted

    # The loop

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, or has anything to return."""
        with self._books():
            return bool(self._requests or self._in_flight or self._outbox)

    def step(self) -> list[Delta]:
        """One turn of the loop; returns the deltas of submitted requests that are new since the last step."""
        self._move()
        with self._books():
            deltas, self._outbox = self._outbox, []
        return deltas

    def _move(self) -> None:
        """One turn of the loop."""
        with self._moving():
            try:
                with self._books():
                    launched = self._launch()
                    before, self._in_flight = self._in_flight, launched
                jax.block_until_ready([call.choice for call in before])
                with self._books():
                    self._read(before)
            except Exception as error:
                self._fail(error)
                raise
            self._raise()

    @contextlib.contextmanager
    def _moving(self) -> Iterator[Interrupt]:
        """Held by the one thread that moves the loop. Ctrl-C waits for the end, so that nothing is left half done."""
        if self._calling == threading.get_ident():
            raise RuntimeError(
                "a callback for deltas cannot move the loop that called it: submit there, and the loop will come to it"
            )
        with self._turn, held_back() as interrupt:
            yield interrupt

    @contextlib.contextmanager
    def _books(self) -> Iterator[None]:
        """Held by the one thread that looks at the books or changes them. Ctrl-C waits for the end."""
        with held_back():
            with self._lock:
                self._changing += 1
                try:
                    yield
                finally:
                    self._changing -= 1
            self._sweep()

    def _drop(self, request: Request) -> None:
        """Aborts a request whose reader has left: now, or when the books are no longer in use.

        It never waits, as an event loop must not, and changes nothing amid another change: the garbage collector may
        close an iterator anywhere.
        """
        self._dropped.append(request)
        with held_back():
            self._sweep()

    def _sweep(self) -> None:
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                if self._changing or not self._dropped:
                    return
                self._changing += 1
                try:
                    self._abort(self._dropped.popleft())
                finally:
                    self._changing -= 1
            finally:
                self._lock.release()

    def _raise(self) -> None:
        """Raises what a callback raised that is not its request's affair, such as KeyboardInterrupt."""
        raised, self._raised = self._raised, []
        if raised:
            raise raised[0]

    def _launch(self) -> list[_Call]:
        """Dispatches a turn's work without waiting for the last turn's, unless there is no room otherwise."""
        self._counts["steps"] += 1
        self._make_room()
        self._admit()
        calls = self._prefill()
        # Who has just been prefilled goes on at once if there is room.
        ready = [run for run in self._scheduler.running if run.decoding and run.left > 0]
        ready = [run for run in ready if self._scheduler.reserve(run, self._goal(run))]
        return calls + self._decode(ready)

    def _goal(self, run: Run) -> int:
        """Tokens that the run's caches may have to hold after the next decode call."""
        return len(run.prompt) + len(run.token_ids) + run.ahead - 1 + min(self.decode_steps, run.left)

    def _make_room(self) -> None:
        """Gives every decoding run pages for its next call, the oldest first, by preempting the youngest."""
        for run in list(self._scheduler.running):
            while run.slot is not None and run.decoding and run.left > 0:
                if self._scheduler.reserve(run, self._goal(run)):
                    break
                if self._in_flight:  # some may have finished, and the books must be exact before a run is moved
                    calls, self._in_flight = self._in_flight, []
                    self._read(calls)
                else:
                    self._preempt(self._scheduler.running[-1])

    def _preempt(self, run: Run) -> None:
        """Puts a run back into the queue, its states and pages kept on the host bit for bit."""
        run.saved = self._runner.depart(run) if run.held else None
        run.preemptions += 1
        self._counts["preemptions"] += 1
        self._scheduler.release(run)
        self._scheduler.enqueue(run)

    def _admit(self) -> None:
        while (run := self._scheduler.head()) is not None and self._scheduler.admit(self._goal(run)) is not None:
            run.admitted()
            self._runner.arrive(run)

    def _prefill(self) -> list[_Call]:
        """The next chunks, the oldest run's first, up to `chunked_prefill_size` padded tokens in all."""
        calls, spent = [], 0
        for run in self._scheduler.running:
            while not run.decoding:
                size = min(self.chunk - run.prefilled % self.chunk, len(run.prompt) - run.prefilled)
                spent += smallest(self._runner.shapes.widths, size)
                if calls and spent > self.chunk:
                    return calls
                choice = self._runner.prefill(run, run.prompt[run.prefilled : run.prefilled + size])
                run.prefilled += size
                self._counts["prefill_calls"] += 1
                self._counts["prompt_tokens"] += size
                calls.append(_Call(choice, [run], [int(run.decoding)]))
                run.ahead += int(run.decoding)
        return calls

    def _decode(self, runs: Sequence[Run]) -> list[_Call]:
        """The next tokens of the runs, as many to a call as its rows."""
        calls, rows = [], self._runner.shapes.rows[-1]
        for start in range(0, len(runs), rows):
            some = runs[start : start + rows]
            most = [min(self.decode_steps, run.left) for run in some]
            calls.append(_Call(self._runner.decode(some, max(most)), some, most))
            self._counts["decode_calls"] += 1
            for run, tokens in zip(some, most, strict=True):
                run.ahead += tokens
        return calls

    def _read(self, calls: Sequence[_Call]) -> None:
        """Takes in what calls have brought."""
        for call in calls:
            for run, most in zip(call.runs, call.most, strict=True):
                run.ahead -= most
            if not any(most and run.completion is None for run, most in zip(call.runs, call.most, strict=True)):
                continue
            rows = len(call.runs)
            tokens, logprobs = (
                np.asarray(x)[:rows].reshape(rows, -1) for x in (call.choice.token, call.choice.logprob)
            )
            top_ids, top_logprobs = (
                np.zeros((rows, tokens.shape[1], 0), np.int32),
                np.zeros((rows, tokens.shape[1], 0), np.float32),
            )
            if any(run.params.logprobs for run in call.runs):
                shape = (rows, tokens.shape[1], -1)
                top_ids, top_logprobs = (
                    np.asarray(x)[:rows].reshape(shape) for x in (call.choice.top_ids, call.choice.top_logprobs)
                )
            for row, (run, most) in enumerate(zip(call.runs, call.most, strict=True)):
                if run.completion is not None or not most:
                    continue
                held = len(run.token_ids)
                delta = run.take(tokens[row], logprobs[row], top_ids[row], top_logprobs[row])
                self._counts["output_tokens"] += len(run.token_ids) - held
                self._settle(run, delta)

    def _settle(self, run: Run, delta: Delta | None) -> None:
        """Frees what a finished run held, and hands out its delta."""
        if run.completion is not None:
            self._retire(run)
        if delta is not None and (error := self._deliver(run.request, delta)) is not None:
            self._give_up(run, f"the callback for its deltas raised {error!r}")

    def _deliver(self, request: Request, delta: Delta) -> Exception | None:
        """Hands out a delta; what its callback raised. Here the books are in order, and the callback may use them."""
        before, self._changing, self._calling = (self._changing, self._calling), 0, threading.get_ident()
        try:
            request.deliver(delta)
        except Exception as error:
            return error
        except BaseException as error:
            self._raised.append(error)
        finally:
            self._changing, self._calling = before
        return None

    def _give_up(self, run: Run, error: str) -> None:
        """Ends the request of a run whose callback failed: the run in `error`, however it had ended, and the others."""
        request = run.request
        request.deliver = request.report
        if (completion := run.completion) is not None:
            self._finished[completion.finish_reason] -= 1
            self._finished["error"] += 1
            self._deliver(request, run.fail(error))
        for other in request.runs:
            if other.completion is None:
                self._settle(other, other.fail(error))

    def _retire(self, run: Run) -> None:
        """Takes a finished run off the books."""
        assert run.completion is not None, "only a finished run retires"
        self._finished[run.completion.finish_reason] += 1
        if run.slot is None:
            self._scheduler.withdraw(run)
        else:
            if run.completion.finish_reason == "error":
                self._runner.scrub(run)
            self._scheduler.release(run)
        if run.request.finished:
            del self._requests[run.request.request_id]

    def _fail(self, error: Exception) -> None:
        """After a fault of the engine's own: every request ends in `error`, and the engine begins anew."""
        with self._books():
            requests, self._requests, self._in_flight = list(self._requests.values()), {}, []
            shapes = self._runner.shapes
            self._scheduler = Scheduler(shapes.slots, shapes.pages, shapes.page_size)
            for request in requests:
                request.fault = error
                for run in request.runs:
                    if run.completion is None:
                        run.slot, run.pages = None, []
                        self._finished["error"] += 1
                        self._deliver(request, run.finish("error", error=f"the engine failed: {error!r}"))
            self._runner.reset()

    # Around it

    def warmup(self) -> None:
        """Compiles every program, with a progress bar; none is compiled after that. Ctrl-C waits for the next one."""
        shapes = self._runner.shapes
        with self._moving() as interrupt, progress("compiling", len(shapes.widths) + len(shapes.rows) + 2) as advance:
            programs, compiled = self._runner.warmup(), ""
            while compiled is not None:
                try:
                    with self._books():
                        compiled = next(programs, None)
                except Exception as error:
                    self._fail(error)
                    raise
                advance(int(compiled is not None))
                interrupt.pass_on()

    def stats(self) -> Stats:
        """The books, at this moment."""
        with self._books():
            scheduler, finished = self._scheduler, {reason: self._finished[reason] for reason in FINISH_REASONS}
            counts = ("submitted", "prompt_tokens", "output_tokens", "preemptions")
            return Stats(
                waiting=scheduler.waiting,
                running=len(scheduler.running),
                finished=finished,
                slots=scheduler.slots,
                free_slots=scheduler.free_slots,
                pages=scheduler.pages,
                free_pages=scheduler.free_pages,
                page_size=scheduler.page_size,
                **{name: self._counts[name] for name in (*counts, "steps", "prefill_calls", "decode_calls")},
            )

    def _request(self, prompt: Any, params: SamplingParams | None, truncate: Truncate, name: str) -> Request:
        """The checked request, not yet in the queue."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params are {shown(params)}, expected ling3.SamplingParams")
        if params.n > self.max_queue:
            raise ValueError(f"n is {params.n}, but max_queue is {self.max_queue}")
        vocab = self._runner.model.config.vocab_size
        ends = params.check(vocab, self._ends)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: strings need a tokenizer, and this engine has none; use stop_token_ids")
        ids = check_prompt(self._encode(prompt, name), vocab, name)
        ids, params = self._fitted(ids, params, truncate, name)
        seed = draw_seed() if params.seed is None else params.seed
        text = prompt if isinstance(prompt, str) else None
        request = Request(next(self._ids), text, ids, params, self._outbox_append)
        for index in range(params.n):
            decoder = None if self.tokenizer is None else self.tokenizer.stream(ids)
            request.runs.append(Run(request, index, -1, seed + index, ends, decoder, StopStrings(params.stop)))
        return request

    def _outbox_append(self, delta: Delta) -> None:
        self._outbox.append(delta)

    def _encode(self, prompt: Any, name: str) -> Any:
        chat = _is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], dict)
        if not chat and not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError(f"{name} is text, and this engine has no tokenizer: give token ids")
        try:
            return self.tokenizer.apply_chat_template(prompt) if chat else self.tokenizer.encode(prompt)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _fitted(
        self, ids: list[int], params: SamplingParams, truncate: Truncate, name: str
    ) -> tuple[list[int], SamplingParams]:
        """Prompt and params, one of them cut where they do not fit and `truncate` says which; ValueError else."""
        room = self.max_model_len
        if truncate == "output" and len(ids) < room:
            most = min(params.max_tokens, room - len(ids))
            params = dataclasses.replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        elif truncate == "prompt" and params.max_tokens < room:
            ids = ids[-(room - params.max_tokens) :]
        check_room(ids, params.max_tokens, room, name)
        scheduler = self._scheduler
        pages = scheduler.pages_for(len(ids) + params.max_tokens - 1)
        if pages > scheduler.pages:
            raise ValueError(
                f"{name} has {len(ids)} tokens and max_tokens is {params.max_tokens}: that takes {pages} pages of "
                f"{scheduler.page_size} tokens, and the engine has {scheduler.pages}; ask for less, or give the engine "
                "more (num_pages, mem_fraction)"
            )
        return ids, params

    def _enqueued(self, request: Request) -> bool:
        """Puts a request in the queue if there is room."""
        with self._books():
            room = self._scheduler.waiting + request.params.n <= self.max_queue
            if room:
                self._enqueue(request)
            return room

    def _enqueue(self, request: Request) -> None:
        with self._books():
            if request.finished:  # its reader has left
                return
            if self._scheduler.waiting + request.params.n > self.max_queue:
                raise QueueFull(
                    f"{self._scheduler.waiting} requests are waiting and max_queue is {self.max_queue}: step until "
                    "some have finished, or give the engine a larger max_queue"
                )
            self._requests[request.request_id] = request
            for run in request.runs:
                run.order = next(self._order)
                run.submitted()
                self._scheduler.enqueue(run)
            self._counts["submitted"] += len(request.runs)

    def _abort(self, request: Request) -> bool:
        """Ends what is unfinished of a request with `abort`; whether anything was."""
        with self._books():
            aborted = False
            for run in request.runs:
                if run.completion is None:
                    aborted, last = True, run.finish("abort")
                    if request.request_id in self._requests:  # else it never came into the queue
                        self._settle(run, last)
            return aborted


def _check_settings(**settings: tuple[Any, int, int | None]) -> None:
    """ValueError for each (value, least, most) that is no whole number between them."""
    problems = [
        f"{name} is {value!r:.40}, expected a whole number in [{low}, {'∞' if high is None else high}]"
        for name, (value, low, high) in settings.items()
        if not (is_whole(value) and low <= value and (high is None or value <= high))
    ]
    if problems:
        raise ValueError("engine settings: " + "; ".join(problems))


def _doublings(most: int) -> tuple[int, ...]:
    """2, 4, 8, … and `most`, which is at least 2."""
    most = max(most, 2)
    return tuple(sorted({most, *(2**i for i in range(1, most.bit_length()) if 2**i < most)}))


def _listed(prompts: Any) -> list[Any]:
    """The prompts as a list: a text, ids and a chat are one each."""
    if isinstance(prompts, (bytes, Mapping, Set)):
        raise ValueError(f"prompts are {shown(prompts)}, expected a list; a chat is a list of messages")
    several = [prompts] if isinstance(prompts, str) else list(prompts)
    one = len(several) > 0 and all(is_whole(x) or isinstance(x, dict) for x in several)
    return [several] if one else several


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _counted(on_delta: Callable[[Delta], None] | None, advance: Callable[[int], None]) -> Callable[[Delta], None]:
    def deliver(delta: Delta) -> None:
        advance(int(delta.finish_reason is not None))
        if on_delta is not None:
            on_delta(delta)

    return deliver
