"""Measures an engine in this process, offline or online.

Offline, all requests arrive at once, and throughput counts. Online, they arrive as a Poisson process, whether or not
the engine keeps up, and each latency is measured from the due time, so that waiting for a busy engine counts.
"""

import asyncio
import contextlib
import dataclasses
import math
import os
import pathlib
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float64

from ling3.bench.report import BenchReport, ServedRequest, machine
from ling3.engine.outputs import Delta, RequestOutput
from ling3.engine.sampling_params import SamplingParams
from ling3.runtime import strict_json
from ling3.runtime.progress import progress
from ling3.serve import Engine

# The engine's counts that are part of a report.
TURNS = ("steps", "prefill_calls", "decode_calls", "preemptions")


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One request of a workload: its prompt and the length of its output."""

    prompt: Any
    """A text, token ids, or chat messages, as for `Engine.submit`."""
    max_tokens: int


def random_requests(
    count: int,
    vocab: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    seed: int = 0,
    shared_prefix: int = 0,
) -> list[SampleRequest]:
    """`count` prompts of random ids in [0, vocab), with lengths (smallest to largest, in tokens) drawn evenly.

    Each begins with the same `shared_prefix` tokens, which `input_len` does not count and which do not change the other
    tokens. Raises ValueError for invalid lengths and counts.
    """
    rng = np.random.default_rng(seed)
    inputs, outputs = _lengths("input_len", input_len, count, rng), _lengths("output_len", output_len, count, rng)
    if shared_prefix < 0:
        raise ValueError(f"shared_prefix is {shared_prefix} tokens, expected at least 0")
    prompts = [rng.integers(0, vocab, length).tolist() for length in inputs]
    prefix = rng.integers(0, vocab, shared_prefix).tolist()
    return [SampleRequest(prefix + prompt, length) for prompt, length in zip(prompts, outputs, strict=True)]


def read_requests(
    path: str | os.PathLike[str], output_len: tuple[int, int], count: int | None = None, seed: int = 0
) -> list[SampleRequest]:
    """Reads prompts from a file: one text per line, or in `*.jsonl` one object per line with a `prompt`.

    `count` takes that many, starting again after the last; empty lines are skipped. Raises ValueError, with the line,
    for anything else, and OSError for a file that cannot be read.
    """
    path = pathlib.Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error})") from error
    jsonl = path.suffix.lower() == ".jsonl"
    prompts = [
        _prompt_of(line, f"{path}, line {number}") if jsonl else line
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise ValueError(f"{path}: no prompt in it, expected one a line")
    count = len(prompts) if count is None else count
    outputs = _lengths("output_len", output_len, count, np.random.default_rng(seed))
    return [SampleRequest(prompts[i % len(prompts)], length) for i, length in enumerate(outputs)]


def check_lengths(name: str, bounds: tuple[int, int]) -> None:
    """Raises ValueError unless `bounds` are a smallest length of at least 1 and a largest one."""
    low, high = bounds
    if not 1 <= low <= high:
        raise ValueError(f"{name} is from {low} to {high} tokens, expected at least 1, and no less at the end")


def check_count(count: int) -> None:
    """Raises ValueError if the number of requests is below 1."""
    if count < 1:
        raise ValueError(f"the number of requests is {count}, expected at least 1")


def check_concurrency(concurrency: int | None) -> None:
    """Raises ValueError if the concurrency is below 1; None is valid."""
    if concurrency is not None and concurrency < 1:
        raise ValueError(f"the concurrency is {concurrency}, expected at least 1")


def _lengths(name: str, bounds: tuple[int, int], count: int, rng: np.random.Generator) -> list[int]:
    low, high = bounds
    check_lengths(name, bounds)
    check_count(count)
    return rng.integers(low, high + 1, count).tolist()


def _prompt_of(line: str, where: str) -> Any:
    value = strict_json.parse(line, where)
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, (str, list)) or not prompt:
        raise ValueError(f'{where}: found {line!r:.60}, expected an object with a "prompt", a text or token ids')
    return prompt


def arrivals(count: int, request_rate: float, seed: int = 0) -> Float64[np.ndarray, " count"]:
    """Due times in seconds after the first: a Poisson process of `request_rate` requests per second (inf: all 0)."""
    if not request_rate > 0:
        raise ValueError(f"request_rate is {request_rate}, expected a number of requests per second above 0, or inf")
    gaps = np.random.default_rng(seed).exponential(1 / request_rate, count)
    return np.cumsum(gaps) - gaps[:1]


def measure(
    engine: Engine,
    requests: Sequence[SampleRequest],
    *,
    concurrency: int | None = None,
    request_rate: float = math.inf,
    seed: int = 0,
    ignore_eos: bool = True,
    temperature: float = 0.0,
    about: Mapping[str, Any] | None = None,
) -> BenchReport:
    """Serves the requests and reports how long everything took; `about` is copied into the report.

    Requests arrive at the `request_rate`, with their texts encoded beforehand. With `concurrency`, that many run at a
    time instead, each as a stream that is due, and encodes its text, when an earlier one has ended.

    Before the measurement, the requests are checked, programs are compiled, and one short request is served; then the
    engine drops its cached prefixes, so that measured prompts can only hit each other's. With `ignore_eos` each output
    has its full length, so the work does not depend on the model's answers. `seed` draws the arrivals, and request i
    samples with `seed + i`. While the engine's queue is full, a due request waits, and this time counts.

    Raises ValueError, before anything is measured, for requests that the engine could not answer.
    """
    check_count(len(requests))
    check_concurrency(concurrency)
    params = [
        SamplingParams(max_tokens=request.max_tokens, ignore_eos=ignore_eos, temperature=temperature, seed=seed + i)
        for i, request in enumerate(requests)
    ]
    due = arrivals(len(requests), request_rate, seed).tolist()
    clients = [_Client(when) for when in due]
    # The requests are checked here, before anything is compiled; the clock starts when the first delta is requested.
    deltas = engine.stream_all([request.prompt for request in requests], params, arrivals=due)
    engine.warmup()
    engine.generate([requests[0].prompt], dataclasses.replace(params[0], max_tokens=min(2, requests[0].max_tokens)))
    engine.forget_prefixes()
    where, before = machine(), engine.stats()
    if concurrency is None:
        served = _serve(deltas, clients)
    else:
        asked = list(zip([request.prompt for request in requests], params, clients, strict=True))
        served = asyncio.run(_serve_streams(engine, asked, concurrency))
    after = engine.stats()
    workload = {"requests": len(requests), "seed": seed, "ignore_eos": ignore_eos, "temperature": temperature}
    return BenchReport(
        served=served,
        duration=max(request.end for request in served),
        request_rate=request_rate,
        about={**(about or {}), "concurrency": concurrency, "workload": workload},
        engine={**dataclasses.asdict(engine.settings), "tokenizer": engine.tokenizer is not None},
        turns={name: getattr(after, name) - getattr(before, name) for name in TURNS},
        machine=where,
    )


@dataclasses.dataclass
class _Client:
    """Records when the deltas of its request arrive, in seconds from the start of the measurement."""

    due: float
    deltas: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    end: float = 0.0
    output: RequestOutput | None = None

    def take(self, delta: Delta, now: float) -> None:
        if delta.token_ids:
            self.deltas.append((now, len(delta.token_ids)))
        if delta.output is not None:
            self.output, self.end = delta.output, now

    def served(self) -> ServedRequest:
        assert self.output is not None, "every request has ended"
        output = self.output
        tokens = len(output.prompt_token_ids)
        return ServedRequest(self.due, tokens, tuple(self.deltas), self.end, output.finish_reason, output.cached_tokens)


def _serve(deltas: Generator[tuple[int, Delta], None, None], clients: Sequence[_Client]) -> list[ServedRequest]:
    """Takes the deltas as they arrive until every request has ended; on Ctrl-C unfinished requests are aborted."""
    with contextlib.closing(deltas), progress("measuring", len(clients)) as advance:
        begin = time.perf_counter()
        for index, delta in deltas:
            clients[index].take(delta, time.perf_counter() - begin)
            advance(int(delta.output is not None))
    return [client.served() for client in clients]


async def _serve_streams(
    engine: Engine, asked: Sequence[tuple[Any, SamplingParams, _Client]], concurrency: int
) -> list[ServedRequest]:
    """Serves the requests as streams, `concurrency` at a time."""
    begin = time.perf_counter()
    with progress("measuring", len(asked)) as advance:

        async def ask(i: int, due: float) -> None:
            prompt, params, client = asked[i]
            client.due = due
            async for delta in engine.astream(prompt, params):
                client.take(delta, time.perf_counter() - begin)
            advance(1)

        await in_turn(ask, len(asked), concurrency, begin)
    return [client.served() for _, _, client in asked]


async def in_turn(ask: Callable[[int, float], Awaitable[None]], count: int, concurrency: int, begin: float) -> None:
    """Awaits `ask(i, due)` for each i below `count`, `concurrency` at a time, each due when an earlier one has ended.

    Due times are in seconds after `begin`, on the clock of `time.perf_counter`.
    """
    left = iter(range(count))

    async def one_by_one() -> None:
        for i in left:
            await ask(i, time.perf_counter() - begin)

    await asyncio.gather(*(one_by_one() for _ in range(concurrency)))
