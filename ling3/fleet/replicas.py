"""Engines in processes of this machine behind one server: requests are routed to them, and their tokens streamed.

The server's process uses no device: it checks requests and passes on the answers. `worker.py` is a replica's process.
"""

import asyncio
import dataclasses
import functools
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from ling3.engine.front import unblocked
from ling3.engine.outputs import Delta, Stats
from ling3.engine.request import draw_seed
from ling3.engine.requests import QueueFull
from ling3.engine.sampling_params import SamplingParams
from ling3.fleet.replica import Card, Plan
from ling3.fleet.routes import Routes
from ling3.fleet.streaming import Query, StreamingPlace, launch
from ling3.fleet.work import FleetError
from ling3.fleet.worker import Worker
from ling3.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MOST_LOSSES = 5
"""A replica that has died this often without getting ready is not started again."""
GRACE = 10.0
"""Seconds that a replica has to end after `close`, before it is killed."""
OF_THE_LIVING = ("waiting", "running", "slots", "free_slots", "pages", "free_pages", "cached_pages", "snapshot_bytes")
"""The counts that are dropped from the sums when a replica dies; the others never decrease."""


class Replicas:
    """The engines of a plan, which answer a server's requests as one engine does, with the same bits.

    A request goes to the replica with the fewest unfinished completions, or to one that knows its prefix (`Routes`). If
    a replica dies, its requests that have streamed nothing yet go to another, once; the others end in an error, and the
    replica is started again. Each is on `devices` devices.

    The constructor returns once all are ready. After that, the methods belong to one event loop. Raises what loading
    raises, and FleetError if a replica dies before it is ready, or differs from the first.
    """

    def __init__(
        self,
        plan: Plan,
        tokenizer: Tokenizer | None,
        devices: int = 1,
        start: "Callable[[Plan, int], tuple[Any, Connection]] | None" = None,
    ):
        self._plan, self._launch = plan, start or functools.partial(launch, devices=devices)
        self._places = [StreamingPlace(number) for number in range(plan.replicas)]
        self._keys = itertools.count()
        self._events: asyncio.AbstractEventLoop | None = None
        self._held: list[Query] = []  # while no replica is ready
        self._gone: list[Stats] = []  # the last counts of replicas that died
        self._first: Card | None = None
        try:
            first, *others = self._places
            for places in ([first], others):  # the others find the programs in the cache that the first has compiled
                for place in places:
                    self._start(place)
                for place in places:
                    self._welcome(place, _first_message(place))
        except BaseException:
            self.close()
            raise
        card = first.card
        assert card is not None, "it was welcomed"
        self.facts, self.settings = card.facts, card.settings
        self._intake = dataclasses.replace(card.intake, tokenizer=tokenizer)
        self.max_model_len = self._intake.room
        self.adapters: tuple[str, ...] = tuple(plan.adapters)
        self._routes = Routes(self.settings.prefix_step)

    # The interface of an engine, for a server

    @property
    def alive(self) -> bool:
        """True while at least one replica is ready."""
        return bool(self._ready())

    def left(self, tokens: int) -> int:
        """The largest `max_tokens` for a prompt of `tokens` tokens; less than 1 if the prompt is too long."""
        return self._intake.left(tokens)

    async def astream_all(
        self, prompts: Sequence[list[int]], params: SamplingParams | None = None, *, name: str = "prompt {}"
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yields deltas as `Engine.astream_all` does, and raises the same errors."""
        news: asyncio.Queue[tuple[int, Any, bool]] = asyncio.Queue()
        checked = await unblocked(self._check, list(prompts), params, name)
        queries = [Query(i, ids, own, news.put_nowait) for i, (ids, own) in enumerate(checked)]
        self._attend()
        self._check_room(sum(query.params.n for query in queries))
        try:
            for query in queries:
                self._dispatch(query)
            left = len(queries)
            while left:
                i, item, last = await news.get()
                left -= last
                if isinstance(item, Exception):
                    raise item
                yield i, item
        finally:
            self._leave(queries)

    async def astats(self) -> Stats:
        """The sums of the counts of all replicas; `compile_seconds` is the shortest."""
        self._attend()
        answers = [place.count() for place in self._ready()]
        if answers:
            await asyncio.wait(answers)  # it cancels none of them if this is cancelled: others wait for them too
        counts = [answer.result() for answer in answers]
        return Stats.total([*(each for each in counts if each is not None), *self._gone])

    def condition(self) -> Mapping[str, object]:
        """How many replicas are ready, for `/health`."""
        return {"replicas": {"ready": len(self._ready()), "of": len(self._places)}}

    def close(self) -> None:
        """Ends all replicas and waits for their processes."""
        ready = self._ready()
        for place in self._places:
            self._end(place)
        for place in self._places:
            if place.process is not None:
                place.process.join(GRACE if place in ready else 0)
                place.process.kill()

    # Requests

    def _check(
        self, prompts: list[list[int]], params: SamplingParams | None, name: str
    ) -> list[tuple[list[int], SamplingParams]]:
        """The ids and parameters of each prompt, with a fixed seed, so that every replica gives the same answer."""
        found = []
        for i, prompt in enumerate(prompts):
            ids, own, _, _ = self._intake.check(prompt, params, None, name.format(i))
            found.append((ids, dataclasses.replace(own, seed=draw_seed() if own.seed is None else own.seed)))
        return found

    def _check_room(self, size: int) -> None:
        """Raises QueueFull if the replicas have too much to do for `size` more completions."""
        most, ready = self.settings.max_queue, self._ready()
        unfinished = sum(place.load for place in ready)
        if ready and unfinished + size > most * len(ready):
            raise QueueFull(f"{unfinished} completions are unfinished, and each of {len(ready)} replicas takes {most}")

    def _dispatch(self, query: Query) -> None:
        """Gives a request to a replica, or keeps it until one is ready."""
        loads = {place.number: place.load for place in self._ready()}
        if not loads:
            self._held.append(query)
            return
        place, key = self._places[self._routes.choose(query.ids, loads)], next(self._keys)
        place.queries[key] = query
        place.send(Worker.ask, key, query.ids, query.params)

    def _leave(self, queries: Sequence[Query]) -> None:
        """Aborts those requests that are unfinished."""
        self._held = [query for query in self._held if query not in queries]
        for place in self._places:
            for key in [key for key, query in place.queries.items() if query in queries]:
                del place.queries[key]
                place.send(Worker.leave, key)

    # Replicas

    def _ready(self) -> list[StreamingPlace]:
        return [place for place in self._places if place.card is not None]

    def _attend(self) -> None:
        """Reads the replicas' messages on the running event loop from now on."""
        if self._events is not (events := asyncio.get_running_loop()):
            self._events = events
            for place in self._places:
                self._watch(place)

    def _watch(self, place: StreamingPlace) -> None:
        if self._events is not None and place.pipe is not None:
            self._events.add_reader(place.pipe.fileno(), self._read, place)

    def _start(self, place: StreamingPlace) -> None:
        place.process, place.pipe = self._launch(self._plan, place.number)
        self._watch(place)

    def _read(self, place: StreamingPlace) -> None:
        """Reads one message of a replica, which is there or its end."""
        assert place.pipe is not None, "watched"
        try:
            message = place.pipe.recv()
        except (EOFError, OSError):
            self._lose(place)
            return
        if place.card is not None:
            place.take(message)
            return
        try:
            self._welcome(place, message)
        except Exception as error:  # whatever loading raises
            self._give_up(place, error)
            return
        held, self._held = self._held, []
        for query in held:
            self._dispatch(query)

    def _welcome(self, place: StreamingPlace, message: Card | Exception) -> None:
        """Accepts a replica that is ready. Raises the error of loading; FleetError if it differs from the first."""
        if isinstance(message, Exception):
            raise message
        self._first = self._first or message
        message.check_equals(self._first)
        place.card, place.losses = message, 0

    def _lose(self, place: StreamingPlace) -> None:
        """Starts another replica in the place of one that has died, unless it has died too often."""
        logger.warning("%s died; requests that it had not begun to answer go to others", place)
        if place.stats is not None:
            self._gone.append(dataclasses.replace(place.stats, **dict.fromkeys(OF_THE_LIVING, 0)))
        queries = self._end(place)
        self._routes.forget(place.number)
        place.losses += 1
        if place.losses < MOST_LOSSES:
            self._start(place)
        else:
            self._give_up(place, FleetError(f"it died {place.losses} times before it could answer"))
        for query in queries:
            if query.may_run_again():
                self._dispatch(query)

    def _give_up(self, place: StreamingPlace, error: Exception) -> None:
        """Leaves a place without a replica, and without hope the requests that wait for one."""
        logger.warning("%s is left out: %s", place, error)
        self._end(place)
        if all(each.pipe is None for each in self._places):
            for query in self._held:
                query.take(error, True)

    def _end(self, place: StreamingPlace) -> list[Query]:
        """Ends the replica of a place, and returns its unfinished requests."""
        if place.pipe is not None and self._events is not None and not self._events.is_closed():
            self._events.remove_reader(place.pipe.fileno())
        return place.end()


def _first_message(place: StreamingPlace) -> Card | Exception:
    """Waits for a replica's first message. Raises FleetError if it dies first."""
    assert place.pipe is not None, "launched"
    try:
        return place.pipe.recv()
    except (EOFError, OSError):
        raise FleetError(f"{place} died while it loaded the model: the log or the system's may say why") from None
