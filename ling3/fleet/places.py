"""The replicas of a fleet: each place has one, a Ray actor, and gets another when it dies."""

import dataclasses
import logging
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ling3.engine.outputs import Stats
from ling3.fleet.replica import Answer, Card, Job, Plan, Process, Replica
from ling3.fleet.work import FleetError

logger = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds after which a replica that waits for resources is reported."""
MOST_LOSSES = 5
"""A replica that has died this often without getting ready is not replaced any more."""
COLOURS = re.compile(r"\x1b\[\d+m")
"""The colour codes in Ray's messages."""


@dataclasses.dataclass(eq=False)
class ReplicaPlace:
    """The place of one replica, and after its death of the next one."""

    number: int
    actor: Any = None
    process: Process | None = None
    """None until the replica runs, for which Ray has to find resources."""
    card: Card | None = None
    """None until the replica is ready."""
    losses: int = 0
    """Deaths since a replica here was last ready."""
    error: Exception | None = None
    """Why this place gets no further replica; None if it may."""
    since: float = 0.0
    """When Ray was to start it, by the monotonic clock; infinite once its waiting for resources is reported."""

    def __str__(self) -> str:
        return f"replica {self.number} ({self.process or 'not yet running'})"


@dataclasses.dataclass(frozen=True)
class Lost:
    """The news that a replica has died."""


News = Process | Card | Answer | Lost | None
"""Where a replica runs, its card once it is ready, an answer, its death, or None for the end of a call."""


class Places:
    """The replicas of a plan. `wait` returns their news, one at a time.

    `options` are those of the Ray actor. A replica that dies, or whose node does, is replaced as soon as Ray finds room
    for another. One that cannot load the model, differs from the first or dies `MOST_LOSSES` times before it is ready
    is left out.
    """

    def __init__(self, ray: Any, plan: Plan, options: dict[str, Any]):
        self._ray = ray
        self._plan = ray.put(plan)
        taken = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), **options.get("resources", {})}
        self._takes = {name: number for name, number in taken.items() if number}
        self._actor = ray.remote(concurrency_groups={"beside": 2})(Replica).options(**options)
        self._pending: dict[Any, ReplicaPlace] = {}
        """The place of each call to Ray that has not ended."""
        self._all = [ReplicaPlace(number) for number in range(plan.replicas)]
        self.closed = False
        self.first: Card | None = None
        """The card of the first replica that was ready."""
        for place in self._all:
            self._launch(place)

    def __len__(self) -> int:
        return len(self._all)

    def ready(self) -> list[ReplicaPlace]:
        """The places whose replicas can answer prompts now."""
        return [place for place in self._all if place.card is not None]

    def running(self) -> list[ReplicaPlace]:
        """The places whose replicas run, ready or not."""
        return [place for place in self._all if place.process is not None or place.card is not None]

    # Calls to the replicas

    def ask(self, place: ReplicaPlace, run: int, jobs: Sequence[Job], first_token: bool | None) -> None:
        """Sends a batch to a replica, which first compiles as by `warm` unless `first_token` is None."""
        self._pending[place.actor.answer.options(num_returns="streaming").remote(run, jobs, first_token)] = place

    def warm(self, first_token: bool) -> None:
        """Makes the replicas that are ready compile, and waits for them."""
        calls = {place.actor.warm.remote(first_token): place for place in self.ready()}
        self._pending |= calls
        while calls.keys() & self._pending.keys():
            self.wait()

    def leave(self, run: int) -> None:
        """Aborts the unfinished requests of this run; `wait` returns no more news of it."""
        for place in self.ready():
            self._beside(place, "leave", run)
        self._pending = {ref: each for ref, each in self._pending.items() if isinstance(ref, self._ray.ObjectRef)}

    def stats(self) -> list[Stats]:
        """The counts of the replicas that are ready."""
        found = []
        for place in self.ready():
            try:
                found.append(self._ray.get(self._beside(place, "stats")))
            except self._ray.exceptions.RayError:
                continue  # the replica has died, which the next `wait` notices
        return found

    def close(self) -> None:
        """Ends all replicas, including those that wait for resources."""
        self.closed = True
        for place in self._all:
            self._drop(place)

    def _beside(self, place: ReplicaPlace, method: str, *arguments: Any) -> Any:
        """Calls a method of a replica, beside a call to `answer`."""
        return getattr(place.actor, method).options(concurrency_group="beside").remote(*arguments)

    # News from the replicas

    def wait(self) -> tuple[ReplicaPlace, News]:
        """The next news, and the place that it is from.

        Raises RuntimeError after `close`, the error of the last place if no replica is left, and the errors of engines.
        """
        if self.closed:
            raise RuntimeError("the fleet is closed: make another")
        if all(place.error is not None for place in self._all):
            raise self._all[-1].error or AssertionError
        ready: list[Any] = []
        while not ready:
            ready, _ = self._ray.wait(list(self._pending), timeout=PATIENCE)
            self._report_what_waits_for_room()
        [coming] = ready
        place = self._pending[coming]
        errors = self._ray.exceptions
        try:
            if isinstance(coming, self._ray.ObjectRef):
                del self._pending[coming]
                news = self._ray.get(coming)
            else:
                news = self._ray.get(next(coming))
        except StopIteration:
            del self._pending[coming]
            return place, None
        except errors.RayTaskError as error:
            if place.card is not None:
                raise (error.cause or error) from None
            self._give_up(place, error.cause or error)
            return place, None
        except errors.RayError as error:
            self._replace(place, error)
            return place, Lost()
        if isinstance(news, Process):
            place.process = news
        elif isinstance(news, Card):
            self._welcome(place, news)
        return place, news

    # Starting and replacing replicas

    def _launch(self, place: ReplicaPlace) -> None:
        """Has Ray start a replica, as soon as it has the resources."""
        place.actor, place.since = self._actor.remote(), time.monotonic()
        self._pending[self._beside(place, "where")] = place
        self._pending[place.actor.start.remote(self._plan)] = place

    def _drop(self, place: ReplicaPlace) -> None:
        """Ends the replica of a place, if it has one, and forgets its calls."""
        self._pending = {ref: other for ref, other in self._pending.items() if other is not place}
        if place.actor is not None:
            self._ray.kill(place.actor)
        place.actor = place.process = place.card = None

    def _welcome(self, place: ReplicaPlace, card: Card) -> None:
        """Accepts a replica that is ready, if its facts are those of the first; otherwise leaves it out."""
        self.first = self.first or card
        try:
            card.check_equals(self.first)
        except FleetError as error:
            self._give_up(place, error)
        else:
            place.card, place.losses = card, 0

    def _replace(self, place: ReplicaPlace, error: Exception) -> None:
        """Starts another replica in the place of one that has died, unless it has died too often."""
        place.losses += 1
        logger.warning("%s died; what it had not answered goes to others", place)
        if place.losses < MOST_LOSSES:
            self._drop(place)
            self._launch(place)
            return
        # The first line of Ray's message says what died, the last line why.
        lines = COLOURS.sub("", str(error)).strip().splitlines() or [type(error).__name__]
        self._give_up(place, FleetError(f"it died {place.losses} times before it could answer: {lines[-1].strip()}"))

    def _give_up(self, place: ReplicaPlace, error: Exception) -> None:
        logger.warning("%s is left out: %s", place, error)
        self._drop(place)
        place.error = error

    def _report_what_waits_for_room(self) -> None:
        """Logs, once for each replica, that it has waited for resources for `PATIENCE` seconds."""
        waiting = [place for place in self._all if place.error is None and place.process is None]
        if all(time.monotonic() - place.since < PATIENCE for place in waiting):
            return
        free, takes = self._ray.available_resources(), self._takes
        logger.warning(
            "%d of %d replicas wait for room: each takes %s, and free in the cluster are %s",
            *(len(waiting), len(self._all), _counted(takes), _counted({name: free.get(name, 0) for name in takes})),
        )
        for place in waiting:
            place.since = math.inf


def _counted(devices: Mapping[str, float]) -> str:
    """Amounts of resources as text, such as "2 CPU"."""
    return ", ".join(f"{number:g} {name}" for name, number in devices.items())
