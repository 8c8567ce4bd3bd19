"""Measures a server of OpenAI's protocol over HTTP, and reports as `measure` does.

The client only records which bytes arrive when, and parses the streams after all have ended, so that it takes little
time from a server on the same machine. Chunks are not tokens: the number of tokens is the server's `usage`, which is
divided among the chunks in proportion to their text.
"""

# pyright: reportMissingImports=false
# The imports need an extra, and types are checked without it too.

import asyncio
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import aiohttp

from ling3.bench.measure import SampleRequest, arrivals, check_concurrency, check_count, in_turn
from ling3.bench.report import BenchReport, ServedRequest, machine
from ling3.runtime.progress import progress
from ling3.runtime.quoting import printable

PATIENCE = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=600)
"""Limits in seconds: to connect, and to wait for the server's next bytes."""
FAULTS = (aiohttp.ClientError, TimeoutError)
IDS = 256
"""Token ids below this are in every byte-level vocabulary, so prompts for an unknown vocabulary are drawn from them."""


@dataclasses.dataclass(frozen=True)
class RemoteServer:
    """A server of OpenAI's protocol that is measured over HTTP."""

    base_url: str
    """The address, including `/v1`, as OpenAI's clients take it."""
    model: str | None = None
    """The model's name on the server; without it, the first that the server lists."""
    api_key: str | None = None
    chat: bool = False
    """True sends prompts, which must be texts, to `/chat/completions`; False sends texts or ids to `/completions`."""

    def session(self) -> aiohttp.ClientSession:
        """A client with any number of connections, which sends the API key with each request."""
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connections = aiohttp.TCPConnector(limit=0)
        return aiohttp.ClientSession(headers=headers, connector=connections, timeout=PATIENCE)

    def url(self, path: str) -> str:
        """The address of a path below the base."""
        return f"{self.base_url.rstrip('/')}/{path}"

    async def name(self, session: aiohttp.ClientSession) -> str:
        """The model's name. Raises ValueError if the server lists none or cannot be reached."""
        if self.model is not None:
            return self.model
        try:
            async with session.get(self.url("models")) as answer:
                if answer.status != 200:
                    raise ValueError(f"{self.url('models')}: status {answer.status}; expected the address of /v1")
                said = await answer.read()
        except FAULTS as error:
            raise ValueError(f"{self.url('models')}: {_told(error)}; expected the address of /v1") from error
        try:
            return str(json.loads(said)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f"{self.url('models')} lists no model: name it") from error


def measure_server(
    server: RemoteServer,
    requests: Sequence[SampleRequest],
    *,
    concurrency: int | None = None,
    request_rate: float = math.inf,
    seed: int = 0,
    ignore_eos: bool = True,
    temperature: float = 0.0,
    about: Mapping[str, Any] | None = None,
) -> BenchReport:
    """Streams the answers to the requests and reports as `ling3.bench.measure.measure` does.

    With `concurrency`, that many requests run at a time, each due when an earlier one has ended; else they arrive at
    the `request_rate`. A request fails if its status is not 200, the connection breaks, or the stream has an error or
    no `usage`, or ends early. `ignore_eos` is vLLM's field, which is only sent if True. A short request goes first and
    does not count; `cached_tokens` includes what the server has cached from earlier prompts.

    Raises ValueError if that short request fails.
    """
    check_count(len(requests))
    check_concurrency(concurrency)
    due = arrivals(len(requests), request_rate, seed).tolist()
    where = machine()
    options = {"temperature": temperature} | ({"ignore_eos": True} if ignore_eos else {})
    name, streams, busy = asyncio.run(_measured(server, requests, options, seed, concurrency, due))
    served = [stream.served() for stream in streams]
    duration = max(request.end for request in served)
    workload = {"requests": len(requests), "seed": seed, "ignore_eos": ignore_eos, "temperature": temperature}
    asked = {"base_url": server.base_url, "endpoint": "chat" if server.chat else "completions"}
    asked |= {"concurrency": concurrency, "client_cpu": round(busy / duration, 3)}
    return BenchReport(
        served=served,
        duration=duration,
        request_rate=request_rate,
        about={"model": name, **(about or {}), **asked, "workload": workload},
        engine={},
        turns={},
        machine=where,
    )


@dataclasses.dataclass
class Stream:
    """The bytes of one request's answer; times are in seconds from the start of the measurement."""

    due: float
    blocks: list[tuple[float, bytes]] = dataclasses.field(default_factory=list)
    """The time of arrival and the bytes of each block of the body."""
    end: float = 0.0
    error: str | None = None

    def served(self) -> ServedRequest:
        """Parses the stream, and returns the request as a report has it."""
        error, usage, reason, texts = self.error, {}, None, []
        try:
            for when, event in events(self.blocks) if error is None else ():
                if "error" in event:
                    error = _message(event)
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    if size := _size(choice):
                        texts.append((when, size))
                    reason = choice.get("finish_reason") or reason
            tokens, prompt = (int(usage.get(f"{kind}_tokens", 0)) for kind in ("completion", "prompt"))
            cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        except (ValueError, TypeError, AttributeError):
            return ServedRequest(self.due, 0, (), self.end, "error", error="the stream is not OpenAI's")
        if error is None and reason is None:
            error = "the stream ended early"
        if error is None and not usage:
            error = "the stream has no usage"
        deltas = tuple(_shared(texts or [(self.end, 1)], tokens)) if tokens else ()
        ended = "error" if error is not None else "length" if reason == "length" else "stop"
        return ServedRequest(self.due, prompt, deltas, self.end, ended, cached, error)


def events(blocks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, Any]]:
    """Yields the JSON of each server-sent event and its time of arrival. Raises ValueError for a malformed event."""
    held = b""
    for when, block in blocks:
        *lines, held = (held + block).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield when, json.loads(data)


def _size(choice: Mapping[str, Any]) -> int:
    """The number of new characters of a choice: text, thinking, or tool calls."""
    delta = choice.get("delta") or {}
    thinking = delta.get("reasoning_content") or delta.get("reasoning") or ""
    calls = delta.get("tool_calls")
    return len(choice.get("text") or delta.get("content") or thinking) or (len(json.dumps(calls)) if calls else 0)


def _shared(texts: Sequence[tuple[float, int]], tokens: int) -> Iterator[tuple[float, int]]:
    """Divides `tokens` among the chunks by the sizes of their texts; yields (time, number of tokens).

    At least one token comes with the first chunk, and all have come with the last.
    """
    whole, seen, given = sum(size for _, size in texts), 0, 0
    for when, size in texts:
        seen += size
        until = max(round(tokens * seen / whole), 1)
        if until > given:
            yield when, until - given
        given = until


async def _measured(
    server: RemoteServer,
    requests: Sequence[SampleRequest],
    options: Mapping[str, Any],
    seed: int,
    concurrency: int | None,
    due: Sequence[float],
) -> tuple[str, list[Stream], float]:
    """The model's name, the stream of each request, and the seconds of CPU time that this client used for them."""
    async with server.session() as session:
        name = await server.name(session)
        bodies = [_body(server, name, request, {**options, "seed": seed + i}) for i, request in enumerate(requests)]
        contents = [json.dumps(body).encode() for body in bodies]
        first, short = Stream(0.0), {**bodies[0], "max_tokens": min(2, requests[0].max_tokens)}
        await _ask(session, server, json.dumps(short).encode(), first, 0.0)
        if (failed := first.served().error) is not None:
            raise ValueError(f"{server.base_url}: {failed}")
        streams = [Stream(when) for when in due]
        with progress("measuring", len(bodies)) as advance:
            begin, used = time.perf_counter(), time.process_time()

            async def ask(i: int, due: float) -> None:
                streams[i].due = due
                await asyncio.sleep(due - (time.perf_counter() - begin))
                await _ask(session, server, contents[i], streams[i], begin)
                advance(1)

            if concurrency is None:
                await asyncio.gather(*map(ask, range(len(bodies)), due))
            else:
                await in_turn(ask, len(bodies), concurrency, begin)
        return name, streams, time.process_time() - used


def _body(server: RemoteServer, name: str, request: SampleRequest, options: Mapping[str, Any]) -> dict[str, Any]:
    """A request's fields. Raises ValueError for token ids if the server is measured by conversations."""
    if server.chat and not isinstance(request.prompt, str):
        raise ValueError("a conversation takes texts, and the prompts are token ids: give prompts that are texts")
    what = {"messages": [{"role": "user", "content": request.prompt}]} if server.chat else {"prompt": request.prompt}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": name, **what, "max_tokens": request.max_tokens, **options, **stream}


async def _ask(
    session: aiohttp.ClientSession, server: RemoteServer, content: bytes, stream: Stream, begin: float
) -> None:
    """Streams an answer; errors are stored in the stream."""
    try:
        path = "chat/completions" if server.chat else "completions"
        async with session.post(server.url(path), data=content) as answer:
            async for block in answer.content.iter_any():
                stream.blocks.append((time.perf_counter() - begin, block))
        if answer.status != 200:
            said = b"".join(block for _, block in stream.blocks)
            stream.error = f"status {answer.status}: {printable(said.decode('utf-8', 'replace'), 200)}"
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                stream.error = f"status {answer.status}: {_message(json.loads(said))}"
    except FAULTS as error:
        stream.error = _told(error)
    stream.end = time.perf_counter() - begin


def _message(answer: Mapping[str, Any]) -> str:
    """The message of OpenAI's error object, or else the answer itself."""
    error = answer.get("error", answer)
    return printable(error.get("message", error) if isinstance(error, dict) else error, 200)


def _told(error: Exception) -> str:
    return printable(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, 200)
