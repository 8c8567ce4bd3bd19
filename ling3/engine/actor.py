"""The engine's thread: only this thread touches the loop, and callers exchange messages with it.

It handles messages in order, between turns and while the device works on a turn. The loop runs while a caller waits for
a turn or for deltas, and is idle otherwise. Callers wait in their own threads, so Ctrl-C interrupts their wait at once;
the turn in progress is completed all the same.
"""

import asyncio
import atexit
import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from ling3.engine.lockstep import Leader, Message
from ling3.engine.outputs import Delta
from ling3.engine.request import Request
from ling3.engine.requests import QueueFull, Requests
from ling3.runtime.entry_checks import refuse_fork

# The watcher's message to the inbox: the array that it waited for is ready.
READY = object()
# Settings made by `with jax.default_device(...)` and the like hold in one thread: the engine's thread copies these.
CONTEXTS = ("default_device", "default_matmul_precision")

# For each engine's thread, the engine and the inbox for messages to it.
_threads: dict[threading.Thread, tuple["weakref.ref[object]", "queue.SimpleQueue[Any]"]] = {}


class Reader:
    """Passes the deltas of some requests from the engine's thread to the caller that waits for them.

    `put` is called in the engine's thread with each (index of the request, delta), or with an exception for the caller
    to raise. With `whole`, only the last delta of each sequence is sent.
    """

    def __init__(self, requests: Sequence[Request], put: Callable[[Any], object], whole: bool = False):
        self.requests = requests
        self.fault: Exception | None = None  # the engine's fault, if one of the requests ended in it
        self.waits = False
        self._put, self._whole = put, whole
        self.sent = self.taken = 0  # numbers of items
        self._unfinished = {(i, k) for i, request in enumerate(requests) for k in range(request.params.n)}
        for i, request in enumerate(requests):
            request.deliver = functools.partial(self._deliver, i)

    def unfinished(self) -> bool:
        """Returns True if more deltas will come. After the last, raises the engine's fault if one ended a request."""
        if not self._unfinished and self.fault is not None:
            raise self.fault
        return bool(self._unfinished)

    def take(self, item: Any) -> tuple[int, Delta]:
        """Returns the next item in the caller's thread, or raises it if it is an exception."""
        self.taken += 1
        if isinstance(item, BaseException):
            raise item
        i, delta = item
        if delta.finish_reason is not None:
            self._unfinished.discard((i, delta.index))
            self.fault = self.fault or self.requests[i].fault
        return item

    def send(self, item: Any) -> None:
        """Sends an item to the caller. Called in the engine's thread."""
        self.waits, self.sent = False, self.sent + 1
        self._put(item)

    def _deliver(self, i: int, delta: Delta) -> None:
        if delta.finish_reason is not None or not self._whole:
            self.send((i, delta))


class Actor:
    """The thread that runs a loop, for as long as the loop's `owner` exists.

    It also handles messages while it waits for the device, unless other processes follow the loop (`lockstep.py`).

    A message is (reply, method, args): a function that gets the answer, or None; a method of this class; its arguments.
    Messages and the thread hold no reference to the actor, so the owner's memory is freed as soon as it is dropped.
    Callers wait in `SimpleQueue.get`: Ctrl-C in the Python code of a Future or Condition could leave its lock held.
    """

    def __init__(self, loop: Requests, leader: Leader | None, owner: object):
        self._loop, self._leader, self._inbox = loop, leader, queue.SimpleQueue()
        self._watched = queue.SimpleQueue()
        self._readers: set[Reader] = set()  # those that wait for an item
        self._turns: list[Callable[[Any], object]] = []  # replies to send at the end of the next turn
        self._scheduled = False
        settings = {name: getattr(jax.config, f"jax_{name}") for name in CONTEXTS}
        contexts = [getattr(jax, name)(value) for name, value in settings.items() if value is not None]
        arguments = (weakref.ref(self), self._inbox, self._watched, contexts)
        self._thread = threading.Thread(target=_serve, args=arguments, name="ling3-engine", daemon=True)
        _threads[self._thread] = weakref.ref(owner), self._inbox
        weakref.finalize(owner, self._inbox.put, None).atexit = False
        self._thread.start()

    # For callers, in any thread

    @property
    def alive(self) -> bool:
        """True as long as the engine's thread runs."""
        return self._thread.is_alive()

    def call(self, method: Message, *args: Any) -> Any:
        """Calls a method of the loop and returns its result. A callback for deltas may use it too, unlike `ask`."""
        if threading.get_ident() == self._thread.ident:
            return self._led.take(method, *args)
        return self.ask(method, *args)

    def ask(self, method: Message, *args: Any) -> Any:
        """Does what `call` does, but raises RuntimeError in a callback for deltas."""
        answers = queue.SimpleQueue()
        self.send(answers.put, Actor.do, method, *args)
        return _result(answers.get())

    async def ask_async(self, method: Message, *args: Any) -> Any:
        """Does what `ask` does, for asyncio."""
        events = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = events.create_future()

        def put(outcome: Any) -> None:
            if not answer.done():  # the caller was cancelled
                answer.set_result(outcome)

        self.send(functools.partial(events.call_soon_threadsafe, put), Actor.do, method, *args)
        return _result(await answer)

    def turn(self) -> None:
        """Waits for one turn of the loop."""
        answers = queue.SimpleQueue()
        self.send(None, Actor._wait_turn, answers.put)
        _result(answers.get())

    def wait(self, reader: Reader) -> None:
        """Makes the loop run until the reader gets an item; does not block. Raises the reader's fault if it has one."""
        if reader.fault is not None:
            raise reader.fault
        self.send(None, Actor._wait, reader, reader.taken)

    def last_message(self, method: Message, *args: Any) -> Callable[[], None]:
        """Returns a function that sends a message without waiting, and that Ctrl-C cannot interrupt.

        It is a single call into C, so a `finally` may call it in any thread, also during garbage collection.
        """
        return functools.partial(self._inbox.put, (None, method, args))

    def send(self, reply: Callable[[Any], object] | None, method: Message, *args: Any) -> None:
        """Sends a message; the engine's thread calls `reply` with (result, exception). RuntimeError in a callback."""
        refuse_fork()
        if threading.get_ident() == self._thread.ident:
            raise RuntimeError(
                "a callback for deltas cannot step the loop that called it: it may submit requests, which the next "
                "turn runs"
            )
        if not self.alive:
            if threading.current_thread() is not threading.main_thread():
                raise SystemExit  # ends a daemon thread without a traceback
            raise RuntimeError("the interpreter is exiting, and the engine has ended")
        self._inbox.put((reply, method, args))

    # Messages, in the engine's thread

    @property
    def _led(self) -> Requests | Leader:
        return self._leader or self._loop

    def handle(self, reply: Callable[[Any], object] | None, method: Message, args: Sequence[Any]) -> None:
        """Handles a message: calls its method, replies, and schedules a turn if a caller waits for one."""
        try:
            outcome = method(self, *args), None
        except BaseException as error:
            outcome = None, error
        if reply is not None:
            with contextlib.suppress(RuntimeError):  # the caller's event loop may be closed
                reply(outcome)
        del outcome  # its exception refers to this frame
        if self._scheduled:
            return
        self._readers = {reader for reader in self._readers if reader.waits}
        if self._turns or (self._readers and self._loop.has_work):
            self._scheduled = True
            self._inbox.put((None, Actor._turn, ()))

    def do(self, method: Message, *args: Any) -> Any:
        """Calls a method of the loop. An Exception in it (except QueueFull) is a fault, which ends every request."""
        try:
            answer = self._led.take(method, *args)
        except QueueFull:
            raise
        except Exception as error:
            raise self._led.fail(error) from None
        if (raised := self._raised()) is not None:
            raise raised
        return answer

    def _raised(self) -> BaseException | None:
        raised, self._loop.raised = self._loop.raised, None
        return raised

    def leave(self, reader: Reader) -> None:
        """Aborts the reader's unfinished requests, and sends it nothing more."""
        reader.waits = False
        for request in reader.requests:
            request.deliver = lambda delta: None

        def abort(_: Requests) -> None:
            for request in reader.requests:
                if not request.finished:
                    self._led.take(Requests.abort, request.request_id)
                for sequence in request.sequences:
                    if sequence.completion is None:  # it was never submitted
                        sequence.finish("abort")

        self.do(abort)

    def _wait(self, reader: Reader, taken: int) -> None:
        reader.waits = reader.sent == taken  # else an item is on its way to it
        self._readers.add(reader)

    def _wait_turn(self, reply: Callable[[Any], object]) -> None:
        self._turns.append(reply)

    def _turn(self) -> None:
        turns, self._turns, readers = self._turns, [], [reader for reader in self._readers if reader.waits]
        fault = raised = None
        try:
            for call in self._led.turn():
                self._await(jax.tree.leaves(call.results))
        except Exception as error:
            fault = self._led.fail(error)
        raised = self._raised()
        self._scheduled = False
        for reply in turns:
            reply((None, fault or raised))
        if raised is not None and not turns:
            for reader in readers:
                reader.send(raised)
        del fault, raised  # their tracebacks refer to this frame

    def _await(self, results: Sequence[Any]) -> None:
        """Waits for the results of a call. Without a leader it handles messages meanwhile."""
        first = results[0]
        if self._leader is None and not first.is_ready():
            self._watched.put(first)
            ends = False
            while (message := self._inbox.get()) is not READY:
                if message is None:
                    ends = True
                else:
                    self.handle(*message)
            if ends:  # put back, so that the thread ends after this turn
                self._inbox.put(None)
        jax.block_until_ready(results)


def _result(outcome: tuple[Any, BaseException | None]) -> Any:
    """Returns the answer to a message, or raises the exception of its method."""
    answer, error = outcome
    if error is None:
        return answer
    try:
        raise error
    finally:
        del outcome, error  # the exception refers to this frame


def join_abandoned() -> None:
    """Waits until the threads of dropped engines have ended, and so their memory is free."""
    for thread, (owner, _) in list(_threads.items()):
        if owner() is None and thread is not threading.current_thread():
            thread.join()


@atexit.register
def _stop() -> None:
    """Ends all engines' threads after their current turns: the interpreter must not exit while they are inside JAX."""
    threads = dict(_threads)
    for _, inbox in threads.values():
        inbox.put(None)
    for thread in threads:
        thread.join()


def _serve(
    ref: "weakref.ref[Actor]",
    inbox: "queue.SimpleQueue[Any]",
    watched: "queue.SimpleQueue[Any]",
    contexts: Sequence[Any],
) -> None:
    watcher = threading.Thread(target=_watch, args=(watched, inbox), name="ling3-watcher", daemon=True)
    watcher.start()
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        while (message := inbox.get()) is not None and (actor := ref()) is not None:
            actor.handle(*message)
            del actor, message
    watched.put(None)
    watcher.join()
    del _threads[threading.current_thread()]


def _watch(watched: "queue.SimpleQueue[Any]", inbox: "queue.SimpleQueue[Any]") -> None:
    """Waits for arrays on the device and reports each to the inbox, which the engine's thread waits for.

    Polling would take a tenth of a core from the device if that is the CPU.
    """
    while (array := watched.get()) is not None:
        with contextlib.suppress(Exception):  # the engine's thread raises it
            jax.block_until_ready(array)
        del array
        inbox.put(READY)
