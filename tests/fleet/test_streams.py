"""Replicas that stream, over scripted engines in threads: the same answers, whatever dies."""

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import small_engine
from scripted_runner import scripted

import ling3
from ling3.engine.requests import QueueFull
from ling3.fleet import replicas as fleet
from ling3.fleet.replica import Card
from ling3.fleet.replicas import Replicas
from ling3.fleet.work import FleetError
from ling3.fleet.worker import Worker

PROMPTS = [[7, 8, 9], [5] * 40, [11], list(range(20, 65)), [12, 14]]
PARAMS = ling3.SamplingParams(max_tokens=12, ignore_eos=True, temperature=1.0, seed=3, n=2)
LONG = ling3.SamplingParams(max_tokens=200, ignore_eos=True)
PLAN = SimpleNamespace(replicas=2, adapters={})


class Thread:
    """A replica in a thread, in the place of a process; `engine` is an engine, an error of loading, or None to die."""

    def __init__(self, engine, facts):
        self.pipe, self._theirs = multiprocessing.get_context("spawn").Pipe()
        self.pid, self.engine = 0, engine
        if engine is None:
            self.kill()
        elif isinstance(engine, Exception):
            self._theirs.send(engine)
        else:
            self._theirs.send(Card(engine.settings, engine.intake.portable(), facts))
            threading.Thread(target=Worker(engine, self._theirs).run, daemon=True).start()

    def kill(self):
        """Ends both directions at once, as the death of a process does."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._theirs.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def join(self, timeout=None):
        pass


@dataclasses.dataclass
class Launcher:
    """Starts what the test has written down, then scripted engines."""

    script: list = dataclasses.field(default_factory=list)
    facts: dict = dataclasses.field(default_factory=dict)
    pace: float = 0.0
    changes: dict = dataclasses.field(default_factory=dict)
    started: list = dataclasses.field(default_factory=list)

    def __call__(self, plan, number):
        engine = self.script.pop(0) if self.script else scripted(pace=self.pace, **self.changes)
        self.started.append(Thread(engine, {"weights": self.facts.get(len(self.started), "same")}))
        return self.started[-1], self.started[-1].pipe


def serving(replicas=2, **how):
    """Replicas over threads, and what starts them."""
    launcher = Launcher(**how)
    plan = SimpleNamespace(replicas=replicas, adapters={})
    return contextlib.closing(Replicas(plan, small_engine.tokenizer(), start=launcher)), launcher


async def answers(served, prompts, params):
    """The outputs, in the prompts' order, and the tokens of the deltas."""
    outputs, tokens = {}, {}
    async with contextlib.aclosing(served.astream_all(prompts, params)) as deltas:
        async for i, delta in deltas:
            tokens.setdefault((i, delta.index), []).extend(delta.token_ids)
            if delta.output is not None:
                outputs[i] = delta.output
    assert tokens == {(i, c.index): list(c.token_ids) for i, output in outputs.items() for c in output.outputs}
    return [[small_engine.answer(completion) for completion in outputs[i].outputs] for i in range(len(prompts))]


async def eventually(true, seconds=10.0):
    end = time.monotonic() + seconds
    while not (true() if not asyncio.iscoroutinefunction(true) else await true()):
        assert time.monotonic() < end
        await asyncio.sleep(0.01)


def test_the_answers_are_those_of_one_engine():
    served, launcher = serving()
    expected = [
        [small_engine.answer(completion) for completion in output.outputs]
        for output in scripted().generate(PROMPTS, PARAMS)
    ]
    with served as replicas:
        assert replicas.left(3) == launcher.started[0].engine.left(3)

        async def ask():
            several = await asyncio.gather(*(answers(replicas, PROMPTS, PARAMS) for _ in range(4)))
            return several, await replicas.astats()

        several, stats = asyncio.run(ask())
    assert several == [expected] * 4
    assert stats.finished["length"] == sum(each.engine.stats().finished["length"] for each in launcher.started) == 40
    assert all(each.engine.stats().finished["length"] for each in launcher.started), "both have answered"


def test_a_seed_that_is_drawn_is_the_same_on_every_replica():
    served, _ = serving()
    with served as replicas:

        async def one():
            params = dataclasses.replace(PARAMS, seed=None, n=1)
            return [delta async for _, delta in replicas.astream_all([[7]], params)][-1].output.outputs[0]

        completion = asyncio.run(one())
    again = scripted().generate([[7]], dataclasses.replace(PARAMS, seed=completion.seed, n=1))[0]
    assert list(again.token_ids) == list(completion.token_ids)


def test_what_can_never_be_answered_is_refused_as_an_engine_does():
    served, launcher = serving()
    engine = scripted()
    bad = [([[400]], None), ([[7], []], None), ([[7]], ling3.SamplingParams(max_tokens=10**6))]
    bad.append(([[7]], ling3.SamplingParams(structured=ling3.Regex("("))))
    with served as replicas:
        for prompts, params in bad:

            async def refused(of, prompts=prompts, params=params):
                with pytest.raises(ValueError) as raised:
                    await anext(of.astream_all(prompts, params, name="text {}"))
                return str(raised.value)

            assert asyncio.run(refused(replicas)) == asyncio.run(refused(engine))
    assert not any(each.engine.stats().submitted for each in launcher.started)


def test_a_grammar_is_followed_beside_other_requests():
    served, _ = serving(replicas=1)
    one_of = ling3.SamplingParams(structured=ling3.Choice(["ab", "cd"]), max_tokens=8)
    expected = scripted().generate([[7]], one_of)[0].text
    with served as replicas:

        async def both():
            first = asyncio.create_task(answers(replicas, PROMPTS, PARAMS))
            text = "".join([delta.text async for _, delta in replicas.astream_all([[7]], one_of)])
            return text, await first

        text, others = asyncio.run(both())
    assert text == expected and len(others) == len(PROMPTS)


def test_leaving_ends_requests_and_a_full_queue_refuses_more():
    served, launcher = serving(changes={"max_queue": 3}, pace=0.002)
    with served as replicas:

        async def leave():
            streams = [replicas.astream_all([[7]] * 3, LONG) for _ in range(2)]
            for stream in streams:
                await anext(stream)
            with pytest.raises(QueueFull, match="6 completions are unfinished, and each of 2 replicas takes 3"):
                await anext(replicas.astream_all([[8]], LONG))
            for stream in streams:
                await stream.aclose()

            async def idle():
                stats = await replicas.astats()
                return stats.running + stats.waiting == 0

            await eventually(idle)
            assert (await replicas.astats()).finished["abort"] == 6
            return await answers(replicas, [[8]], PARAMS)

        assert asyncio.run(leave())
    assert {each.engine.stats().finished["abort"] for each in launcher.started} == {3}


def test_a_death_ends_what_has_begun_and_moves_the_rest():
    """Two requests on each replica, of one slot: one has begun, and the other waits."""
    slot = {"max_running_requests": 1, "decode_rows": 1}
    served, launcher = serving(changes=slot, pace=0.002)
    expected = [small_engine.answer(scripted(**slot).generate([[9]], LONG)[0].outputs[0])]
    with served as replicas:

        async def die():
            begun = [replicas.astream_all([[7]], LONG) for _ in range(2)]
            for stream in begun:
                await anext(stream)
            waiting = [asyncio.create_task(answers(replicas, [[9]], LONG)) for _ in range(2)]
            await asyncio.sleep(0.05)
            before = await replicas.astats()
            launcher.started[0].kill()
            await eventually(lambda: replicas.condition() == {"replicas": {"ready": 2, "of": 2}})
            await eventually(lambda: len(launcher.started) == 3)
            assert [delta async for _, delta in begun[0]][-1].finish_reason == "error"
            assert [delta async for _, delta in begun[1]][-1].finish_reason == "length"
            assert [await each for each in waiting] == [[expected]] * 2
            after = await replicas.astats()
            assert after.output_tokens > before.output_tokens and after.slots == 2
            return await answers(replicas, [[9]], LONG)

        assert asyncio.run(die()) == [expected]


def test_requests_wait_for_the_only_replica_and_one_that_kills_is_given_up():
    served, launcher = serving(replicas=1, pace=0.002, changes={"max_running_requests": 1, "decode_rows": 1})
    with served as replicas:

        async def die():
            begun = replicas.astream_all([[7]], LONG)
            await anext(begun)
            waiting = asyncio.create_task(anext(replicas.astream_all([[9]], LONG)))
            await asyncio.sleep(0.05)
            launcher.script.append(scripted(pace=100.0))  # it answers nothing
            launcher.started[0].kill()
            assert [delta async for _, delta in begun][-1].finish_reason == "error"
            await eventually(lambda: len(launcher.started) == 2 and replicas.alive)
            await asyncio.sleep(0.05)
            launcher.started[1].kill()
            _, delta = await waiting
            return delta.finish_reason

        assert asyncio.run(die()) == "error"


def test_replicas_that_cannot_start(monkeypatch):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        serving(script=[scripted(), FileNotFoundError("nowhere")])
    with pytest.raises(FleetError, match=r"replica 1 \(process 0\) died while it loaded the model"):
        serving(script=[scripted(), None])
    with pytest.raises(FleetError, match=r"differs from the first \(weights: 'other', there 'same'\)"):
        serving(facts={1: "other"})


@pytest.mark.parametrize("next_ones", [[None, None], [FileNotFoundError("nowhere")]])
def test_a_replica_that_cannot_start_again_is_left_out(next_ones, monkeypatch, caplog):
    monkeypatch.setattr(fleet, "MOST_LOSSES", 3)
    served, launcher = serving()
    with served as replicas:

        async def die():
            await answers(replicas, [[7]], PARAMS)
            launcher.script[:] = next_ones
            launcher.started[0].kill()
            await eventually(lambda: "is left out" in caplog.text)
            assert replicas.alive and replicas.condition() == {"replicas": {"ready": 1, "of": 2}}
            await answers(replicas, [[7]], PARAMS)
            stream = replicas.astream_all([[9]], dataclasses.replace(LONG, max_tokens=20))
            launcher.script[:] = next_ones
            launcher.started[1].kill()
            with pytest.raises((FleetError, FileNotFoundError)):
                await anext(stream)
            assert not replicas.alive

        asyncio.run(die())
