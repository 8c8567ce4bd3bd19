"""The promise: a request's tokens and log-probabilities are bit for bit those of the same request run alone."""

import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from promised_requests import PAGES, SETTINGS, SLOTS, answer, answers, requests
from small_engine import crowd
from tiny import TINY, open_model

import ling3
from ling3.cache import map_pages, map_slots, pages_of
from ling3.engine.shapes import Grid

ONE_SLOT, MANY_SLOTS = {"max_running_requests": 1}, {"max_running_requests": 13, "num_pages": 70}
# The longest request below: 96 + 48 tokens, the last of which is never cached.
FEWEST_PAGES = 9


def engine(**changes):
    return ling3.Engine(open_model(TINY), None, **{**SETTINGS, **changes})


def chunked_by(engine, chunk):
    """From now on the engine's prompts are dealt in chunks of so many tokens."""
    engine._loop.settings = dataclasses.replace(engine._loop.settings, chunked_prefill_size=chunk)


@functools.cache
def alone(which, chunk):
    """The answers to one request in an engine that serves nothing else."""
    lonely = idle_engine()
    chunked_by(lonely, chunk)
    return answers([requests()[which]], lonely)[0]


@functools.cache
def idle_engine():
    return engine(prefix_cache=False)


def joined(first, rest):
    """The completion of which these are the two parts, or the one."""
    if first is None:
        return rest
    logprobs = None if rest.logprobs is None else (*first.logprobs, *rest.logprobs)
    return dataclasses.replace(rest, token_ids=(*first.token_ids, *rest.token_ids), logprobs=logprobs)


class Company(RuleBasedStateMachine):
    """Requests come, go on, are aborted and preempted in any order; fewer slots and pages than the pool has. Some are
    asked in two parts, the second of which goes on from the first one's snapshot.

    Alone a request finds no known prefix. In company it may: without room for snapshots, with room for few, or enough.
    """

    @initialize(
        slots=st.integers(1, SLOTS),
        pages=st.integers(FEWEST_PAGES, PAGES),
        chunk=st.sampled_from([8, 16, 32]),
        snapshots=st.sampled_from([0, 1, 3, 100]),
    )
    def begin(self, slots, pages, chunk, snapshots):
        self.engine = busy_engine()
        self.chunk = chunk
        chunked_by(self.engine, chunk)
        size, page_size = self.engine._loop.runner.shapes.grid.snapshot, SETTINGS["page_size"]
        grid = Grid(math.lcm(page_size, chunk), size, snapshots * size) if snapshots else None
        crowd(self.engine, slots=slots, pages=pages, grid=grid)
        self.before = self.engine.stats()
        self.asked, self.finished, self.aborted = {}, {}, set()
        self.begun, self.first = {}, {}

    def alone(self, which):
        return alone(which, self.chunk)

    @rule(which=st.integers(0, 23))
    def submit(self, which):
        prompt, params = requests()[which]
        self.asked[self.engine.submit(prompt, params)] = which

    @rule(which=st.integers(0, 23), tokens=st.integers(1, 47))
    def submit_in_two(self, which, tokens):
        """So many tokens, and the rest from what they left, whenever they are there."""
        prompt, params = requests()[which]
        if params.n == 1 and tokens < params.max_tokens:
            first = dataclasses.replace(params, max_tokens=tokens, keep=True)
            self.begun[self.engine.submit(prompt, first)] = which

    def resume(self, which, first):
        _, params = requests()[which]
        if first.finish_reason == "length":
            rest = dataclasses.replace(params, max_tokens=params.max_tokens - len(first.token_ids))
            number = self.engine.submit(first.snapshot, rest)
            self.asked[number], self.first[number] = which, first
        else:
            assert answer(first) == self.alone(which)[0]

    @precondition(lambda self: self.engine.has_work)
    @rule(turns=st.integers(1, 4))
    def step(self, turns):
        for _ in range(turns):
            for delta in self.engine.step():
                if delta.output is not None and delta.request_id in self.begun:
                    self.resume(self.begun.pop(delta.request_id), delta.output.outputs[0])
                elif delta.output is not None:
                    self.finished[delta.request_id] = delta.output

    @precondition(lambda self: self.asked)
    @rule(place=st.integers(0, 10**6))
    def abort(self, place):
        which = sorted(self.asked)[place % len(self.asked)]
        if self.engine.abort(which):
            self.aborted.add(which)

    @invariant()
    def the_counts_add_up(self):
        if not hasattr(self, "engine"):
            return
        stats = self.engine.stats()
        assert stats.submitted == stats.waiting + stats.running + sum(stats.finished.values())
        assert stats.slots == stats.free_slots + stats.running
        held = {page for sequence in self.engine._loop.scheduler.running for page in sequence.memory.pages}
        assert stats.pages == stats.free_pages + len(held)
        self.engine._loop.scheduler.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        while self.engine.has_work:
            self.step(1)
        assert set(self.finished) == set(self.asked)
        for request, which in self.asked.items():
            for own, expected in zip(self.finished[request].outputs, self.alone(which), strict=True):
                got = joined(self.first.get(request), own)
                if got.finish_reason == "abort":
                    assert request in self.aborted
                    assert got.token_ids == expected[0][: len(got.token_ids)]
                else:
                    assert answer(got) == expected
        stats = self.engine.stats()
        assert (stats.free_slots, stats.free_pages) == (stats.slots, stats.pages)
        assert (stats.waiting, stats.running, self.engine._loop.requests, self.engine._loop.in_flight) == (0, 0, {}, [])


@functools.cache
def busy_engine():
    return engine()


TestCompany = Company.TestCase
TestCompany.settings = settings(max_examples=10, stateful_step_count=30, deadline=None)


class ManyCompanies(Company):
    """The same, more often."""


TestManyCompanies = pytest.mark.optimized(pytest.mark.exhaustive(pytest.mark.slow(ManyCompanies.TestCase)))
TestManyCompanies.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@functools.cache
def engines(slots, pages, chunk):
    """Two of these settings: one for company, one for each request alone."""
    changes = {"max_running_requests": slots, "num_pages": pages, "chunked_prefill_size": chunk}
    return engine(**changes), engine(**changes, prefix_cache=False)


@functools.cache
def alone_in(which, *sizes):
    return answers([requests()[which]], engines(*sizes)[1])[0]


class FreshCompany(Company):
    """The same with examples that no run has seen, and sizes by the engine's settings."""

    @initialize(sizes=st.just((2, 20, 8)))
    def begin(self, sizes):
        self.open(sizes)

    def open(self, sizes):
        self.sizes = sizes
        self.engine, _ = engines(*sizes)
        self.engine.forget_prefixes()
        self.asked, self.finished, self.aborted = {}, {}, set()
        self.begun, self.first = {}, {}

    def alone(self, which):
        return alone_in(which, *self.sizes)


class OtherFreshCompany(FreshCompany):
    """The same in engines of one slot, of few pages for many, and of many pages."""

    @initialize(sizes=st.sampled_from([(1, 9, 32), (5, 12, 16), (6, 48, 32)]))
    def begin(self, sizes):
        self.open(sizes)


FRESH = settings(max_examples=10, stateful_step_count=30, deadline=None, derandomize=False, print_blob=True)
TestFreshCompany = pytest.mark.optimized(pytest.mark.slow(FreshCompany.TestCase))
TestOtherFreshCompany = pytest.mark.optimized(pytest.mark.exhaustive(pytest.mark.slow(OtherFreshCompany.TestCase)))
TestFreshCompany.settings = TestOtherFreshCompany.settings = FRESH


def test_constant_preemption_changes_nothing():
    """Six requests that begin small and each grow to most of the pages there are."""
    growing = [
        ([5 + i], ling3.SamplingParams(max_tokens=120, temperature=i % 2, seed=i, logprobs=0)) for i in range(12)
    ]
    crowded = busy_engine()
    chunked_by(crowded, 32)
    crowd(crowded, pages=FEWEST_PAGES)
    before = crowded.stats().preemptions
    expected = [answers([request], idle_engine())[0] for request in growing]
    assert answers(growing, crowded) == expected
    assert crowded.stats().preemptions - before > 20


def poisoned_at(x, places):
    """The array with NaN there: by NumPy, as each number of places would be a program of its own."""
    x = np.array(x)
    x[list(places)] = np.nan
    return jnp.asarray(x)


def test_poisoned_pools_change_nothing():
    """NaN in every free page and slot before every step, and in every position that a request has not yet reached."""
    poisoned = busy_engine()
    chunked_by(poisoned, 32)
    crowd(poisoned, pages=20)
    asked = {poisoned.submit(*request): which for which, request in enumerate(requests())}
    while poisoned.has_work:
        scheduler, runner = poisoned._loop.scheduler, poisoned._loop.runner
        layers = map_slots(lambda x, free=scheduler.groups[0].free_slots: poisoned_at(x, free), runner.pool.layers)
        pages = [*scheduler.groups[0].free_pages, *range(20, PAGES)]
        layers = map_pages(lambda x, free=pages: poisoned_at(x, free), layers)
        runner.pool = eqx.tree_at(lambda p: p.layers, runner.pool, layers)
        for delta in poisoned.step():
            if delta.output is not None:
                which = asked.pop(delta.request_id)
                assert [answer(completion) for completion in delta.output.outputs] == alone(which, 32)
    assert not asked


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("changes", exhaustively([ONE_SLOT, MANY_SLOTS], but=[MANY_SLOTS]))
def test_the_size_of_the_engine_changes_nothing(changes):
    """Beyond the promise: other slots and pages are other programs, with the same bits."""
    assert answers(requests()[:12], engine(**changes)) == [alone(which, 32) for which in range(12)]


@pytest.mark.slow
def test_without_the_promise_answers_differ_by_rounding_alone():
    free = engine(batch_invariant=False)
    params = ling3.SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True)
    greedy = [(prompt, params) for prompt, _ in requests()[:6]]
    together, expected = answers(greedy, free), answers(greedy, idle_engine())
    assert free._loop.runner.shapes.rows == (2, 6)
    for ((tokens, logprobs, *_),), ((same_tokens, same_logprobs, *_),) in zip(together, expected, strict=True):
        assert tokens == same_tokens
        # Logits of standard deviation near 1 in float32, through four layers: 1e-5 at most.
        np.testing.assert_allclose([one.logprob for one in logprobs], [one.logprob for one in same_logprobs], atol=1e-4)


@pytest.mark.slow
@pytest.mark.optimized
def test_a_row_for_every_slot_keeps_the_promise():
    """Where decoding is in place, while others are prefilled, preempted and aborted beside it."""
    own = engine(decode_rows=SLOTS, num_pages=14)
    expected = [answers([request], own)[0] for request in requests()[:12]]
    before = own.stats().preemptions
    assert answers(requests()[:12], own) == expected
    assert own.stats().preemptions > before
    begun = [own.submit(*requests()[i]) for i in (3, 7, 9)]
    for _ in range(4):
        own.step()
    aborted = [own.abort(which) for which in begun]
    assert any(aborted)
    assert answers(requests()[:12], own) == expected


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("cache_dtype", exhaustively(["auto", "bfloat16"], but=["auto"]))
def test_bfloat16_keeps_the_promise(cache_dtype):
    """Narrow weights, whose caches are float32 on the CPU unless asked for: two rows and a preemption or two."""
    settings = {**SETTINGS, "num_pages": 12, "decode_rows": 2, "cache_dtype": cache_dtype}
    narrow = ling3.Engine(open_model(TINY, dtype=jnp.bfloat16), None, **settings)
    some = requests()[:8]
    expected = [answers([request], narrow)[0] for request in some]
    before = narrow.stats().preemptions
    assert answers(some, narrow) == expected
    assert narrow.stats().preemptions > before
    layers = narrow._loop.runner.pool.layers
    wide = jnp.dtype(jnp.float32)
    kept = wide if cache_dtype == "auto" else jnp.dtype(jnp.bfloat16)
    assert {paged.entries.dtype for paged in pages_of(layers)} == {kept}
    assert {leaf.dtype for leaf in jax.tree.leaves(layers)} == {
        kept,
        wide,
    }  # KDA's states are float32 whatever is asked
