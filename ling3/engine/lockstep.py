"""One engine in several processes: each runs the same loop, on its own devices, over the same messages.

A program over the devices of several processes needs all of them to dispatch it, in the same order. A loop is
deterministic: what it dispatches follows from its messages. So the first process broadcasts each turn's messages
(requests as token ids and sampling parameters, a few hundred bytes each, and aborts), and every process applies them to
its loop and runs the turn (`follow`). Each process schedules, detokenizes, preempts and computes grammar masks by
itself. The host copy of a preempted sequence stays in the process whose devices held it.

A loop takes messages between turns only: what a callback requests during a turn waits for the turn's end.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from ling3.engine import structured
from ling3.engine.calls import Call
from ling3.engine.intake import Intake
from ling3.engine.request import Request
from ling3.engine.requests import QueueFull, Requests
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings
from ling3.mesh.sharded import Sharded
from ling3.model import CausalLM
from ling3.runtime.processes import Wire

END = "end"
Message = Callable[..., Any]
"""A function that is called with a loop and arguments: a method of `Requests`, which has a name, or another."""
CHANGES = (
    *(Requests.enqueue, Requests.abort, Requests.give_up, Requests.forget_prefixes),
    *(Requests.begin_warmup, Requests.compile_next, Requests.end_warmup),
)
"""The methods that change a loop, which all processes call in the same order."""


def wire_of(model: CausalLM) -> Wire | None:
    """The connection between the processes of a model's mesh; None for a model of one process."""
    return Wire() if isinstance(model, Sharded) and model.placement.processes > 1 else None


def leads(wire: Wire | None) -> bool:
    """True in the first process, whose callers use the engine."""
    return wire is None or jax.process_index() == 0


def shared(settings: EngineSettings, wire: Wire) -> EngineSettings:
    """The first process's settings, which it broadcasts to all others. Raises ValueError if they have a function."""
    if callable(settings.speculation):
        raise ValueError("engine settings: speculation is a function, expected None or 'lookup' for several processes")
    if not leads(wire):
        return EngineSettings(**json.loads(wire.hear()))
    wire.tell(json.dumps(dataclasses.asdict(settings)))
    return settings


class Leader:
    """The first process's loop, whose changes are broadcast to all processes."""

    def __init__(self, loop: Requests, wire: Wire):
        self._loop, self._wire = loop, wire
        self._inbox: list[tuple[str, Sequence[Any]]] = []  # not broadcast yet
        self._later: list[tuple[Message, Sequence[Any]]] = []  # to apply at the end of the current turn
        self._in_turn, self._closed = False, False
        self._broken: Exception | None = None
        loop.on_raise = functools.partial(self.take, Requests.give_up)

    def take(self, method: Message, *args: Any) -> Any:
        """Calls a method of the loop; if it is one of `CHANGES`, all processes do.

        During a turn, a change waits for the turn's end, and requests then wait for room in the queue (no QueueFull).
        """
        if method not in CHANGES:
            return method(self._loop, *args)
        if self._in_turn:
            self._later.append((method, (args[0], True) if method is Requests.enqueue else args))
            return method is Requests.abort and args[0] in self._loop.requests
        if method is Requests.compile_next:  # the program runs collectives, so all processes must run it now
            self._broadcast(method.__name__)
            return method(self._loop)
        try:
            return method(self._loop, *args)
        finally:
            self._inbox.append((method.__name__, _written(method, args)))

    def turn(self) -> Iterator[Call]:
        """Runs one turn in every process. Raises the fault of an earlier turn, in which the others may still be."""
        if self._broken is not None:
            raise self._broken
        self._broadcast("turn")
        self._in_turn = True
        try:
            yield from self._loop.turn()
        finally:
            self._in_turn = False
            later, self._later = self._later, []
            for method, args in later:
                self.take(method, *args)

    def fail(self, error: Exception) -> Exception:
        """Ends every request in `error`. The engine cannot go on: the other processes are still in the failed turn."""
        self._broken = error
        self._loop.end_all(error)
        return error

    def close(self) -> None:
        """Tells the other processes that there are no more turns."""
        if not self._closed:
            self._closed = True
            self._broadcast(END)

    def _broadcast(self, name: str) -> None:
        inbox, self._inbox = self._inbox, []
        self._wire.tell(json.dumps([*inbox, (name, ())]))


def follow(loop: Requests, intake: Intake, wire: Wire) -> None:
    """Applies the first process's messages to this loop and runs its turns, until the first process's engine ends."""
    while True:
        for name, args in json.loads(wire.hear()):
            match name:
                case "turn":
                    for _ in loop.turn():
                        pass
                case "enqueue":
                    with contextlib.suppress(QueueFull):  # raised in the first process too
                        loop.enqueue([_read(intake, written) for written in args[0]], args[1])
                case "give_up":
                    number, index, error = args
                    if number in loop.requests:
                        loop.give_up(loop.requests[number].sequences[index], RuntimeError(error))
                case "end":
                    return
                case _:
                    getattr(loop, name)(*args)


def _written(method: Message, args: Sequence[Any]) -> Sequence[Any]:
    """A message's arguments as JSON values."""
    if method is Requests.enqueue:
        requests, waits = args
        return list(map(_fields, requests)), waits
    if method is Requests.give_up:
        sequence, error = args
        return sequence.request.request_id, sequence.index, repr(error)
    return args


def _fields(request: Request) -> dict[str, Any]:
    params = dataclasses.replace(request.params, seed=request.sequences[0].seed)
    fields = {**dataclasses.asdict(params), "structured": structured.written(params.structured)}
    return {"id": request.request_id, "ids": request.prompt_ids, "params": fields}


def _read(intake: Intake, written: dict[str, Any]) -> Request:
    fields = written["params"]
    if fields["logit_bias"] is not None:  # JSON has made the keys strings
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    fields["structured"] = structured.read(fields["structured"])
    return intake.request(written["id"], written["ids"], SamplingParams(**fields), None, "prompt")
