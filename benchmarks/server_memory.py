"""The resident memory of a server over many mixed requests: it is flat once bounded caches are full.

    python -m benchmarks.server_memory --requests 10000

`ling3 serve nano` is a process of its own, and its resident memory is read from `/metrics`. Clients send chats and
completions in every protocol, streamed or not, with grammars, penalties, log-probabilities, documents that are longer
than a prefill call, malformed requests, and streams that the client leaves. The server has few pages, so that its
prefix cache is full before the first mark: until then, each new document adds a snapshot of its recurrent states. So is
the tokenizer's cache of 10,000 words.
"""

import asyncio
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tyro

from benchmarks import record, serving
from benchmarks.server_soak import BROKEN, CLIENTS

PAGES = 64
"""Pages of the server: its prefix cache keeps at most 32 documents."""
FIRST = 0.2
"""The share of requests before the first mark, which fill caches."""
WORDS = 12
"""New words in a text, each of which the tokenizer's cache keeps."""
MARKS = 20
"""Measurements of memory, evenly spread over the requests."""
GROWTH = 0.005
"""The share by which memory may grow after the first mark."""
KINDS = ("chat", "completion", "penalties", "logprobs", "document", "grammar", "responses", "messages")
KINDS += ("left", "broken")
PATHS = {"chat": "chat/completions", "grammar": "chat/completions", "responses": "responses", "messages": "messages"}
"""Paths by kind; other kinds are completions."""


def body(kind: str, draw: np.random.Generator) -> dict[str, Any]:
    """A random request of a kind, with words and numbers that no earlier request had."""
    letters = draw.integers(26, size=(WORDS, 8)) + ord("a")
    word, *others = ("".join(map(chr, each)) for each in letters)
    text = f"{word} has {draw.integers(999)} of {' '.join(others)}. How many are there?"
    most, stream = int(draw.integers(1, 25)), bool(draw.random() < 0.5)
    asked = {"model": "nano", "temperature": float(draw.choice([0.0, 0.8])), "stream": stream}
    if kind == "responses":
        return asked | {"input": text, "max_output_tokens": most}
    if kind in PATHS:
        grammar = {"guided_regex": f"(yes|no)/[0-9]{{2}}{word}"} if kind == "grammar" else {}
        return asked | {"messages": [{"role": "user", "content": text}], "max_tokens": most} | grammar
    more = {
        "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {"7": 2.0}, "stop": ["."]},
        "logprobs": {"logprobs": int(draw.integers(5)), "n": 2, "seed": int(draw.integers(2**31))},
        "document": {"prompt": draw.integers(3, 200, int(draw.integers(513, 800))).tolist()},
        "left": {"stream": True, "max_tokens": 100, "ignore_eos": True},
    }
    return asked | {"prompt": text, "max_tokens": most} | more.get(kind, {})


async def _send(client: httpx.AsyncClient, number: int, seed: int, statuses: Counter[str]) -> None:
    """Sends one request and counts its status by kind; a client of the kind `left` reads only the first bytes."""
    draw = np.random.default_rng([seed, number])
    kind = str(draw.choice(KINDS))
    if kind == "broken":
        path, content, _ = BROKEN[draw.integers(len(BROKEN))]
        await client.post(path, content=content)
        statuses[kind] += 1
        return
    async with client.stream("POST", PATHS.get(kind, "completions"), json=body(kind, draw)) as answer:
        async for _ in answer.aiter_raw():
            if kind == "left":
                break
    statuses[f"{kind} {answer.status_code}"] += 1


async def _resident(client: httpx.AsyncClient) -> int:
    """The server's resident memory in bytes."""
    page = (await client.get(client.base_url.join("/metrics"))).text
    found = re.search(r"^process_resident_memory_bytes (\S+)$", page, re.MULTILINE)
    if found is None:
        raise RuntimeError("/metrics of the server has no process_resident_memory_bytes: run this on Linux")
    return int(float(found[1]))


async def measure(url: str, requests: int, seed: int) -> tuple[dict[int, int], Counter[str]]:
    """Sends the requests; returns resident memory by the number of requests done, and the statuses."""
    memory, statuses = {}, Counter[str]()

    async def one_by_one(numbers: Iterator[int]) -> None:
        for number in numbers:
            await _send(client, number, seed, statuses)

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        memory[0] = await _resident(client)
        for done in range(0, requests, step := max(1, requests // MARKS)):
            numbers = iter(range(done, done + step))
            await asyncio.gather(*(one_by_one(numbers) for _ in range(CLIENTS)))
            memory[done + step] = await _resident(client)
            print(f"{done + step} requests: {memory[done + step] / 1e6:.1f} MB", file=sys.stderr)
    return memory, statuses


def main(requests: int = 10000, seed: int = 0, out: Path = Path("benchmarks/results")) -> None:
    """Measure a server's memory, and write server_memory.json; the exit status is 1 if it grows after the first fifth.

    Args:
        requests: number of requests.
        seed: seed of the requests.
        out: directory to write into.
    """
    with serving.served(*serving.ling3("serve", "nano", "--num-pages", PAGES)) as url:
        memory, statuses = asyncio.run(measure(f"{url}/", requests, seed))
    growth = memory[max(memory)] / next(size for done, size in memory.items() if done >= FIRST * requests) - 1
    found = {"growth_after_first_mark": round(growth, 5), "resident": memory, "statuses": dict(statuses)}
    record.save(out / "server_memory.json", record.where("benchmarks.server_memory") | found)
    print(found)
    sys.exit(1 if growth > GROWTH else 0)


if __name__ == "__main__":
    tyro.cli(main)
