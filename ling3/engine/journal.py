"""One engine in several processes: each runs the same loop on its own devices, and the first one tells what happens.

Programs over devices of several processes need all of these to dispatch them in the same order. Which ones, and in
which order, follows from what a loop is asked: so the first process writes down each step that its loop takes, a
request, a turn, an abort, and the others' loops take the same steps (`follow`). They get requests as token ids and
sampling parameters, a few hundred bytes each, and compute, choose, detokenize and preempt for themselves; whatever is
kept on the host of a preempted sequence stays in the process whose devices have it. Each also computes the masks of
its grammars: these follow from the grammar and the tokens alone, and their limits count work and not time.

A step is told before it dispatches anything. Deltas are handed out after the step that they come from, so that what
their callbacks ask is a step of its own.
"""

import dataclasses
import functools
import json
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, no_type_check

from ling3.engine import structured
from ling3.engine.outputs import Delta
from ling3.engine.request import Request
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings
from ling3.runtime.processes import Wire

if TYPE_CHECKING:
    from ling3.engine.calls import Call
    from ling3.engine.intake import Intake
    from ling3.engine.loop import Loop

END = "end"


def _fields(request: Request) -> dict[str, Any]:
    params = dataclasses.replace(request.params, seed=request.sequences[0].seed)
    fields = {**dataclasses.asdict(params), "structured": structured.written(params.structured)}
    return {"id": request.request_id, "ids": request.prompt_ids, "params": fields}


# What is told of each step. Those of `BEFORE` dispatch programs whose results the first process may wait for.
WRITTEN: dict[str, Callable[..., Any]] = {
    "enqueue": _fields,
    "enqueue_all": lambda requests: [_fields(request) for request in requests],
    "abort": lambda request: request.request_id,
    "give_up": lambda sequence, error: [sequence.request.request_id, sequence.index],
    "launch": lambda: None,
    "read": len,
    "begin_warmup": lambda first_token, also: [first_token, list(also)],
    "compile_next": lambda: None,
    "end_warmup": lambda: None,
    "forget_prefixes": lambda: None,
}
BEFORE = ("launch", "compile_next")


@no_type_check
def told(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that the loops of all processes take. One taken within another is part of that."""

    @functools.wraps(step)
    def taken(loop: "Loop", *args: Any) -> Any:
        return step(loop, *args) if loop.journal is None else loop.journal.take(loop, step, args)

    return taken


@no_type_check
class Journal:
    """The steps of the first process's loop, on their way to the others."""

    def __init__(self, wire: Wire):
        self._wire: Wire | None = wire
        self._entries: list[Any] = []
        self._taking = False
        self._deltas: deque[tuple[Request, Delta]] = deque()

    def take(self, loop: "Loop", step: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Tells a step and takes it; then hands out its deltas."""
        if self._taking:
            return step(loop, *args)
        entry = [step.__name__, WRITTEN[step.__name__](*args)]
        if step.__name__ in BEFORE:
            self._tell(entry)
        self._taking = True
        try:
            answer = step(loop, *args)
        finally:
            self._taking = False
        if step.__name__ not in BEFORE:
            self._entries.append(entry)
        while self._deltas:
            request, delta = self._deltas.popleft()
            if (error := loop.deliver(request, delta)) is not None:
                loop.give_up(request.sequences[delta.index], error)
        return answer

    def later(self, request: Request, delta: Delta) -> None:
        """Keeps a delta until the step under way has been taken."""
        self._deltas.append((request, delta))

    def close(self) -> None:
        """Tells that there are no more steps."""
        if self._wire is not None:
            self._tell([END, None])
            self._wire = None

    def _tell(self, entry: list[Any]) -> None:
        assert self._wire is not None, "told after the end"
        self._wire.tell(json.dumps([*self._entries, entry]))
        self._entries.clear()


def shared(settings: EngineSettings, wire: Wire, leads: bool) -> EngineSettings:
    """The first process's settings, in all."""
    if not leads:
        return EngineSettings(**json.loads(wire.hear()))
    wire.tell(json.dumps(dataclasses.asdict(settings)))
    return settings


@no_type_check
def follow(loop: "Loop", intake: "Intake", wire: Wire) -> None:
    """Takes the steps that the first process's loop takes, until that one's engine ends."""
    requests: dict[int, Request] = {}
    calls: deque[Call] = deque()
    while True:
        for name, what in json.loads(wire.hear()):
            if name == END:
                return
            if name == "launch":
                calls.extend(loop.launch())
                requests = {number: request for number, request in requests.items() if not request.finished}
            elif name == "read":
                loop.read([calls.popleft() for _ in range(what)])
            elif name in ("enqueue", "enqueue_all"):
                several = [_read(intake, one) for one in (what if name == "enqueue_all" else [what])]
                requests |= {request.request_id: request for request in several}
                loop.enqueue_all(several)
            elif name == "abort" and what in requests:
                loop.abort(requests[what])
            elif name == "give_up" and what[0] in requests:
                loop.give_up(requests[what[0]].sequences[what[1]], RuntimeError("raised in the first process"))
            elif name == "begin_warmup":
                loop.begin_warmup(*what)
            elif name in ("compile_next", "end_warmup", "forget_prefixes"):
                getattr(loop, name)()


def _read(intake: "Intake", written: dict[str, Any]) -> Request:
    fields = written["params"]
    if fields["logit_bias"] is not None:  # whose keys JSON has made strings
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    fields["structured"] = structured.read(fields["structured"])
    return intake.request(written["id"], written["ids"], SamplingParams(**fields), None, "prompt")
