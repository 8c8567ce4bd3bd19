"""The books alone: slots and pages belong to one run each, and the oldest goes first."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ling3.engine.request import Request, Run
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.scheduler import Scheduler
from ling3.text.detokenizer import StopStrings


def new_run(order):
    request = Request(order, None, [3], SamplingParams(), lambda delta: None)
    return Run(request, 0, order, 0, (), None, StopStrings(()))


class Books(RuleBasedStateMachine):
    """Any order of calls that an engine could make, beside a model of what must hold."""

    @initialize(slots=st.integers(1, 5), pages=st.integers(1, 12), page_size=st.sampled_from([1, 3, 16]))
    def begin(self, slots, pages, page_size):
        self.scheduler = Scheduler(slots, pages, page_size)
        self.waiting, self.running, self.tokens, self.orders = [], [], {}, 0

    @rule()
    def enqueue(self):
        run = new_run(self.orders)
        self.orders += 1
        self.scheduler.enqueue(run)
        self.waiting.append(run)

    @rule(tokens=st.integers(1, 60))
    def admit(self, tokens):
        head, free = self.scheduler.head(), self.scheduler.free_pages
        run = self.scheduler.admit(tokens)
        needed = -(-tokens // self.scheduler.page_size)
        possible = head is not None and len(self.running) < self.scheduler.slots and needed <= free
        assert (run is head) if possible else (run is None)
        if run is not None:
            assert run is min(self.waiting, key=lambda r: r.order)
            self.waiting.remove(run)
            self.running.append(run)
            self.tokens[run] = tokens
            assert self.scheduler.free_pages == free - needed

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 60))
    def reserve(self, data, tokens):
        run = data.draw(st.sampled_from(self.running))
        before, free = list(run.pages), self.scheduler.free_pages
        missing = max(-(-tokens // self.scheduler.page_size) - len(before), 0)
        given = self.scheduler.reserve(run, tokens)
        assert given == (missing <= free)
        # What it has stays where it is, and a refusal takes nothing.
        assert run.pages[: len(before)] == before
        assert len(run.pages) == len(before) + (missing if given else 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempted=st.booleans())
    def release(self, data, preempted):
        run = data.draw(st.sampled_from(self.running))
        free = self.scheduler.free_pages
        held = len(run.pages)
        self.scheduler.release(run)
        self.running.remove(run)
        assert (run.slot, run.pages, self.scheduler.free_pages) == (None, [], free + held)
        if preempted:
            self.scheduler.enqueue(run)
            self.waiting.append(run)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data):
        run = data.draw(st.sampled_from(self.waiting))
        self.scheduler.withdraw(run)
        self.scheduler.withdraw(run)
        self.waiting.remove(run)

    @invariant()
    def the_books_balance(self):
        scheduler = self.scheduler
        scheduler.check()
        in_order = sorted(self.waiting, key=lambda run: run.order)
        assert scheduler.queued() == in_order
        assert scheduler.head() is (in_order[0] if in_order else None)
        assert scheduler.running == sorted(self.running, key=lambda run: run.order)
        assert scheduler.waiting == len(self.waiting)
        assert scheduler.free_slots == scheduler.slots - len(self.running)
        assert scheduler.free_pages == scheduler.pages - sum(len(run.pages) for run in self.running)
        assert not set(scheduler.queued()) & set(scheduler.running)


TestBooks = Books.TestCase


def test_a_run_is_released_once():
    scheduler = Scheduler(1, 2, 16)
    run = new_run(0)
    scheduler.enqueue(run)
    assert scheduler.admit(5) is run
    scheduler.release(run)
    with pytest.raises(AssertionError, match="only a running run has something to give back"):
        scheduler.release(run)


def test_the_head_is_never_overtaken():
    """A large one at the head waits for pages, and the small one behind it waits with it."""
    scheduler = Scheduler(3, 4, 16)
    old, large, small = (new_run(order) for order in range(3))
    for run in (small, large, old):
        scheduler.enqueue(run)
    assert scheduler.admit(16 * 2) is old
    assert scheduler.admit(16 * 3) is None
    assert scheduler.head() is large
    scheduler.release(old)
    assert scheduler.admit(16 * 3) is large
    assert scheduler.admit(16) is small


@pytest.mark.parametrize("spoil", ["slot", "page", "twice", "waiting"])
def test_check_notices(spoil):
    scheduler = Scheduler(2, 4, 16)
    first, second, third = (new_run(order) for order in range(3))
    for run in (first, second, third):
        scheduler.enqueue(run)
    assert scheduler.admit(20) is first
    assert scheduler.admit(20) is second
    scheduler.check()
    if spoil == "slot":
        first.slot = second.slot
    elif spoil == "page":
        first.pages.pop()
    elif spoil == "twice":
        first.pages[0] = second.pages[0]
    else:
        third.pages.append(0)
    with pytest.raises(AssertionError):
        scheduler.check()
