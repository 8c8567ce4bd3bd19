"""One engine in several processes: each runs the same loop, on its own devices, over the same messages.

Programs over devices of several processes need all of these to dispatch them in the same order. Which ones, and in
which order, follows from what a loop is given. So the first process broadcasts each turn's inbox (requests as token ids
and sampling parameters, a few hundred bytes each, and aborts), and the loops of all processes take it and do the turn
(`follow`): they choose, detokenize, preempt and compute the masks of grammars for themselves. What is kept on the host
of a preempted sequence stays in the process whose devices have it.

A loop takes messages between turns only: what a callback asks during a turn waits for the turn's end.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from ling3.engine import structured
from ling3.engine.calls import Call
from ling3.engine.intake import Intake
from ling3.engine.outputs import Delta
from ling3.engine.request import Request, TokenSequence
from ling3.engine.requests import Requests
from ling3.engine.runner import Extra
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings
from ling3.model import CausalLM
from ling3.runtime.processes import Wire

END = "end"


def wire_of(model: CausalLM) -> Wire | None:
    """The connection of the processes of a model's mesh; None for a model of one process."""
    return Wire() if model.placement is not None and model.placement.processes > 1 else None


def leads(wire: Wire | None) -> bool:
    """True in the process whose callers ask the engine."""
    return wire is None or jax.process_index() == 0


def shared(settings: EngineSettings, wire: Wire) -> EngineSettings:
    """The first process's settings, in all."""
    if not leads(wire):
        return EngineSettings(**json.loads(wire.hear()))
    wire.tell(json.dumps(dataclasses.asdict(settings)))
    return settings


class Leader:
    """The first process's loop, which broadcasts what it is given. For callers, the loop itself."""

    def __init__(self, loop: Requests, wire: Wire):
        self.loop, self.runner, self._wire = loop, loop.runner, wire
        self._inbox: list[tuple[str, Any]] = []  # not broadcast yet
        self._later: list[tuple[str, Any, Callable[[], Any]]] = []  # for the end of the turn under way
        self._in_turn, self._closed = False, False
        self._broken: Exception | None = None

    @property
    def scheduler(self) -> Any:
        """Which sequences wait and run."""
        return self.loop.scheduler

    @property
    def has_work(self) -> bool:
        """True if there is work, or a message that waits for the end of a turn."""
        return self.loop.has_work or bool(self._later)

    def turn(self) -> Iterator[Call]:
        """One turn of every process's loop; raises the fault of an earlier one, in which the others may still be."""
        if self._broken is not None:
            raise self._broken
        self._broadcast("turn")
        self._in_turn = True
        try:
            yield from self.loop.turn()
        finally:
            self._in_turn = False
            later, self._later = self._later, []
            for message in later:
                self._take(*message)

    def enqueue(self, request: Request) -> None:
        """Puts a request in the queue; raises QueueFull if there is no room. During a turn it waits for room."""
        self._guard(request)
        if self._in_turn:
            self._take("enqueue_all", [_written(request)], lambda: self.loop.enqueue_all([request]))
        else:
            self._take("enqueue_all", [_written(request)], lambda: self.loop.enqueue(request))

    def enqueue_all(self, requests: Iterable[Request]) -> None:
        """Puts requests in the queue in their order, each as soon as there is room for it."""
        requests = list(requests)
        for request in requests:
            self._guard(request)
        self._take("enqueue_all", list(map(_written, requests)), lambda: self.loop.enqueue_all(requests))

    def abort(self, request: Request) -> bool:
        """Ends what is unfinished of a request with `abort`; True if anything was."""
        unfinished = not request.finished
        self._take("abort", request.request_id, lambda: self.loop.abort(request))
        return unfinished

    def abort_id(self, request_id: int) -> bool:
        """Aborts the request of an id; False if there is none (any more)."""
        request = self.loop.requests.get(request_id)
        return request is not None and self.abort(request)

    def give_up(self, sequence: TokenSequence, error: Exception) -> None:
        """Ends a request whose callback raised."""
        place = [sequence.request.request_id, sequence.index]
        self._take("give_up", place, lambda: self.loop.give_up(sequence, error))

    def forget_prefixes(self) -> None:
        """Frees all known prefixes that no running sequence uses."""
        self._take("forget_prefixes", None, self.loop.forget_prefixes)

    def begin_warmup(self, first_token: bool, also: Sequence[Extra] = ()) -> None:
        """Begins to compile every program, or with `first_token` what a request's first token needs."""
        self._take("begin_warmup", [first_token, list(also)], lambda: self.loop.begin_warmup(first_token, also))

    def compile_next(self) -> str | None:
        """The name of the next program of a warm-up once all processes compile it; None after the last."""
        self._broadcast("compile_next")
        return self.loop.compile_next()

    def end_warmup(self) -> None:
        """Leaves out the programs that are not begun."""
        self._take("end_warmup", None, self.loop.end_warmup)

    def fail(self, error: Exception) -> Exception:
        """Ends every request in `error`, for good: the other processes are amid the turn that failed."""
        self._broken = error
        self.loop.end_all(error)
        return error

    def take_raised(self) -> BaseException | None:
        """The exception of a callback that does not end its request; None if there is none."""
        return self.loop.take_raised()

    def stats(self) -> Any:
        """The counts at this moment."""
        return self.loop.stats()

    def close(self) -> None:
        """Tells the other processes that there are no more turns."""
        if not self._closed:
            self._closed = True
            self._broadcast(END)

    def _take(self, name: str, written: Any, change: Callable[[], Any]) -> None:
        """Changes the loop, now or after the turn under way, and puts the message into the inbox of the others."""
        if self._in_turn:
            self._later.append((name, written, change))
            return
        change()
        self._inbox.append((name, written))

    def _broadcast(self, name: str) -> None:
        inbox, self._inbox = self._inbox, []
        self._wire.tell(json.dumps([*inbox, (name, None)]))

    def _guard(self, request: Request) -> None:
        """Has an exception in a request's callback end it after the turn, in all processes."""
        deliver = request.deliver

        def guarded(delta: Delta) -> None:
            try:
                deliver(delta)
            except Exception as error:
                request.deliver = request.report
                self.give_up(request.sequences[delta.index], error)

        request.deliver = guarded


AnyLoop = Requests | Leader
"""The loop that an engine's thread turns."""


def follow(loop: Requests, intake: Intake, wire: Wire) -> None:
    """Takes the inboxes of the first process's loop, and does its turns, until that one's engine ends."""
    requests: dict[int, Request] = {}
    while True:
        for name, what in json.loads(wire.hear()):
            match name:
                case "turn":
                    for _ in loop.turn():
                        pass
                    requests = {number: request for number, request in requests.items() if not request.finished}
                case "enqueue_all":
                    several = [_read(intake, one) for one in what]
                    requests |= {request.request_id: request for request in several}
                    loop.enqueue_all(several)
                case "abort" if what in requests:
                    loop.abort(requests[what])
                case "give_up" if what[0] in requests:
                    sequence = requests[what[0]].sequences[what[1]]
                    loop.give_up(sequence, RuntimeError("raised in the first process"))
                case "forget_prefixes":
                    loop.forget_prefixes()
                case "begin_warmup":
                    loop.begin_warmup(*what)
                case "compile_next":
                    loop.compile_next()
                case "end_warmup":
                    loop.end_warmup()
                case "end":
                    return


def _written(request: Request) -> dict[str, Any]:
    params = dataclasses.replace(request.params, seed=request.sequences[0].seed)
    fields = {**dataclasses.asdict(params), "structured": structured.written(params.structured)}
    return {"id": request.request_id, "ids": request.prompt_ids, "params": fields}


def _read(intake: Intake, written: dict[str, Any]) -> Request:
    fields = written["params"]
    if fields["logit_bias"] is not None:  # whose keys JSON has made strings
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    fields["structured"] = structured.read(fields["structured"])
    return intake.request(written["id"], written["ids"], SamplingParams(**fields), None, "prompt")
