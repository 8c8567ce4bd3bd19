"""No body holds the server, whatever its kind: /health answers, and time, memory and the end stay bounded."""

import asyncio
import concurrent.futures
import pathlib
import signal
import threading
import time

import heavy_bodies
import http_server
import httpx
import pytest

from ling3.server import body, limits
from ling3.server.app import POSTS
from ling3.server.errors import ApiError
from ling3.server.fields import Chat, Completion
from ling3.server.scores import Scores
from ling3.server.tokens import Detokenize

JSON = {"Content-Type": "application/json"}
MOST_MEBIBYTES = 1024
"""How much larger the process may become: a text of a million characters takes some 300 MiB on each thread."""
COPIES = 3
TOGETHER = (
    "a string without end",
    "wrong values",
    "unknown fields",
    "ids",
    "a long text",
    "messages",
    "items",
    "biases",
    "a text to tokenize",
    "ids to detokenize",
)


def mebibytes(server, what="VmRSS"):
    lines = pathlib.Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith(what))


@pytest.fixture(scope="module")
def server():
    with http_server.process("--timeout", "60") as started:
        yield started


@pytest.fixture(scope="module")
def idle(server):
    """The memory of a server that has answered something."""
    asked = {"model": "nano", "messages": heavy_bodies.QUESTION, "max_tokens": 4}
    assert httpx.post(server.url + heavy_bodies.CHAT, json=asked, timeout=60).status_code == 200
    return mebibytes(server)


def post(server, path, content):
    return httpx.post(server.url + path, content=content, headers=JSON, timeout=100).status_code


def slowest(server, jobs):
    """The longest time that /health took while the jobs ran."""
    seconds = [0.0]
    while not all(job.done() for job in jobs):
        begin = time.perf_counter()
        assert httpx.get(f"{server.url}/health", timeout=20).json() == {"status": "ok"}
        seconds.append(time.perf_counter() - begin)
        time.sleep(0.02)
    return max(seconds)


@pytest.mark.parametrize("kind", heavy_bodies.BODIES)
def test_no_body_holds_the_server(server, idle, kind):
    path, content = heavy_bodies.BODIES[kind]()
    with concurrent.futures.ThreadPoolExecutor(COPIES) as pool:
        jobs = [pool.submit(post, server, path, content) for _ in range(COPIES)]
        assert slowest(server, jobs) < 2
    assert {job.result() for job in jobs} <= {200, 400, 413, 429}
    assert mebibytes(server, "VmHWM") - idle < MOST_MEBIBYTES


def test_ten_kinds_at_once_hold_neither_the_timeout_nor_the_end():
    """A body that does not come is given up in time, and the drain ends in time, amid ten kinds of bodies."""
    made = [heavy_bodies.BODIES[kind]() for kind in TOGETHER]
    with http_server.process("--timeout", "4") as server, concurrent.futures.ThreadPoolExecutor(len(made) + 1) as pool:
        jobs = [pool.submit(post, server, path, content) for path, content in made]

        def slow():
            yield b"{"
            time.sleep(6)

        begin = time.monotonic()
        late = pool.submit(post, server, heavy_bodies.CHAT, slow())
        assert slowest(server, jobs) < 2
        assert {job.result() for job in jobs} <= {200, 400, 408, 413, 429, 504}
        assert late.result() == 408 and time.monotonic() - begin < 9
        again = [pool.submit(post, server, path, content) for path, content in made]
        time.sleep(0.3)
        server.signal(signal.SIGTERM)
        assert server.ended(15) == 0 and "Traceback" not in "\n".join(server.lines)
        concurrent.futures.wait(again)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'"' * 2**20, "strings"),
        (b'["' + b"a" * (limits.LONGEST_STRING + 1) + b'"]', "string of more"),
        (b"[" + b"[]," * limits.MOST_LISTS + b"1]", "lists"),
        (b"[" + b"1," * limits.MOST_VALUES + b"1]", "values"),
        (b"[" * 65 + b"]" * 65, "levels"),
        (b'{"a":[' * 33 + b"1" + b"]}" * 33, "levels"),
        (b'["' + b'\\"' * 2**23, "Unterminated"),
        (b'["' + b"\\" * 2**22, "no valid JSON"),
    ],
)
def test_what_is_beyond_the_limits_is_refused(content, said):
    with pytest.raises(ApiError, match=said) as refused:
        body.parse(content)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 64 + b"]" * 64,
        b'["[[[[' + b"[" * 2**20 + b'"]',
        b'["\\"' + b"[" * 99 + b'\\\\"]',
        b'["' + b",{" * 2**20 + b'"]',
        b"[" + b"1," * (limits.MOST_VALUES - 1) + b"1]",
    ],
)
def test_what_is_within_the_limits_is_parsed(content):
    assert isinstance(body.parse(content), list)


@pytest.mark.parametrize(
    ("model", "value"),
    [
        (Completion, {"model": "nano", "prompt": [{}] * 2**16}),
        (Completion, {"model": "nano", "prompt": [[1]] * 2**10 + [["a"] * 2**20]}),
        (Chat, {"model": "nano", "messages": [1] * 2**20}),
        (Detokenize, {"tokens": [-1] * 2**20}),
    ],
)
def test_a_list_is_checked_up_to_its_first_wrong_item(model, value):
    with pytest.raises(ValueError, match="validation error") as error:
        model.model_validate(value)
    assert error.value.error_count() <= 4


def lists(schema):
    """The schemas of lists inside pydantic's schema of a model."""
    if isinstance(schema, dict) and schema.get("type") == "list":
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from lists(inner)


@pytest.mark.parametrize("path", POSTS)
def test_every_list_of_a_body_is_one_that_is_checked_so(path):
    found = list(lists(POSTS[path].model.__pydantic_core_schema__))
    assert found and all(each.get("fail_fast") for each in found)


def test_scoring_many_prompts_does_not_hold_the_event_loop(nano, nano_app, monkeypatch):
    """Each prompt's scores are made on another thread, as those of 128 long ones take many seconds."""
    threads = set()
    scored = Scores.of_prompt

    def of_prompt(self, *scores):
        threads.add(threading.current_thread())
        return scored(self, *scores)

    monkeypatch.setattr(Scores, "of_prompt", of_prompt)
    asked = {"model": "nano", "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 0, "echo": True, "logprobs": 1}

    async def ask():
        transport = httpx.ASGITransport(nano_app(nano))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            for stream in (False, True):
                answer = await client.post("/v1/completions", json={**asked, "stream": stream})
                assert answer.status_code == 200

    asyncio.run(ask())
    assert threads and threading.main_thread() not in threads
