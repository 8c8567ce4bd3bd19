"""Who has which prompt: each is answered once, whatever dies."""

import random

import pytest

from ling3.fleet import work
from ling3.fleet.work import BATCH, FleetError, Work


def test_batches_are_small_and_replicas_have_their_share():
    todo = Work(100)
    assert todo.hand(0, 4, 2) == list(range(8)) and todo.hand(1, 4, 2) == list(range(8, 16))
    assert todo.hand(0, 4, 2) == [16, 17, 18, 19], "as many as run at once, and a batch besides"
    assert todo.hand(0, 4, 2) == [] and todo.left == 100
    assert todo.finish(0, 3) and todo.hand(0, 4, 2) == [20]
    few = Work(5)
    assert (few.hand(0, 64, 2), few.hand(0, 64, 2), few.hand(1, 64, 2)) == ([0, 1, 2], [], [3, 4])


def test_an_answer_counts_once_and_from_its_holder_alone():
    todo = Work(2)
    assert todo.hand(0, 1, 2) == [0] and todo.hand(1, 1, 2) == [1]
    assert not todo.finish(1, 0) and not todo.finish(2, 0)
    assert todo.finish(0, 0) and not todo.finish(0, 0)
    assert todo.lose(1) == [1] and not todo.finish(1, 1), "a dead replica's answer comes too late"
    assert todo.lose(1) == [] and todo.hand(0, 1, 1) == [1] and todo.finish(0, 1) and todo.left == 0


def test_what_a_dead_replica_held_comes_first():
    todo = Work(30)
    todo.hand(0, 1, 2), todo.hand(1, 1, 2)
    assert todo.lose(0) == list(range(8)) and todo.hand(2, 1, 2) == list(range(8))


def test_a_prompt_with_which_two_have_died_is_alone_and_three_deaths_later_it_is_named():
    todo = Work(20)
    for _ in range(work.IN_COMPANY):
        assert todo.hand(0, 1, 1) == list(range(BATCH))
        todo.lose(0)
    assert todo.hand(0, 1, 1) == [0] and todo.hand(0, 1, 1) == [], "nothing beside it"
    assert todo.hand(1, 1, 2) == [1], "nor beside another"
    assert todo.finish(0, 0) and todo.finish(1, 1)
    for _ in range(work.ALONE - 1):
        assert todo.hand(0, 1, 1) == [2]
        todo.lose(0)
    assert todo.hand(1, 1, 1) == [2]
    with pytest.raises(FleetError, match="prompt 2 was alone with 3 replicas, and each of them died"):
        todo.lose(1)


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_answers_and_deaths_answers_each_once(seed):
    rng, todo, held, answered = random.Random(seed), Work(60), {0: [], 1: [], 2: []}, []
    deaths = 0
    while todo.left:
        replica = rng.choice(list(held))
        event = rng.random()
        if event < 0.5:
            held[replica] += todo.hand(replica, rng.choice([1, 4, 64]), 3)
        elif event < 0.52 and deaths < 4:  # fewer than name an innocent prompt
            deaths += 1
            assert sorted(held[replica]) == todo.lose(replica)
            held[replica] = []
        elif held[replica]:
            prompt = held[replica].pop(rng.randrange(len(held[replica])))
            assert todo.finish(replica, prompt)
            answered.append(prompt)
    assert sorted(answered) == list(range(60))
