"""Many clients at once, some of whom leave or send nonsense: the answers are solo runs', and nothing is left behind."""

import asyncio
import json

import httpx
import pytest

import ling3
from benchmarks.server_soak import soak

REQUESTS = 200
STREAMS = 500


def test_a_run_of_the_server_leaks_nothing():
    """The whole, with 2,000 requests, is `python -m benchmarks.server_soak`."""
    found = soak(REQUESTS, minutes=0)
    assert found.differences == []
    # Memory of so short a run still grows by what is compiled and cached on the way.
    assert [leak for leak in found.leaks if " bytes, " not in leak] == []
    assert sum(found.requests.values()) == REQUESTS and found.compared > 0.8 * REQUESTS
    assert found.requests["cancelled"] > 0.04 * REQUESTS and found.requests["malformed"] > 0.04 * REQUESTS


@pytest.mark.parametrize("slots", [500, 4])
def test_five_hundred_streams_are_open_at_once(nano, nano_app, serving, slots):
    """All are under way before the first ends; with four slots, they wait without a byte."""
    engine = ling3.Engine(
        nano.loop.runner.model, nano.tokenizer, max_running_requests=slots, max_model_len=64, page_size=16
    )
    tokens = 40 if slots == STREAMS else 4
    expected = nano.generate([[5, 6, 7]], ling3.SamplingParams(max_tokens=tokens, ignore_eos=True))[0].text
    asked = {"model": "nano", "prompt": [5, 6, 7], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    begun, most = 0, 0

    async def stream(client):
        nonlocal begun, most
        async with client.stream("POST", "completions", json={**asked, "stream": True}) as answer:
            begun += 1
            most = max(most, begun)
            lines = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: {")]
            begun -= 1
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines)

    async def all_of_them(url):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"{url}/v1/", limits=limits, timeout=120) as client:
            return await asyncio.gather(*(stream(client) for _ in range(STREAMS)))

    with serving(nano_app(engine)) as url:
        assert asyncio.run(all_of_them(url)) == [expected] * STREAMS
    assert slots < STREAMS or most == STREAMS
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_slots) == (0, 0, slots)
