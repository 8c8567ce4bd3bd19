"""Many readers at once: asyncio streams, threads, and an engine that fails under them."""

import asyncio
import concurrent.futures
import gc
import logging
import threading
import time

import pytest
from scripted_runner import scripted
from small_engine import LONG, PROMPTS, SHORT, Fault, answer, balanced, idle

from ling3 import QueueFull, SamplingParams


@pytest.fixture(scope="module")
def shared():
    return scripted(pace=0.0005)


@pytest.fixture(autouse=True)
def quiet(caplog):
    """asyncio logs no warning, neither in a test nor after it, when `served` collects what is left."""
    yield
    records = caplog.get_records("call") + caplog.get_records("teardown")
    assert [record for record in records if record.levelno >= logging.WARNING] == []


def alone(served, prompts, params):
    return [answer(output.outputs[0]) for prompt in prompts for output in served.generate([prompt], params)]


async def read(served, prompt, params):
    """All deltas of a stream; what they add up to has to be its output."""
    deltas = [delta async for delta in served.astream(prompt, params)]
    output = deltas[-1].output
    assert [delta.output is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    for completion in output.outputs:
        mine = [delta for delta in deltas if delta.index == completion.index]
        assert [token for delta in mine for token in delta.token_ids] == list(completion.token_ids)
        assert "".join(delta.text for delta in mine) == completion.text
    return output


async def freed(served):
    """Waits until nothing runs."""
    for _ in range(500):
        stats = served.stats()
        assert balanced(stats)
        if (stats.running, stats.waiting) == (0, 0):
            return
        await asyncio.sleep(0.01)
    pytest.fail("requests without a reader are still running")


def test_many_streams_at_once(served):
    """As many as there are slots and more; each is what it is alone."""
    expected = alone(served, PROMPTS * 2, LONG)

    async def main():
        return await asyncio.gather(*(read(served, prompt, LONG) for prompt in PROMPTS * 2))

    outputs = asyncio.run(main())
    assert [answer(output.outputs[0]) for output in outputs] == expected


def test_many_requests_in_one_stream(served):
    expected = alone(served, PROMPTS, LONG)

    async def main():
        items = [item async for item in served.astream_all(PROMPTS, LONG)]
        with pytest.raises(ValueError, match="text 1, token 0 is 400"):
            await anext(served.astream_all([[3], [400]], LONG, name="text {}"))
        return items

    items = asyncio.run(main())
    outputs = {i: delta.output for i, delta in items if delta.output is not None}
    assert [answer(outputs[i].outputs[0]) for i in range(len(PROMPTS))] == expected
    for i, output in outputs.items():
        assert [token for j, delta in items if j == i for token in delta.token_ids] == list(output.token_ids)


def test_without_room_for_one_request_none_is_answered():
    narrow = scripted(max_queue=2)

    async def main():
        with pytest.raises(QueueFull):
            await anext(narrow.astream_all([[3]] * 3, LONG))
        await freed(narrow)
        assert narrow.stats().finished["abort"] == narrow.stats().submitted == 2
        return [item async for item in narrow.astream_all([[3]] * 2, SHORT)]

    assert len([delta for _, delta in asyncio.run(main()) if delta.output is not None]) == 2
    assert idle(narrow)


def test_several_completions_in_one_stream(served):
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=5, ignore_eos=True)
    (expected,) = served.generate([PROMPTS[0]], params)
    output = asyncio.run(read(served, PROMPTS[0], params))
    assert [answer(c) for c in output.outputs] == [answer(c) for c in expected.outputs]


def test_leaving_a_stream_aborts_it_and_no_other(served):
    (expected,) = alone(served, [PROMPTS[1]], LONG)

    async def main():
        other = asyncio.create_task(read(served, PROMPTS[1], LONG))
        before = served.stats().finished["abort"]
        async for _ in served.astream(PROMPTS[0], LONG):
            break
        stream = served.astream(PROMPTS[2], LONG)
        await anext(stream)
        await stream.aclose()
        gc.collect()
        output = await other
        await freed(served)
        assert served.stats().finished["abort"] == before + 2
        return output

    assert answer(asyncio.run(main()).outputs[0]) == expected


def test_a_stream_that_was_never_begun_costs_nothing(served):
    before = served.stats()

    async def main():
        stream = served.astream(PROMPTS[0], LONG)
        await stream.aclose()

    asyncio.run(main())
    assert served.stats() == before


@pytest.mark.parametrize("delay", [0.0, 0.0001, 0.002, 0.01])
def test_cancelling_a_reader_frees_its_slot(served, delay):
    """At whatever it waits for: the queue, its first delta, the next."""
    (expected,) = alone(served, [PROMPTS[1]], SHORT)

    async def main():
        tasks = [asyncio.create_task(read(served, prompt, LONG)) for prompt in PROMPTS]
        await asyncio.sleep(delay)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await freed(served)
        return await read(served, PROMPTS[1], SHORT)

    assert answer(asyncio.run(main()).outputs[0]) == expected


def test_a_reader_may_leave_before_it_is_in_the_queue(served):
    """The engine's thread is busy, so that its request waits to be queued; it is aborted as soon as it is."""
    busy, done = threading.Event(), threading.Event()
    before = served.stats()

    def keep_busy(_):
        busy.set()
        done.wait(10)

    async def main():
        served._actor.last_message(keep_busy)()
        busy.wait(10)
        reader = asyncio.create_task(read(served, PROMPTS[0], LONG))
        await asyncio.sleep(0.05)
        reader.cancel()
        await asyncio.wait([reader])
        done.set()

    asyncio.run(main())
    after = served.stats()
    assert after.finished["abort"] == before.finished["abort"] + 1
    assert (after.running, after.waiting, after.steps) == (0, 0, before.steps)


def test_a_timeout_is_a_cancellation(served):
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                while True:
                    await read(served, PROMPTS[1], LONG)
        await freed(served)

    asyncio.run(main())


def test_a_loop_that_ends_amid_streams_leaves_the_engine_well(served):
    """`asyncio.run` cancels what is left; nothing of it runs on, nor waits in the engine."""
    (expected,) = alone(served, [PROMPTS[0]], SHORT)

    async def main():
        tasks = [asyncio.create_task(read(served, prompt, LONG)) for prompt in PROMPTS]
        await asyncio.sleep(0.01)
        return tasks

    asyncio.run(main())
    served.step()
    stats = served.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert answer(asyncio.run(read(served, PROMPTS[0], SHORT)).outputs[0]) == expected


def test_one_event_loop_after_the_other_and_two_at_once(served):
    expected = alone(served, PROMPTS, SHORT)

    async def main():
        return await asyncio.gather(*(read(served, prompt, SHORT) for prompt in PROMPTS))

    for _ in range(2):
        assert [answer(output.outputs[0]) for output in asyncio.run(main())] == expected
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        for future in [threads.submit(lambda: asyncio.run(main())) for _ in range(2)]:
            assert [answer(output.outputs[0]) for output in future.result()] == expected


@pytest.mark.parametrize("where", ["extend", "decode"])
def test_a_fault_reaches_every_reader(served, monkeypatch, where):
    """Each sees its request end in `error`, and then the fault itself; new requests are answered."""
    (expected,) = alone(served, [PROMPTS[0]], SHORT)
    runner, begun, waiting = served._loop.runner, threading.Event(), threading.Event()
    decode = runner.decode

    def broken(*_):
        raise Fault("out of memory")

    def held(*arguments):
        """Decodes once the last readers wait; until then nothing can end."""
        begun.set()
        assert waiting.wait(60)
        return decode(*arguments) if where == "extend" else broken()

    async def reading(prompt):
        last = None
        with pytest.raises(Fault, match="out of memory"):
            async for delta in served.astream(prompt, LONG):
                last = delta
        assert last.finish_reason == "error"
        assert "the engine failed: Fault('out of memory')" in last.output.error

    async def main():
        with monkeypatch.context() as patch:
            patch.setattr(runner, "decode", held)
            readers = [asyncio.create_task(reading(prompt)) for prompt in PROMPTS[:3]]
            assert await asyncio.to_thread(begun.wait, 60)
            if where == "extend":
                patch.setattr(runner, "extend", broken)
            readers += [asyncio.create_task(reading(prompt)) for prompt in PROMPTS[3:]]
            await asyncio.sleep(0)  # each submits its request
            waiting.set()
            await asyncio.gather(*readers)
        return await read(served, PROMPTS[0], SHORT)

    assert answer(asyncio.run(main()).outputs[0]) == expected


def test_bad_requests_are_told_to_who_asks(served):
    async def main():
        for prompt, params, message in (
            ([], SHORT, "prompt is empty"),
            ([400], SHORT, "token 0 is 400"),
            ([3] * 250, LONG, "350 together"),
        ):
            with pytest.raises(ValueError, match=message):
                await anext(served.astream(prompt, params))
        narrow = scripted(max_queue=1)
        narrow.submit([3], SHORT)
        with pytest.raises(QueueFull):
            await anext(narrow.astream([3], SHORT))
        (first,) = [
            delta.output for delta in narrow.step() + narrow.step() + narrow.step() + narrow.step() if delta.output
        ]
        assert first.finish_reason == "length"
        assert idle(narrow)

    asyncio.run(main())


def test_an_engine_can_be_driven_by_several_hands(served):
    """`generate` and `submit` amid streams: each gets its own."""
    expected = alone(served, PROMPTS, LONG)

    async def main():
        readers = [asyncio.create_task(read(served, prompt, LONG)) for prompt in PROMPTS[:3]]
        await asyncio.sleep(0.005)
        told = []
        served.submit(PROMPTS[5], LONG, on_delta=told.append)
        middle = await asyncio.to_thread(served.generate, PROMPTS[3:4], LONG)
        last = served.generate(PROMPTS[4:5], LONG)
        outputs = [*await asyncio.gather(*readers), *middle, *last]
        while not (told and told[-1].output):
            await asyncio.sleep(0.005)
        return [*outputs, told[-1].output]

    assert [answer(output.outputs[0]) for output in asyncio.run(main())] == expected


@pytest.mark.slow
def test_the_event_loop_stays_awake_while_a_step_is_slow(served, monkeypatch):
    """Though new streams begin and others are left meanwhile, and the engine's thread is busy."""
    decode, slow = served._loop.runner.decode, 0.4

    def sleeping(batch, rows, sequences):
        time.sleep(slow)
        return decode(batch, rows, sequences)

    monkeypatch.setattr(served._loop.runner, "decode", sleeping)
    gaps = []

    async def ticking():
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    async def leaving():
        async for _ in served.astream(PROMPTS[0], SHORT):
            break

    async def main():
        ticker = asyncio.create_task(ticking())
        readers = [asyncio.create_task(read(served, PROMPTS[0], SHORT))]
        for _ in range(4):
            await asyncio.sleep(0.06)
            readers.append(asyncio.create_task(leaving()))
        await asyncio.gather(*readers)
        ticker.cancel()
        await freed(served)

    asyncio.run(main())
    assert len(gaps) > 20
    # Far under one slow step, and far over what the operating system may take.
    assert max(gaps) < 0.75 * slow


def test_threads_stream_and_submit_at_once(served):
    """Eight threads, each with streams, batches and aborts of its own."""
    expected = alone(served, PROMPTS, SHORT)
    begin = threading.Barrier(8)

    def work(which):
        begin.wait()
        for turn in range(6):
            i = (which + turn) % len(PROMPTS)
            if which % 3 == 0:
                ends = [delta.output for delta in served.stream(PROMPTS[i], SHORT) if delta.output]
            elif which % 3 == 1:
                ends = served.generate([PROMPTS[i]], SHORT)
            else:
                doomed = served.submit(PROMPTS[0], LONG, on_delta=lambda delta: None)
                told = []
                served.submit(PROMPTS[i], SHORT, on_delta=told.append)
                served.abort(doomed)
                while not (told and told[-1].output):
                    served.step()
                ends = [told[-1].output]
            assert len(ends) == 1
            assert answer(ends[0].outputs[0]) == expected[i]
            assert balanced(served.stats())
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))


def test_a_fault_reaches_every_thread(served, monkeypatch):
    """Who moves the loop raises it, and who waits beside does too."""
    begin, raised = threading.Barrier(5), []

    def work(which):
        begin.wait()
        try:
            if which % 2:
                list(served.stream(PROMPTS[1], LONG))
            else:
                served.generate(PROMPTS[1:3], LONG)
        except Fault as fault:
            raised.append(fault)

    decode, count = served._loop.runner.decode, []

    def breaking(batch, rows, sequences):
        count.append(len(sequences))
        if len(count) > 5:
            raise Fault("gone")
        return decode(batch, rows, sequences)

    with monkeypatch.context() as patch:
        patch.setattr(served._loop.runner, "decode", breaking)
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            working = [threads.submit(work, which) for which in range(4)]
            begin.wait()
            concurrent.futures.wait(working)
    assert len(raised) == 4
    assert len(served.generate(PROMPTS, SHORT)) == len(PROMPTS)
