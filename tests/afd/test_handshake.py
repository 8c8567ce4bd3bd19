"""The protocol of sessions and cards over the pure operators: in any order of their steps, nothing is lost or mixed.

A simulated session takes its micro-batches through all layers: it sends each to the cards one by one, in any order and
with whatever else happens in between, and combines when its scheduler says so. A card schedules, computes, and returns
its rows session by session. Which worker takes the next step is drawn; each is faster or slower by a drawn factor.
Every value tells where it comes from, so that a wrong row, slot, layer or expert changes the sum.
"""

import functools
import random

import jax
import numpy as np
import pytest
from exhaustive_cases import thoroughly
from hypothesis import given, settings
from hypothesis import strategies as st

from ling3 import afd

SESSIONS, CARDS, MICRO_BATCHES, TOKENS, TOP_K, SLOTS, LAYERS, EXPERTS = 3, 2, 2, 2, 2, 3, 3, 4
LOCAL = EXPERTS // CARDS + 1
"""Experts of a card in each layer: its part of the routed ones, and the shared one, which all have."""
TABLE = np.array(
    [[1, e % CARDS, e // CARDS, 0, 0] for e in range(EXPERTS)] + [[2, 0, LOCAL - 1, 1, LOCAL - 1]], np.int32
)
SCALES = np.array([[1.0, 64.0]] * TOKENS, np.float32)
SHAPE = (SESSIONS, TOKENS, SLOTS, 4)
CHANNELS = 6
"""Of what comes back: session, micro-batch, token, layer, expert, 1."""

SEND = jax.jit(
    functools.partial(afd.attention_to_ffn, moe_expert_num=EXPERTS), static_argnames="sync_flag", donate_argnums=0
)
BATCH = jax.jit(
    functools.partial(afd.ffn_worker_batching, expert_num=LAYERS * LOCAL, max_out_shape=SHAPE, layer_num=LAYERS)
)
SCHEDULE = jax.jit(afd.ffn_worker_scheduler, static_argnames="sync_group_size")
RETURN = jax.jit(afd.ffn_to_attention, donate_argnums=0)
COMPLETE = jax.jit(functools.partial(afd.complete_unrouted, moe_expert_num=EXPERTS), donate_argnums=0)
COMBINE = jax.jit(
    functools.partial(afd.attention_worker_combine, hidden_size=CHANNELS, dtype=np.dtype(np.float32), need_schedule=1)
)


class Session:
    """One session: for each micro-batch its layer, its experts, and the cards that it still must be sent to."""

    def __init__(self, number, rng):
        self.number, self.rng, self.dead = number, rng, False
        self.attn = afd.AttentionArea.empty(MICRO_BATCHES, TOKENS, SLOTS, 512)
        self.active = [np.arange(TOKENS) < rng.choice([0, 1, TOKENS, TOKENS]) for _ in range(MICRO_BATCHES)]
        self.layer, self.ids, self.unsent = [0] * MICRO_BATCHES, [np.zeros(0)] * MICRO_BATCHES, [set()] * MICRO_BATCHES
        self.asked = []
        for m in range(MICRO_BATCHES):
            self.begin(m)

    def begin(self, m):
        """Routes the tokens of a layer. Some ids are for no card."""
        ids = [self.rng.sample(range(-1, EXPERTS + 1), TOP_K) for _ in range(TOKENS)]
        self.ids[m], self.unsent[m] = np.array(ids, np.int32), set(range(CARDS))
        self.attn = COMPLETE(self.attn, **self.message(m))
        self.asked += [(self.number, m, t, k, self.layer[m], expert) for t, k, expert in self.slots(m)]

    @property
    def done(self):
        return self.dead or all(layer == LAYERS for layer in self.layer)

    def message(self, m):
        routed = {"expert_ids": self.ids[m], "expert_rank_table": TABLE, "active_mask": self.active[m]}
        return {"session_id": np.int32(self.number), "micro_batch_id": np.int32(m), **routed}

    def slots(self, m):
        """The slots that go to a card, and the expert of each."""
        for t, k in np.ndindex(TOKENS, SLOTS):
            expert = int(self.ids[m][t, k]) if k < TOP_K else EXPERTS
            if self.active[m][t] and 0 <= expert < EXPERTS + (k == TOP_K):
                yield t, k, expert

    def steps(self):
        """What it can try now: send something, or look whether the next micro-batch is back."""
        if self.done:
            return
        for m in range(MICRO_BATCHES):
            for card in sorted(self.unsent[m]):
                yield functools.partial(self.send, m, card)
        m = (int(self.attn.micro_batch_id) + 1) % MICRO_BATCHES
        if not self.unsent[m] and self.layer[m] < LAYERS:
            yield functools.partial(self.combine, m)

    def send(self, m, rank, run):
        if not run.cards[rank].alive:  # its peers are told, and give up
            self.dead = True
            return True
        x = np.array([[self.number, m, t, self.layer[m]] for t in range(TOKENS)], np.float16)
        sent = run.cards[rank].receive(x, np.int32(self.layer[m]), self.message(m))
        if sent:
            self.unsent[m].remove(rank)
        else:  # the last layer's message is unread: one without rows, or its rows would be missing
            run.refused += 1
        return sent

    def combine(self, m, run):
        y, following, self.attn = COMBINE(self.attn, SCALES, np.int32(self.layer[m]))
        if following == self.layer[m]:
            return False
        expected = np.zeros((TOKENS, CHANNELS), np.float32)
        for t, k, expert in self.slots(m):
            weight = SCALES[t, k] if k < TOP_K else 1.0
            expected[t] += weight * np.array([self.number, m, t, self.layer[m], expert, 1], np.float32)
        assert (np.asarray(y) == expected).all(), (y, expected)
        assert int(self.attn.micro_batch_id) == m
        self.layer[m] = int(following)
        if self.layer[m] < LAYERS:
            self.begin(m)
        return True


class Card:
    """One card: its window, and the rows that it has computed and not returned, by session."""

    def __init__(self, rank, group):
        self.rank, self.group, self.alive = rank, group, True
        self.area = afd.FfnArea.empty(SESSIONS, MICRO_BATCHES, TOKENS, SLOTS, 512)
        self.computed = []
        self.seen = []

    def receive(self, x, layer, message):
        sync_flag = int(self.group is not None)  # where no session waits for another one, empty messages are not sent
        self.area, sent = SEND(self.area, x, layer_id=layer, rank=np.int32(self.rank), sync_flag=sync_flag, **message)
        return bool(sent)

    def steps(self):
        if not self.alive:
            return
        yield self.batch
        for i in range(len(self.computed)):
            yield functools.partial(self.give_back, i)

    def batch(self, run):
        self.area = SCHEDULE(self.area, sync_group_size=self.group)
        if not int(self.area.out_num):
            return False
        out, self.area = BATCH(self.area)
        n = int(out.actual_token_num)
        groups = np.asarray(out.group_list)
        expert = np.repeat(groups[:, 0], groups[:, 1])
        layer, local = expert // LOCAL, expert % LOCAL
        number = np.where(local == LOCAL - 1, EXPERTS, local * CARDS + self.rank)
        place = [np.asarray(ids)[:n] for ids in (out.session_ids, out.micro_batch_ids, out.token_ids, out.topk_slots)]
        y = np.asarray(out.y, np.float32)
        assert (y[:n] == np.stack([*place[:3], layer], axis=1)).all()
        self.seen += [tuple(map(int, row)) for row in zip(*place, layer, number)]
        x = np.concatenate([y, np.ones((len(y), 2), np.float32)], axis=1)
        x[:n, 4] = number
        self.computed += [(session, x, out) for session in sorted(set(place[0]))]
        return True

    def give_back(self, i, run):
        session, x, out = self.computed.pop(i)
        one = run.sessions[session]
        one.attn = RETURN(one.attn, x, out, session_id=np.int32(session))
        return True


class Run:
    """All workers, of which one at a time takes a step, until every living session is done or waits for a dead card."""

    def __init__(self, seed, group, dies=False, card_dies=False):
        self.rng = random.Random(seed)
        self.sessions = [Session(a, random.Random((seed, a).__repr__())) for a in range(SESSIONS)]
        self.cards = [Card(rank, group) for rank in range(CARDS)]
        self.refused = 0
        workers = [*self.sessions, *self.cards]
        speed = [self.rng.choice([0.02, 0.3, 1.0]) for _ in workers]
        death = self.rng.randrange(10, 60) if dies else -1
        card_death = self.rng.randrange(1, 60) if card_dies else -1
        idle = turn = 0
        while not all(session.done for session in self.sessions):
            turn += 1
            if turn == death:
                self.sessions[0].dead = True
            self.cards[-1].alive &= turn != card_death
            steps = list(self.rng.choices(workers, speed)[0].steps())
            if idle > 60:  # each of them once: one must make progress
                steps = [step for worker in workers for step in worker.steps()]
                if not (any(step(self) for step in steps) or self.drain(group)):
                    assert not self.cards[-1].alive, "deadlock"
                    break  # all that is left waits for the dead card, and is told so
                idle = 0
            elif steps:
                idle = 0 if self.rng.choice(steps)(self) else idle + 1
            if self.sessions[0].dead and not turn % 5:
                self.drain(group)

    def drain(self, group):
        """Messages without rows in the name of a dead session, for whose flags the cards would wait."""
        dead, sent = self.sessions[0], False
        if not dead.dead or group is not None:
            return False
        for m in range(MICRO_BATCHES):
            message = dead.message(m) | {"active_mask": np.zeros(TOKENS, bool)}
            for card in self.cards:
                sent |= card.receive(np.zeros((TOKENS, 4), np.float16), np.int32(0), message)
        return sent

    def check(self):
        """Every slot that was sent was computed once, by a card of its expert; those of the dead at most once."""
        seen = [row for card in self.cards for row in card.seen]
        assert len(seen) == len(set(seen))
        for session in self.sessions:
            own = {row for row in seen if row[0] == session.number}
            assert own <= set(session.asked)
            assert not session.done or session.dead or own == set(session.asked)


@pytest.mark.parametrize("group", thoroughly([None, 1], but=[1]))
def test_any_order_of_steps(group):
    """A card that waits for all sessions is sent messages without rows too, which may be unread at the next layer."""
    run = Run(0, group)
    run.check()
    assert (run.refused > 0) == (group is None)


def test_a_session_that_dies():
    run = Run(100, None, dies=True)
    assert run.sessions[0].dead
    run.check()


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32),
    group=st.sampled_from([None, 1]),
    dies=st.booleans(),
    card_dies=st.sampled_from([False, False, True]),
)
@settings(max_examples=30)
def test_many_orders_of_steps(seed, group, dies, card_dies):
    Run(seed, group, dies, card_dies).check()
