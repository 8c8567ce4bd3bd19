"""Prompts go where their beginning is known, unless that replica has much more to do."""

from ling3.fleet import routes
from ling3.fleet.routes import SLACK, Routes

LONG = list(range(40))


def test_the_least_busy_replica_is_chosen():
    choose = Routes(8).choose
    assert choose([1, 2], {0: 3, 1: 2, 2: 2}) == 1
    assert choose([1, 2], {0: 3, 2: 2}) == 2


def test_a_known_beginning_is_followed_within_the_slack():
    known = Routes(8)
    assert known.choose(LONG, {0: 1, 1: 0}) == 1
    assert known.choose([*LONG[:8], 99], {0: 0, 1: SLACK}) == 1
    assert known.choose(LONG[:7], {0: 0, 1: SLACK}) == 0, "shorter than any known prefix"
    assert known.choose(LONG, {0: 0, 1: SLACK + 1}) == 0
    assert known.choose(LONG, {0: 2, 1: 1}) == 1, "now both know it"


def test_the_longest_beginning_counts():
    known = Routes(8)
    assert known.choose(LONG, {0: 0, 1: 1}) == 0
    assert known.choose([*LONG[:8], *[0] * 32], {0: SLACK + 1, 1: 0}) == 1
    assert known.choose([*LONG, 41], {0: 1, 1: 0}) == 0
    assert known.choose([*LONG[:8], *[0] * 33], {0: 0, 1: 1}) == 1


def test_a_replica_that_died_knows_nothing():
    known = Routes(8)
    assert known.choose(LONG, {0: 0, 1: 1}) == 0
    known.forget(0)
    assert known.choose(LONG, {0: 1, 1: 0}) == 1


def test_few_beginnings_are_remembered(monkeypatch):
    monkeypatch.setattr(routes, "MOST", 2)
    known = Routes(8)
    known.choose(LONG[:8], {0: 0})
    for token in (100, 101):
        known.choose([token] * 8, {0: 0})
    assert known.choose(LONG[:8], {0: 1, 1: 0}) == 1
