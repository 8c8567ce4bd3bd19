"""The replicas of a fleet: each is an actor of Ray in a place of its own, and is followed by another when it dies."""

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
from ling3.runtime.quoting import shown

logger = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds after which a replica for which there is no room is reported."""
MOST_LOSSES = 5
"""A replica that dies so often before it can answer is not replaced any more."""
COLOURS = re.compile(r"\x1b\[\d+m")
"""In Ray's messages."""


@dataclasses.dataclass(eq=False)
class ReplicaPlace:
    """One replica, and after its death the next in its place."""

    number: int
    actor: Any = None
    process: Process | None = None
    """None until Ray has found room for it."""
    card: Card | None = None
    """None until it can answer."""
    losses: int = 0
    """Deaths since one could answer."""
    error: Exception | None = None
    """Why there will be no further replica here."""
    since: float = 0.0
    """When Ray was asked for it, by the monotonic clock; infinite once it is reported that there is no room."""

    def __str__(self) -> str:
        return f"replica {self.number} ({self.process or 'not yet running'})"


@dataclasses.dataclass(frozen=True)
class Lost:
    """The news that a replica has died."""


News = Process | Card | Answer | Lost | None
"""Where a replica runs, what it says of itself once it can answer, an answer, its death, or the end of a call."""


class Places:
    """So many replicas of one plan. What they have to tell comes one by one from `wait`.

    `options` are those of the Ray actor. A replica that dies, or whose node does, is replaced as soon as Ray finds room
    for another; one that does not load the model, differs from the first or dies `MOST_LOSSES` times before it can
    answer is left out.
    """

    def __init__(self, ray: Any, plan: Plan, options: dict[str, Any]):
        self._ray = ray
        self._plan = ray.put(plan)
        taken = {"CPU": options.get("num_cpus"), "GPU": options.get("num_gpus"), **options.get("resources", {})}
        self._takes = {name: number for name, number in taken.items() if number}
        self._actor = ray.remote(concurrency_groups={"beside": 2})(Replica).options(**options)
        self._pending: dict[Any, ReplicaPlace] = {}
        """What Ray will answer, and whose answer it is."""
        self._all = [ReplicaPlace(number) for number in range(plan.replicas)]
        self.closed = False
        self.first: Card | None = None
        """Of the first replica that could answer."""
        for place in self._all:
            self._launch(place)

    def __len__(self) -> int:
        return len(self._all)

    def ready(self) -> list[ReplicaPlace]:
        """The replicas that can answer prompts now."""
        return [place for place in self._all if place.card is not None]

    def running(self) -> list[ReplicaPlace]:
        """Those that Ray has found room for."""
        return [place for place in self._all if place.process is not None or place.card is not None]

    # What they are asked

    def ask(self, place: ReplicaPlace, run: int, jobs: Sequence[Job], first_token: bool | None) -> None:
        """Asks for the answers to a batch; the replica compiles first, as by `warm`, unless for None."""
        self._pending[place.actor.answer.options(num_returns="streaming").remote(run, jobs, first_token)] = place

    def warm(self, first_token: bool) -> None:
        """Has those that can answer compile, and waits for it."""
        calls = {place.actor.warm.remote(first_token): place for place in self.ready()}
        self._pending |= calls
        while calls.keys() & self._pending.keys():
            self.wait()

    def leave(self, run: int) -> None:
        """Ends what is unfinished of this run, of which no news come any more."""
        for place in self.ready():
            self._beside(place, "leave", run)
        self._pending = {ref: each for ref, each in self._pending.items() if isinstance(ref, self._ray.ObjectRef)}

    def stats(self) -> list[Stats]:
        """The counts of those that can answer."""
        found = []
        for place in self.ready():
            try:
                found.append(self._ray.get(self._beside(place, "stats")))
            except self._ray.exceptions.RayError:
                continue  # it has died, which the next `wait` notes
        return found

    def close(self) -> None:
        """Ends all replicas, those that wait included."""
        self.closed = True
        for place in self._all:
            self._drop(place)

    def _beside(self, place: ReplicaPlace, method: str, *arguments: Any) -> Any:
        """Calls a replica while it answers."""
        return getattr(place.actor, method).options(concurrency_group="beside").remote(*arguments)

    # What they tell

    def wait(self) -> tuple[ReplicaPlace, News]:
        """The next news, and from where.

        Raises RuntimeError after `close`, the error of the last replica if none is left to wait for, and what an engine
        has raised.
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

    # Their lives

    def _launch(self, place: ReplicaPlace) -> None:
        """Asks Ray for a replica; until there is room for it, it waits."""
        place.actor, place.since = self._actor.remote(), time.monotonic()
        self._pending[self._beside(place, "where")] = place
        self._pending[place.actor.start.remote(self._plan)] = place

    def _drop(self, place: ReplicaPlace) -> None:
        """Ends what there is of a replica."""
        self._pending = {ref: other for ref, other in self._pending.items() if other is not place}
        if place.actor is not None:
            self._ray.kill(place.actor)
        place.actor = place.process = place.card = None

    def _welcome(self, place: ReplicaPlace, card: Card) -> None:
        """Takes a replica in, if it is as the others are."""
        self.first = first = self.first or card
        other = [name for name, fact in first.facts.items() if card.facts[name] != fact]
        if not other:
            place.card, place.losses = card, 0
            return
        told = "; ".join(f"{name}: {shown(card.facts[name])}, there {shown(first.facts[name])}" for name in other)
        self._give_up(place, FleetError(f"it differs from the first ({told}): its answers would have other bits"))

    def _replace(self, place: ReplicaPlace, error: Exception) -> None:
        """Puts another replica in the place of one that has died."""
        place.losses += 1
        logger.warning("%s died; what it had not answered goes to others", place)
        if place.losses < MOST_LOSSES:
            self._drop(place)
            self._launch(place)
            return
        # The first line says what has died, and the last one why.
        lines = COLOURS.sub("", str(error)).strip().splitlines() or [type(error).__name__]
        self._give_up(place, FleetError(f"it died {place.losses} times before it could answer: {lines[-1].strip()}"))

    def _give_up(self, place: ReplicaPlace, error: Exception) -> None:
        logger.warning("%s is left out: %s", place, error)
        self._drop(place)
        place.error = error

    def _report_what_waits_for_room(self) -> None:
        """Says of each replica once that it has waited for room in vain."""
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
    """As in "2 CPU"."""
    return ", ".join(f"{number:g} {name}" for name, number in devices.items())
