"""The scheduler alone: slots and pages belong to one sequence each, and the oldest goes first."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ling3.engine.request import Request, TokenSequence
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.scheduler import Scheduler
from ling3.engine.shapes import Shapes
from ling3.text.detokenizer import StopStrings


def new_sequence(order):
    request = Request(order, None, [3], SamplingParams(), lambda delta: None)
    return TokenSequence(request, 0, order, 0, (), None, StopStrings(()))


def scheduler_of(slots, pages, page_size=16):
    return Scheduler(Shapes(slots, pages, page_size, columns=64, buckets=(), rows=()))


class Books(RuleBasedStateMachine):
    """Any order of calls that an engine could make, beside a model of what must hold."""

    @initialize(slots=st.integers(1, 5), pages=st.integers(1, 12), page_size=st.sampled_from([1, 3, 16]))
    def begin(self, slots, pages, page_size):
        self.scheduler = scheduler_of(slots, pages, page_size)
        self.waiting, self.running, self.tokens, self.orders = [], [], {}, 0

    @rule()
    def enqueue(self):
        sequence = new_sequence(self.orders)
        self.orders += 1
        self.scheduler.enqueue(sequence)
        self.waiting.append(sequence)

    @rule(tokens=st.integers(1, 60))
    def admit(self, tokens):
        head, free = self.scheduler.head(), self.scheduler.free_pages
        sequence = self.scheduler.admit(tokens)
        needed = -(-tokens // self.scheduler.page_size)
        possible = head is not None and len(self.running) < self.scheduler.slots and needed <= free
        assert (sequence is head) if possible else (sequence is None)
        if sequence is not None:
            assert sequence is min(self.waiting, key=lambda r: r.order)
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.tokens[sequence] = tokens
            assert self.scheduler.free_pages == free - needed

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(1, 60))
    def reserve(self, data, tokens):
        sequence = data.draw(st.sampled_from(self.running))
        before, free = list(sequence.memory.pages), self.scheduler.free_pages
        missing = max(-(-tokens // self.scheduler.page_size) - len(before), 0)
        given = self.scheduler.reserve(sequence, tokens)
        assert given == (missing <= free)
        # What it has stays where it is, and a refusal takes nothing.
        assert sequence.memory.pages[: len(before)] == before
        assert len(sequence.memory.pages) == len(before) + (missing if given else 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempted=st.booleans())
    def release(self, data, preempted):
        sequence = data.draw(st.sampled_from(self.running))
        free = self.scheduler.free_pages
        held = len(sequence.memory.pages)
        self.scheduler.release(sequence)
        self.running.remove(sequence)
        assert (sequence.memory.slot, sequence.memory.pages, self.scheduler.free_pages) == (None, [], free + held)
        if preempted:
            self.scheduler.enqueue(sequence)
            self.waiting.append(sequence)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def withdraw(self, data):
        sequence = data.draw(st.sampled_from(self.waiting))
        self.scheduler.withdraw(sequence)
        self.scheduler.withdraw(sequence)
        self.waiting.remove(sequence)

    @invariant()
    def the_books_balance(self):
        scheduler = self.scheduler
        scheduler.check()
        in_order = sorted(self.waiting, key=lambda sequence: sequence.order)
        assert scheduler.queued() == in_order
        assert scheduler.head() is (in_order[0] if in_order else None)
        assert scheduler.running == sorted(self.running, key=lambda sequence: sequence.order)
        assert scheduler.waiting == len(self.waiting)
        assert scheduler.free_slots == scheduler.slots - len(self.running)
        assert scheduler.free_pages == scheduler.pages - sum(len(sequence.memory.pages) for sequence in self.running)
        assert not set(scheduler.queued()) & set(scheduler.running)


TestBooks = Books.TestCase


def test_a_sequence_is_released_once():
    scheduler = scheduler_of(1, 2)
    sequence = new_sequence(0)
    scheduler.enqueue(sequence)
    assert scheduler.admit(5) is sequence
    scheduler.release(sequence)
    with pytest.raises(AssertionError, match="only a running sequence has a slot and pages"):
        scheduler.release(sequence)


def test_the_head_is_never_overtaken():
    """A large one at the head waits for pages, and the small one behind it waits with it."""
    scheduler = scheduler_of(3, 4)
    old, large, small = (new_sequence(order) for order in range(3))
    for sequence in (small, large, old):
        scheduler.enqueue(sequence)
    assert scheduler.admit(16 * 2) is old
    assert scheduler.admit(16 * 3) is None
    assert scheduler.head() is large
    scheduler.release(old)
    assert scheduler.admit(16 * 3) is large
    assert scheduler.admit(16) is small


@pytest.mark.parametrize("spoil", ["slot", "page", "twice", "waiting"])
def test_check_notices(spoil):
    scheduler = scheduler_of(2, 4)
    first, second, third = (new_sequence(order) for order in range(3))
    for sequence in (first, second, third):
        scheduler.enqueue(sequence)
    assert scheduler.admit(20) is first
    assert scheduler.admit(20) is second
    scheduler.check()
    if spoil == "slot":
        first.memory.slot = second.memory.slot
    elif spoil == "page":
        first.memory.pages.pop()
    elif spoil == "twice":
        first.memory.pages[0] = second.memory.pages[0]
    else:
        third.memory.pages.append(0)
    with pytest.raises(AssertionError):
        scheduler.check()
