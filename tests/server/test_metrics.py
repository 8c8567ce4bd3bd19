"""`/metrics`: counts are exact, labels are the server's own, and gauges are zero when idle."""

import asyncio
import contextlib

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import ling3
from ling3.server.app import build
from ling3.server.service import Service

PATH = "/v1/completions"
ASKED = {"model": "nano", "prompt": list(range(20, 60)), "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained(
        "nano", max_running_requests=2, max_model_len=256, page_size=16, chunked_prefill_size=16
    )


async def scraped(client):
    """The value of each sample."""
    answer = await client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    families = list(text_string_to_metric_families(answer.text))
    assert all(family.name.startswith(("ling3_", "process_")) and family.documentation for family in families)
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value for family in families for sample in family.samples
    }


@contextlib.asynccontextmanager
async def serving(engine):
    service = Service(engine, engine.tokenizer, "nano")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build(service)), base_url="http://test") as client:
        yield client


def test_counts_are_exact(engine):
    async def counted():
        async with serving(engine) as client:
            before = await scraped(client)
            whole = [(await client.post(PATH, json=ASKED)).json()["usage"] for _ in range(2)]
            streams = {**ASKED, "prompt": "abc", "n": 2, "max_tokens": 3, "stream": True}
            assert (await client.post(PATH, json=streams)).status_code == 200
            for _ in range(3):
                await client.post(PATH, json={**ASKED, "max_tokens": -1})
            return before, await scraped(client), whole

    before, after, whole = asyncio.run(counted())
    text = len(engine.tokenizer.encode("abc"))
    new = lambda name, **labels: after[(name, *sorted(labels.items()))] - before.get((name, *sorted(labels.items())), 0)  # noqa: E731
    assert new("ling3_prompt_tokens_total") == 2 * len(ASKED["prompt"]) + 2 * text
    assert new("ling3_generation_tokens_total") == 2 * 8 + 2 * 3
    hits = [usage["prompt_tokens_details"]["cached_tokens"] for usage in whole]
    assert new("ling3_prefix_cache_hits_total") == sum(hits) and hits[1] > hits[0] == 0
    assert new("ling3_request_success_total", finished_reason="length") == 4
    assert new("ling3_http_requests_total", path=PATH, status="200") == 3
    assert new("ling3_http_requests_total", path=PATH, status="400") == 3
    times = ("request_queue_time", "time_to_first_token", "time_per_output_token", "e2e_request_latency")
    assert all(new(f"ling3_{name}_seconds_count") == 4 for name in times)
    assert new("ling3_time_to_first_token_seconds_sum") <= new("ling3_e2e_request_latency_seconds_sum")
    idle = [
        value
        for (name, *_), value in after.items()
        if name in ("ling3_num_requests_running", "ling3_num_requests_waiting")
    ]
    assert idle == [0, 0] and after["ling3_kv_cache_usage_perc",] == 0


def test_running_and_waiting_are_told_while_they_are(engine):
    async def watched():
        async with serving(engine) as client:
            many = asyncio.gather(*(client.post(PATH, json={**ASKED, "max_tokens": 200}) for _ in range(6)))
            seen = []
            while not many.done():
                now = await scraped(client)
                names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
                seen.append(tuple(now[f"ling3_{name}",] for name in names))
            await many
            return seen

    seen = asyncio.run(watched())
    assert (2, 4) in {(running, waiting) for running, waiting, _ in seen} and max(seen)[0] == 2
    assert 0 < max(used for _, _, used in seen) <= 1


def test_labels_are_the_servers_own(engine):
    async def labelled():
        async with serving(engine) as client:
            sizes = []
            for turn in range(2):
                for i in range(20 * turn, 20 * turn + 20):
                    await client.get(f"/path-{i}")
                    await client.get(f"/v1/models/{i}")
                    await client.request(f"METHOD{i}", PATH)
                    body = {**ASKED, "model": str(i), "user": str(i)}
                    await client.post(PATH, json=body, headers={"x-request-id": str(i)})
                sizes.append((await scraped(client)).keys())
            return sizes

    first, second = asyncio.run(labelled())
    assert first <= second and {key for key in second - first if ("path", "/metrics") not in key} == set()


def test_preemptions_are_counted():
    engine = ling3.Engine.from_pretrained("nano", max_running_requests=2, max_model_len=128, page_size=16, num_pages=9)

    async def crowded():
        async with serving(engine) as client:
            asks = ({**ASKED, "prompt": list(range(20 + i, 60 + i)), "max_tokens": 60} for i in range(2))
            await asyncio.gather(*(client.post(PATH, json=each) for each in asks))
            return await scraped(client)

    counts = asyncio.run(crowded())
    assert counts["ling3_num_preemptions_total",] == engine.stats().preemptions > 0
