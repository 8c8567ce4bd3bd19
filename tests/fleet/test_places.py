"""The lives of replicas: each is a call of a stand-in for Ray, which answers what the test has written down."""

from types import SimpleNamespace

import pytest

import ling3
from ling3.engine.intake import Intake
from ling3.engine.shapes import Shapes
from ling3.fleet import places
from ling3.fleet.places import Lost, Places
from ling3.fleet.replica import Card, Checkpoint, Plan, Process
from ling3.fleet.work import FleetError


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__(str(cause))
        self.cause = cause


class Call:
    """What Ray will answer: `result`, or raise it; None while there is nothing."""

    def __init__(self, actor, method):
        self.actor, self.method, self.result = actor, method, None


class Ray:
    """Actors that do nothing until `answer` says so."""

    ObjectRef = Call
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self):
        self.actors, self.calls, self.killed = [], [], []

    def put(self, value):
        return value

    def remote(self, **groups):
        return lambda kind: SimpleNamespace(options=lambda **options: SimpleNamespace(remote=self._actor))

    def _actor(self):
        actor = SimpleNamespace()
        for name in ("where", "start"):
            remote = self._remote(actor, name)
            setattr(
                actor, name, SimpleNamespace(remote=remote, options=lambda r=remote, **_: SimpleNamespace(remote=r))
            )
        self.actors.append(actor)
        return actor

    def _remote(self, actor, name):
        def call(*arguments):
            self.calls.append(Call(actor, name))
            return self.calls[-1]

        return call

    def answer(self, actor, method, result):
        next(call for call in self.calls if call.actor is actor and call.method == method).result = result

    def wait(self, pending, timeout):
        ready = [call for call in pending if call.result is not None][:1]
        assert ready, "the test has written no answer"
        return ready, [call for call in pending if call not in ready]

    def get(self, call):
        if isinstance(call.result, Exception):
            raise call.result
        return call.result

    def kill(self, actor):
        self.killed.append(actor)

    def available_resources(self):
        return {"CPU": 0.5, "memory": 1.0}


INTAKE = Intake(
    tokenizer=None,
    vocab=1,
    ends=[],
    settings=ling3.EngineSettings(max_model_len=1),
    shapes=Shapes(slots=1, pages=1, page_size=1, columns=1, buckets=(1,), rows=(1,)),
    parts=frozenset(),
)


def card(**facts):
    return Card(ling3.EngineSettings(), INTAKE, {"version": "1", **facts})


@pytest.fixture
def ray():
    return Ray()


@pytest.fixture
def pair(ray):
    """Two replicas that have not answered yet."""
    return Places(
        ray, Plan(Checkpoint("nano", None, None), ling3.EngineSettings(), None, None, None, 2, "."), {"num_cpus": 2}
    )


def test_a_replica_is_ready_when_it_has_told_of_itself(ray, pair):
    ray.answer(ray.actors[1], "where", Process("host", 7))
    place, news = pair.wait()
    assert (place.number, news, str(place)) == (1, Process("host", 7), "replica 1 (process 7 on host)")
    assert pair.running() == [place] and pair.ready() == [] and pair.first is None
    ray.answer(ray.actors[1], "start", card())
    assert pair.wait() == (place, card()) and pair.ready() == [place] and pair.first == card()


def test_one_that_differs_from_the_first_is_left_out(ray, pair, caplog):
    ray.answer(ray.actors[0], "start", card())
    pair.wait()
    ray.answer(ray.actors[1], "start", card(version="2"))
    pair.wait()
    assert [place.number for place in pair.ready()] == [0] and ray.killed == [ray.actors[1]]
    assert "replica 1 (not yet running) is left out: it differs from the first (version: '2', there '1')" in caplog.text


def test_one_that_dies_is_replaced_until_it_has_died_too_often_before_it_could_answer(ray, pair, caplog):
    for death in range(1, places.MOST_LOSSES + 1):
        ray.answer(ray.actors[-1], "start", RayError("\x1b[36mreplica\x1b[39m died\nbecause\n  of a hole in it "))
        place, news = pair.wait()
        assert (place.number, news) == (1, Lost()) and len(ray.actors) == 2 + min(death, places.MOST_LOSSES - 1)
    assert caplog.text.count("died; what it had not answered goes to others") == places.MOST_LOSSES
    assert "is left out: it died 5 times before it could answer: of a hole in it\n" in caplog.text
    assert len(ray.killed) == places.MOST_LOSSES


def test_deaths_count_from_the_last_one_that_could_answer(ray, pair):
    for _ in range(2):
        for _ in range(places.MOST_LOSSES - 2):
            ray.answer(ray.actors[-1], "start", RayError("killed"))
            assert pair.wait()[1] == Lost()
        ray.answer(ray.actors[-1], "start", card())
        assert pair.wait()[1] == card()
        ray.answer(ray.actors[-1], "where", RayError("killed"))
        assert pair.wait()[1] == Lost()


def test_what_none_can_load_is_raised(ray, pair):
    for number, actor in enumerate(list(ray.actors)):
        ray.answer(actor, "start", RayTaskError(FileNotFoundError(f"no weights for {number}")))
        assert pair.wait()[1] is None
    with pytest.raises(FileNotFoundError, match="no weights for 1"):
        pair.wait()


def test_those_without_room_are_reported_once(ray, pair, caplog, monkeypatch):
    ray.answer(ray.actors[0], "where", Process("host", 7))
    pair.wait()
    assert "room" not in caplog.text
    monkeypatch.setattr(places, "PATIENCE", 0.0)
    ray.answer(ray.actors[0], "start", card())
    pair.wait()
    ray.answer(ray.actors[1], "start", card())
    pair.wait()
    assert (
        caplog.text.count("1 of 2 replicas wait for room: each takes 2 CPU, and free in the cluster are 0.5 CPU") == 1
    )


def test_a_closed_fleet_says_so(ray, pair):
    pair.close()
    assert ray.killed == ray.actors
    with pytest.raises(RuntimeError, match="the fleet is closed: make another"):
        pair.wait()


def test_none_alive_is_an_error(ray, pair, monkeypatch):
    monkeypatch.setattr(places, "MOST_LOSSES", 1)
    for actor in list(ray.actors):
        ray.answer(actor, "start", RayError("killed"))
        pair.wait()
    with pytest.raises(FleetError, match="it died 1 times before it could answer: killed"):
        pair.wait()
