"""A long run of the server: every answer is compared with its solo run, and leaks are looked for.

    python -m benchmarks.server_soak --requests 2000 --minutes 30

The busy engine has few slots and too few pages, and answers clients over HTTP, streaming or not. Requests come in
bursts, evenly spread over the time. A tenth of the clients disconnect during the answer, and a tenth send malformed
requests. Each answer is compared with that of the lonely engine, which serves nothing else and has no prefix cache. The
first two fifths of the requests warm up; slots, pages, snapshots, threads, file descriptors, objects and memory are
counted after these and at the end, when the server is idle.
"""

import asyncio
import dataclasses
import gc
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jax.numpy as jnp
import numpy as np
import tyro
import uvicorn

import ling3
from benchmarks import record
from benchmarks.soak import SETTINGS, alive, leaks_of, resident
from ling3.bench.remote import events
from ling3.server.app import build
from ling3.server.service import Service
from ling3.train.nano import problems

CLIENTS = 16
"""Requests in progress at once."""
CANCELLED, MALFORMED = 0.1, 0.1
"""Shares of requests that are cancelled, and that are malformed."""
WARM = 0.4
"""The share of requests before the first count."""
GROWTH = 0.01
"""The share by which memory and the number of Python's objects may grow between the first count and the last."""
SETTLED = 20.0
"""Seconds within which an idle server must free what clients left."""
BROKEN: tuple[tuple[str, bytes, int], ...] = (
    ("chat/completions", b'{"model": "nano", "messages": [', 400),
    ("chat/completions", b"\xff\xfe", 400),
    ("chat/completions", b"[" * 5000, 400),
    ("chat/completions", b'{"model": "nano", "messages": []}', 400),
    ("chat/completions", b'{"model": "nano", "messages": [{"role": "user", "content": 3}]}', 400),
    ("chat/completions", b'{"model": "other", "messages": [{"role": "user", "content": "a"}]}', 404),
    ("completions", b'{"model": "nano", "prompt": "a", "temperature": -1}', 400),
    ("completions", b'{"model": "nano", "prompt": "a", "no_such_field": 1}', 400),
    ("completions", json.dumps({"model": "nano", "prompt": [3] * 600}).encode(), 400),
    ("completions", json.dumps({"model": "nano", "prompt": "a", "guided_regex": "("}).encode(), 400),
    ("nowhere", b"{}", 404),
)
"""Malformed requests: path, body, and the status that they get."""


@dataclasses.dataclass
class Found:
    """The counts and findings of a run."""

    seconds: float = 0.0
    requests: dict[str, int] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(("whole", "cancelled", "malformed"), 0)
    )
    """Number of requests by kind."""
    compared: int = 0
    preemptions: int = 0
    differences: list[str] = dataclasses.field(default_factory=list)
    leaks: list[str] = dataclasses.field(default_factory=list)
    before: dict[str, int] = dataclasses.field(default_factory=dict)
    """Counts of resources after the warm-up."""
    after: dict[str, int] = dataclasses.field(default_factory=dict)
    memory: list[int] = dataclasses.field(default_factory=list)
    """Resident memory over time, in bytes."""


def soak(requests: int, minutes: float, seed: int = 0) -> Found:
    """Sends `requests` requests in bursts of `CLIENTS`, spread over `minutes`; with 0, each as soon as possible."""
    model, tokenizer = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")
    busy = ling3.Engine(model, tokenizer, **SETTINGS | {"max_queue": 1024})
    lonely = ling3.Engine(model, tokenizer, busy.settings, prefix_cache=False)
    busy.warmup()
    service = Service(busy, tokenizer, "nano")
    found, begin, apart = Found(), time.monotonic(), 60 * minutes * CLIENTS / requests
    with _served(service) as url:
        warm, objects = int(requests * WARM), alive()
        for name, numbers in (("before", range(warm)), ("after", range(warm, requests))):
            due = ((number, begin + number // CLIENTS * apart) for number in numbers)
            asyncio.run(_clients(url, lonely, found, due, seed))
            _settle(service, lonely)
            busy.forget_prefixes()
            setattr(found, name, _counts())
            if name == "before":
                objects = alive()
    found.seconds, found.preemptions = round(time.monotonic() - begin, 1), busy.stats().preemptions
    found.leaks = leaks_of(busy, lonely, objects)
    for what, was in found.before.items():
        allowed = was * (1 + GROWTH) if what in ("bytes", "objects") else was
        if found.after[what] > allowed:
            found.leaks.append(f"{found.after[what]} {what}, {was} after the warm-up")
    return found


@contextmanager
def _served(service: Service) -> Iterator[str]:
    """Serves in a thread while the context lasts, and gives the base URL."""
    config = uvicorn.Config(build(service), port=0, log_level="warning", ws="none", access_log=False)
    socket, server = config.bind_socket(), uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    while not server.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}/v1/"
    finally:
        server.should_exit = True
        thread.join()
        socket.close()


async def _clients(url: str, lonely: ling3.Engine, found: Found, due: Iterator[tuple[int, float]], seed: int) -> None:
    """Sends the requests with these numbers, none before its time."""
    alone, limits = asyncio.Lock(), httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS)

    async def one_by_one() -> None:
        for number, at in due:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            draw = np.random.default_rng([seed, number])
            kind = draw.choice(["cancelled", "malformed", "whole"], p=[CANCELLED, MALFORMED, 1 - CANCELLED - MALFORMED])
            if kind == "malformed":
                await _malformed(client, found, draw)
            else:
                await _asked(client, lonely, alone, found, draw, kind == "cancelled", lonely.tokenizer)
            found.requests[str(kind)] += 1
            if number % CLIENTS == 0:
                found.memory.append(resident())

    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as client:
        await asyncio.gather(*(one_by_one() for _ in range(CLIENTS)))


async def _malformed(client: httpx.AsyncClient, found: Found, draw: np.random.Generator) -> None:
    path, content, status = BROKEN[draw.integers(len(BROKEN))]
    answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    if answer.status_code != status or set(answer.json()) != {"error"}:
        found.differences.append(f"{path} with {content[:80]!r}: {answer.status_code} {answer.text:.200}")


async def _asked(
    client: httpx.AsyncClient,
    lonely: ling3.Engine,
    alone: asyncio.Lock,
    found: Found,
    draw: np.random.Generator,
    cancelled: bool,
    tokenizer: Any,
) -> None:
    """Sends a request and compares the answer with the solo run: all of it, or with `cancelled` its beginning."""
    stream = problems.problems(int(draw.integers(2**31)), "train")
    question, *examples = (next(stream) for _ in range(1 + int(draw.integers(3))))
    ids = tokenizer.encode(problems.ask(question, examples))[-300:]
    fields: dict[str, Any] = {
        "max_tokens": int(draw.integers(1, 101)),
        "temperature": float(draw.choice([0.0, 0.7, 1.2])),
        "seed": int(draw.integers(2**31)),
        "ignore_eos": bool(draw.random() < 0.7),
        "top_k": int(draw.choice([0, 20])) or None,
        "stop": [str(draw.choice([".", " = ", "n"]))] if draw.random() < 0.2 else None,
        "repetition_penalty": float(draw.choice([1.0, 1.2])),
    }
    given = {name: value for name, value in fields.items() if value is not None}
    streams = cancelled or draw.random() < 0.5
    logprobs = None if cancelled or draw.random() < 0.6 else 2
    body = {"model": "nano", "prompt": ids, **given, "logprobs": logprobs, "stream": bool(streams)}
    text, reason, scores = "", None, []
    leaves = int(draw.integers(1, 6)) if cancelled else None
    async with client.stream("POST", "completions", json=body) as answer:
        if answer.status_code != 200:
            found.differences.append(f"status {answer.status_code} for {given}")
            return
        blocks = []
        async for block in answer.aiter_raw():
            blocks.append((0.0, block))
            if leaves is not None and len(blocks) >= leaves:
                break
    whole = b"".join(block for _, block in blocks)
    for event in [event for _, event in events(blocks)] if streams else [json.loads(whole)]:
        choice = event["choices"][0]
        text, reason = text + choice["text"], choice["finish_reason"] or reason
        scores += (choice["logprobs"] or {}).get("token_logprobs", [])
    params = ling3.SamplingParams(**given, logprobs=logprobs)
    async with alone:
        [output] = await asyncio.to_thread(lonely.generate, [ids], params)
    found.compared += 1
    expected = (output.text, output.finish_reason, [one.logprob for one in output.logprobs or ()])
    if not (output.text.startswith(text) if reason is None and cancelled else (text, reason, scores) == expected):
        found.differences.append(f"{text!r} ({reason}), alone {expected[:2]}, with {given}")


def _settle(service: Service, lonely: ling3.Engine) -> None:
    """Waits until the server has noticed that all clients are gone, at most `SETTLED` seconds.

    Then steps both engines once: an idle engine may still have a call in flight whose result no request needs.
    """
    until = time.monotonic() + SETTLED
    while service.engine.has_work and time.monotonic() < until:
        time.sleep(0.05)
    for engine in (service.engine, lonely):
        engine.step()


def _counts() -> dict[str, int]:
    """Counts resources of the process, without the event loop's thread pool, which grows to its bound with use."""
    gc.collect()
    descriptors = Path("/proc/self/fd")
    return {
        "threads": sum(not thread.name.startswith(("uvloop", "asyncio")) for thread in threading.enumerate()),
        "file descriptors": len(list(descriptors.iterdir())) if descriptors.exists() else 0,
        "objects": len(gc.get_objects()),
        "bytes": resident(),
    }


def main(requests: int = 2000, minutes: float = 30, seed: int = 0, out: Path = Path("benchmarks/results")) -> None:
    """Soak the server, and write server_soak.json; the exit status is 1 if an answer differs or something leaks.

    Args:
        requests: number of requests.
        minutes: time over which they are spread; 0 sends each as soon as possible.
        seed: seed of the requests.
        out: directory to write into.
    """
    found = soak(requests, minutes, seed)
    record.save(out / "server_soak.json", record.where("benchmarks.server_soak") | dataclasses.asdict(found))
    print(f"{found.requests}, {found.compared} compared, {found.preemptions} preemptions, {found.seconds} s")
    print(f"after the warm-up {found.before}, in the end {found.after}")
    for each in [*found.differences[:20], *found.leaks]:
        print(each)
    sys.exit(1 if found.differences or found.leaks else 0)


if __name__ == "__main__":
    tyro.cli(main)
