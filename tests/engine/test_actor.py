"""The engine's thread: many callers at once, Ctrl-C at any time, and its own end."""

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import weakref

import jax
import pytest
from scripted_runner import scripted
from small_engine import LONG, PROMPTS, SHORT, Fault, answer, balanced, idle

from ling3 import SamplingParams
from ling3.engine.requests import Requests


@pytest.fixture(scope="module")
def shared():
    return scripted()


@pytest.fixture(scope="module")
def alone(warm):
    return [answer(warm.generate([prompt], SHORT)[0].outputs[0]) for prompt in PROMPTS]


def threads():
    return {thread for thread in threading.enumerate() if thread.name == "ling3-engine"}


# Many requests in one iterator


def test_deltas_of_many_requests_add_up(served, alone):
    before, found, ends = served.stats().submitted, {}, {}
    for i, delta in served.stream_all(iter(PROMPTS), SHORT):
        found.setdefault(i, []).extend(delta.token_ids)
        ends[i] = delta.output
    assert [answer(ends[i].outputs[0]) for i in range(len(PROMPTS))] == alone
    assert [tuple(found[i]) for i in range(len(PROMPTS))] == [tokens for tokens, *_ in alone]
    assert served.stats().submitted == before + len(PROMPTS)
    assert list(served.stream_all([])) == []


def test_each_prompt_may_have_its_params_and_the_queue_may_be_short(alone):
    short = scripted(max_queue=2)
    params = [SamplingParams(max_tokens=5 + i, ignore_eos=True, n=1 + i % 2) for i in range(len(PROMPTS))]
    waiting, ends = [], {}
    for i, delta in short.stream_all(PROMPTS, params):
        waiting.append(short.stats().waiting)
        ends[i] = delta.output
    assert max(waiting) <= 2
    for i, own in enumerate(params):
        assert [list(c.token_ids) for c in ends[i].outputs] == [list(alone[i][0][: own.max_tokens])] * own.n
    assert idle(short)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[3], []], {}, "prompt 1 is empty"),
        ([[3], [4]], {"params": [SHORT]}, "1 params for 2 prompts"),
        ([[3], [4]], {"arrivals": [0.0]}, r"arrivals are \[0.0\], expected a time for each of 2 prompts, ascending"),
        ([[3], [4]], {"arrivals": [1.0, 0.5]}, "ascending"),
        ([[3]], {"arrivals": [float("inf")]}, "ascending"),
        ([[3]], {"arrivals": [float("nan")]}, "ascending"),
    ],
)
def test_all_is_checked_before_the_first_runs(served, prompts, options, message):
    before = served.stats()
    with pytest.raises(ValueError, match=message):
        served.stream_all(prompts, **options)
    assert served.stats() == before


def test_requests_arrive_at_their_times(served, alone):
    arrivals, seen, ends, begin = [0.0, 0.05, 0.3, 0.3], {}, {}, time.perf_counter()
    for i, delta in served.stream_all(PROMPTS[:4], SHORT, arrivals=arrivals):
        seen[i], ends[i] = time.perf_counter() - begin, delta.output
    assert [answer(ends[i].outputs[0]) for i in range(4)] == alone[:4]
    for i, due in enumerate(arrivals):
        assert seen[i] - ends[i].timings.total >= due  # when it was submitted, at the earliest


def test_leaving_the_iterator_aborts_what_is_unfinished(served):
    before = served.stats()
    for _, delta in served.stream_all([PROMPTS[0], PROMPTS[1], PROMPTS[2]], [LONG, SHORT, LONG]):
        if delta.output is not None:
            break
    after = served.stats()
    assert (after.running, after.waiting) == (0, 0)
    assert after.finished["abort"] == before.finished["abort"] + 2
    deltas = served.stream_all(PROMPTS, LONG)
    del deltas
    assert served.stats() == after


def test_a_fault_ends_all_requests_also_those_that_the_queue_has_no_room_for(monkeypatch, alone):
    short = scripted(max_queue=2)

    def broken(*_):
        raise Fault

    monkeypatch.setattr(short._loop.runner, "decode", broken)
    requests, enqueue = [], Requests.enqueue
    monkeypatch.setattr(
        Requests, "enqueue", lambda loop, asked, waits: requests.extend(asked) or enqueue(loop, asked, waits)
    )
    with pytest.raises(Fault):
        for _ in short.stream_all(PROMPTS * 2, SHORT):
            pass
    short.stats()  # the engine's thread has ended all of them before it answers
    assert [request.output().finish_reason for request in requests] == ["error"] * 12
    monkeypatch.undo()
    assert [answer(output.outputs[0]) for output in short.generate(PROMPTS, SHORT)] == alone
    assert idle(short)


def test_the_loop_rests_while_nobody_waits(served):
    """The engine does not run ahead of a slow reader."""
    before, stream = served.stats().output_tokens, served.stream(PROMPTS[0], LONG)
    tokens = sum(len(next(stream).token_ids) for _ in range(3))
    stats = served.stats()
    time.sleep(0.05)
    assert served.stats() == stats
    assert stats.output_tokens == before + tokens
    stream.close()


def test_without_overlap_a_turn_reads_what_it_launched(alone):
    plain = scripted(overlap=False)
    plain.submit(PROMPTS[0], SHORT)
    deltas = plain.step()
    assert [len(delta.token_ids) for delta in deltas] == [1, 3]
    assert not plain._loop.in_flight
    while plain.has_work:
        deltas += plain.step()
        assert not plain._loop.in_flight
    assert answer(deltas[-1].output.outputs[0]) == alone[0]
    outputs = plain.generate(PROMPTS, SHORT)
    assert [answer(output.outputs[0]) for output in outputs] == alone
    long = [[i] * 50 for i in range(40, 44)]
    expected = [answer(output.outputs[0]) for output in scripted().generate(long, LONG)]
    assert [answer(output.outputs[0]) for output in plain.generate(long, LONG)] == expected
    assert plain.stats().preemptions > 0
    assert idle(plain)


# Many callers


def test_callers_of_all_kinds_at_once(served, alone):
    """Threads, event loops, batches and iterators that are left, at random, for two seconds."""
    until = time.monotonic() + 2

    async def reads(draw):
        i = draw.randrange(len(PROMPTS))
        deltas = [delta async for delta in served.astream(PROMPTS[i], SHORT)]
        assert answer(deltas[-1].output.outputs[0]) == alone[i]

    async def leaves(draw):
        async for _ in served.astream(PROMPTS[draw.randrange(len(PROMPTS))], LONG):
            break

    async def many(draw):
        tasks = [asyncio.create_task(draw.choice((reads, leaves))(draw)) for _ in range(5)]
        doomed = asyncio.create_task(leaves(draw))
        await asyncio.sleep(draw.random() * 0.01)
        doomed.cancel()
        await asyncio.gather(*tasks)
        await asyncio.wait([doomed])

    def streams(draw):
        i = draw.randrange(len(PROMPTS))
        stream = served.stream(PROMPTS[i], SHORT)
        taken = list(itertools.islice(stream, draw.randrange(6)))
        if taken and taken[-1].output is not None:
            assert answer(taken[-1].output.outputs[0]) == alone[i]

    def batches(draw):
        outputs = served.generate(PROMPTS, SHORT, on_delta=draw.choice((None, lambda delta: None)))
        assert [answer(output.outputs[0]) for output in outputs] == alone

    def cycles(draw):
        cycle = [served.stream_all(PROMPTS, LONG)]
        cycle.append(cycle)
        next(cycle[0])

    def submits(draw):
        told = []
        number = served.submit(PROMPTS[0], LONG, on_delta=told.append)
        while not told:
            served.step()
        aborted = served.abort(number)
        assert told[-1].finish_reason == ("abort" if aborted else "length")

    def work(seed):
        draw = random.Random(seed)
        while time.monotonic() < until:
            draw.choice((streams, batches, cycles, submits, lambda draw: asyncio.run(many(draw))))(draw)
            assert balanced(served.stats())

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


def test_a_stream_whose_event_loop_was_closed_ends_in_silence(served):
    """The stream's deltas reach nobody, and least of all whoever calls `step` next."""
    before, events = served.stats(), asyncio.new_event_loop()
    stream = served.astream(PROMPTS[0], LONG)
    events.run_until_complete(anext(stream))
    events.close()
    while served.has_work:
        assert not served.step()
    assert served.stats().finished["error"] == before.finished["error"] + 1


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_at_random_times(served, alone):
    """Of whatever is under way in the main thread, and an event loop goes on beside it.

    Python only warns of an interrupt inside a weak reference's callback, and goes on.
    """
    draw, stop, interrupts, armed = random.Random(0), threading.Event(), [], [False]

    def handler(*_):
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    def presses():
        while not stop.wait(draw.random() * 0.01):
            os.kill(os.getpid(), signal.SIGINT)

    async def reads():
        for i in range(len(PROMPTS)):
            deltas = [delta async for delta in served.astream(PROMPTS[i], SHORT)]
            assert answer(deltas[-1].output.outputs[0]) == alone[i]

    ways = [
        lambda: served.generate(PROMPTS, SHORT),
        lambda: served.generate(PROMPTS, SHORT, on_delta=lambda delta: None),
        lambda: list(served.stream(PROMPTS[1], LONG)),
        lambda: list(served.stream_all(PROMPTS, SHORT, arrivals=[0.001 * i for i in range(6)])),
        lambda: served.abort(served.submit(PROMPTS[0], SHORT, on_delta=lambda delta: None)),
        served.stats,
        served.step,
        served.warmup,
    ]
    before = signal.signal(signal.SIGINT, handler)
    presser = threading.Thread(target=presses)
    presser.start()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            beside = pool.submit(lambda: [asyncio.run(reads()) for _ in range(5)])
            until = time.monotonic() + 2
            while time.monotonic() < until:
                try:
                    armed[0] = True
                    draw.choice(ways)()
                    armed[0] = False
                except KeyboardInterrupt:
                    interrupts.append(1)
            beside.result()
    finally:
        stop.set()
        presser.join()
        signal.signal(signal.SIGINT, before)
    assert len(interrupts) > 20
    gc.collect()
    stats = served.stats()
    assert balanced(stats)
    for number in list(served._loop.requests):  # `submit` was interrupted after it had the id
        served.abort(number)
    served.step()


def test_a_callback_of_submit_is_called_by_the_engines_thread_and_one_of_generate_by_the_callers(served):
    seen = []
    served.submit([3], SHORT, on_delta=lambda delta: seen.append(threading.current_thread().name))
    while served.has_work:
        served.step()
    assert set(seen) == {"ling3-engine"}
    seen.clear()
    served.generate([[3]], SHORT, on_delta=lambda delta: seen.append(threading.current_thread().name))
    assert set(seen) == {threading.current_thread().name}


def test_what_a_callback_raises_reaches_those_who_wait_for_deltas(served):
    """No step is under way that could raise it."""

    def exits(delta):
        raise SystemExit

    served.submit(PROMPTS[0], SHORT, on_delta=exits)
    with pytest.raises(SystemExit):
        served.generate(PROMPTS[1:2], LONG)
    while served.has_work:
        with contextlib.suppress(SystemExit):
            served.step()


# The end


def test_an_engine_that_is_dropped_ends_its_thread(alone):
    before = threads()
    left = scripted()
    (mine,) = threads() - before
    stream = left.stream_all(PROMPTS, LONG)
    next(stream)
    left.submit([3], LONG)
    gone = weakref.ref(left)
    del stream, left
    mine.join(5)
    assert gone() is None
    assert threads() == before


def test_the_default_device_of_the_constructor_holds():
    with jax.default_device(jax.devices()[1]), jax.default_matmul_precision("highest"):
        other = scripted()
    seen = other._actor.call(lambda _: (jax.config.jax_default_device, jax.config.jax_default_matmul_precision))
    assert seen == (jax.devices()[1], "highest")
    assert jax.config.jax_default_device is None


EXIT = """
import atexit, sys, threading, time
sys.path.insert(0, {tests!r})
from small_engine import engine
from ling3 import SamplingParams

def begin(work):
    threading.Thread(target=work, daemon=True).start()

served, params = engine(), SamplingParams(max_tokens=200, ignore_eos=True)
stream = served.stream([3], params)
next(stream)
served.submit([4], params)
begin(lambda: [served.generate([[5]] * 3, params) for _ in range(10**6)])
begin(lambda: [served.step() for _ in range(10**6)])
atexit.register(lambda: served.generate([[6]], SamplingParams(max_tokens=2)))
time.sleep(0.1)
print("end")
"""


@pytest.mark.slow
def test_a_process_ends_with_work_under_way():
    """At once, with status 0 and no message."""
    code = EXIT.format(tests=str(pathlib.Path(__file__).parents[1] / "support"))
    programs = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    environment = os.environ | programs | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
