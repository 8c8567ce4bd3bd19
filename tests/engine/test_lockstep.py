"""An engine in several processes: the loops of all do the same turns. Here the processes are engines side by side."""

import queue

import jax
import numpy as np
import pytest
from small_engine import LONG, PROMPTS, SHORT, Fault, answer, engine, idle

import ling3
from ling3.engine.forward import Batch
from ling3.engine.lockstep import Leader, follow, shared
from ling3.runtime.processes import Wire

STEPS = ("swap_in", "state_of", "swap_out", "scrub", "extend", "decode")


class Line(Wire):
    """Messages within a process."""

    def __init__(self):
        self.messages = queue.SimpleQueue()
        self.tell, self.hear = self.messages.put, self.messages.get_nowait


def noted(served, patch):
    """What the engine's runner is asked from now on, in its order."""
    asked = []

    def told(arg):
        if isinstance(arg, ling3.engine.request.TokenSequence):
            memory = arg.memory
            return arg.request.request_id, arg.index, memory.slot, tuple(memory.pages), arg.held, memory.saved is None
        if isinstance(arg, Batch):
            return [leaf.tolist() for leaf in jax.tree.leaves(arg)]
        return tuple(map(told, arg)) if isinstance(arg, (list, tuple)) else arg

    def note(name):
        method = getattr(served._loop.runner, name)

        def run(*args):
            asked.append((name, *map(told, args)))
            return method(*args)

        patch.setattr(served._loop.runner, name, run)

    for name in STEPS:
        note(name)
    return asked


@pytest.fixture
def pair(monkeypatch):
    """An engine that leads, what its runner is asked, and what has another engine follow it and gives the same."""
    leader, wire = engine(), Line()
    leader._actor._leader = led = Leader(leader._loop, wire)
    asked = noted(leader, monkeypatch)

    def followed():
        led.close()
        led.close()  # the end is told once
        other = engine()
        own = noted(other, monkeypatch)
        follow(other._loop, other._intake, wire)
        assert wire.messages.empty()
        return other, own

    return leader, asked, followed


def contents(served):
    return [np.asarray(x) for x in jax.tree.leaves(served._loop.runner.pool.layers)]


def test_requests_preempted_aborted_and_ended_by_strings(pair):
    leader, asked, followed = pair
    several = ling3.SamplingParams(max_tokens=9, n=2, temperature=0.8, logit_bias={7: 2.5, 11: -1}, stop=("7", "ab"))
    params = [LONG, LONG, several, LONG, SHORT, several]
    expected = [[answer(each) for each in output.outputs] for output in engine().generate(PROMPTS, params)]
    found = [[answer(each) for each in output.outputs] for output in leader.generate(PROMPTS, params)]
    assert [output[0][0] for output in found[:2]] == [output[0][0] for output in expected[:2]]
    ids = [leader.submit(prompt, LONG) for prompt in PROMPTS]
    for turn in range(12):
        leader.step()
        if turn in (3, 5):
            assert leader.abort(ids.pop())
    stream = leader.stream(PROMPTS[1], LONG)
    next(stream)
    stream.close()
    leader.forget_prefixes()
    leader.generate(PROMPTS[:2], SHORT)
    for number in ids:
        leader.abort(number)
    while leader.has_work:
        leader.step()
    assert idle(leader)
    other, own = followed()
    assert any(name == "swap_out" for name, *_ in asked) and own == asked
    assert other.stats().preemptions == leader.stats().preemptions > 0
    assert all(np.array_equal(a, b) for a, b in zip(contents(leader), contents(other), strict=True))


@pytest.mark.thorough
def test_grammars_and_scores_of_prompts(pair):
    """Each process computes the masks for itself, and they are the same."""
    leader, asked, followed = pair
    schema = ling3.JSONSchema({"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]})
    params = [
        ling3.SamplingParams(structured=schema, max_tokens=40),
        ling3.SamplingParams(structured=ling3.Choice(["yes", "no"]), temperature=2.0, n=3),
        LONG,
        ling3.SamplingParams(max_tokens=0, prompt_logprobs=2),
        ling3.SamplingParams(structured=ling3.Regex("[a-z]{9}"), prompt_logprobs=0),
    ]
    outputs = leader.generate(PROMPTS[:5], params)
    assert all(output.error is None for output in outputs) and len(outputs[3].prompt_logprobs) == len(PROMPTS[3])
    assert idle(leader)
    other, own = followed()
    assert own == asked
    assert other.stats().finished == leader.stats().finished
    assert all(np.array_equal(a, b) for a, b in zip(contents(leader), contents(other), strict=True))


def test_callbacks_that_raise_submit_and_abort(pair):
    leader, asked, followed = pair
    added, seen = [], []

    def fails(delta):
        raise Fault("not mine")

    def asks(delta):
        seen.append(delta)
        if len(seen) == 1:
            added.append(leader.submit(PROMPTS[3], LONG))
        if len(seen) == 3:
            leader.abort(added[0])

    for callback in (fails, asks, None):
        leader.submit(PROMPTS[0], SHORT, on_delta=callback)
    deltas = []
    while leader.has_work:
        deltas += leader.step()
    failed = next(delta.output for delta in deltas if delta.request_id == 0 and delta.output)
    assert failed.outputs[0].finish_reason == "error" and "Fault" in failed.outputs[0].error
    aborted = next(delta.output for delta in deltas if delta.request_id == added[0] and delta.output)
    assert aborted.outputs[0].finish_reason == "abort"
    other, own = followed()
    assert own == asked and other.stats().finished == leader.stats().finished


def test_a_warm_up_is_one_of_all(pair):
    leader, _, followed = pair
    leader.warmup()
    other, _ = followed()
    assert other._loop.runner.programs == leader._loop.runner.programs


def test_settings_are_those_of_the_first_process(monkeypatch):
    wire, given = Line(), ling3.EngineSettings(max_running_requests=3, token_paddings=(16, 512))
    assert shared(given, wire) is given
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    assert shared(ling3.EngineSettings(), wire) == given


def test_after_a_fault_the_engine_is_of_no_use(pair, monkeypatch):
    leader, *_ = pair

    def fails(*_):
        raise Fault("the device")

    monkeypatch.setattr(leader._loop.runner, "decode", fails)
    for _ in range(2):
        with pytest.raises(Fault, match="the device"):
            leader.generate(PROMPTS[0], SHORT)
