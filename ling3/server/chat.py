"""`/v1/chat/completions`: conversations answered, whole or as a stream, with thinking and tool calls apart."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ling3.engine.outputs import Delta
from ling3.server import body, tools
from ling3.server.errors import ApiError
from ling3.server.fields import Chat
from ling3.server.messages import rendered
from ling3.server.reply_grammars import after_thinking
from ling3.server.running import (
    SHORT,
    Chunks,
    Deltas,
    Events,
    Service,
    StrictResponse,
    check,
    identifier,
    usage_of,
    while_there,
)
from ling3.server.scores import of_chat
from ling3.text.replies import Piece, Reply, TokenReply, opens_thinking
from ling3.text.tokenizer import thinking

CALLS = {"call": ("function", "arguments"), "custom": ("custom", "input")}
"""Of the pieces that begin a call: its type, and the field with its text."""
TEXTS = {"arguments": CALLS["call"], "input": CALLS["custom"]}
"""The same of the pieces that go on with one."""


async def answer(request: Request) -> Response:
    """The endpoint."""
    service: Service = request.app.state.service
    asked = await body.read(request, Chat)
    service.check_model(asked.model)
    head = {"id": identifier("chatcmpl"), "created": int(time.time()), "model": service.name}
    begun = await while_there(request, begin(service, asked))
    if isinstance(begun, Response):
        return begun
    deltas, replies, tokens = begun
    if asked.stream:
        chunks = Chunks({**head, "object": "chat.completion.chunk"}, *asked.reports_usage, tokens)
        return Events(_chunks(service, chunks, deltas, replies))
    whole = await while_there(request, _whole(service, {**head, "object": "chat.completion"}, deltas, replies))
    return whole if isinstance(whole, Response) else StrictResponse(whole)


async def begin(service: Service, asked: Chat) -> tuple[Deltas, list[TokenReply], int]:
    """The deltas of the answers, what takes each of them apart, and the tokens of the prompt.

    ApiError for what cannot be answered.
    """
    tokenizer, effort = service.tokenizer, asked.reasoning_effort
    given = asked.offered
    parallel = None if asked.tools == [] else asked.parallel_tool_calls  # clients say it of no tools, too
    how = asked.tool_choice, parallel, tokenizer
    # What takes longer than handing it to another thread and back is done there.
    offered = await asyncio.to_thread(tools.chosen, given, *how) if given else tools.chosen([], *how)
    if effort not in (None, "none", "minimal") and not await asyncio.to_thread(lambda: tokenizer.thinking_switch):
        message = "reasoning_effort: this model's chat template has no switch for thinking"
        raise ApiError(400, message, "reasoning_effort", "unsupported_parameter")
    variables = {**(thinking(effort) if effort else {}), **(asked.chat_template_kwargs or {})}
    shown = offered.shown if offered else []
    prompt = service, asked.messages, variables, shown
    short = not shown and len(str((asked.messages, variables))) <= SHORT
    text, ids = rendered(*prompt) if short else await asyncio.to_thread(rendered, *prompt)
    opens = opens_thinking(text)
    if opens and effort in ("none", "minimal"):
        raise ApiError(400, f"reasoning_effort is {effort}, and the prompt opens the thinking", "reasoning_effort")
    room = service.room(len(ids), "messages")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    most = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    params = asked.params(room if most is None else most, (asked.top_logprobs or 0) if asked.logprobs else None)
    structured = offered.grammar(params.structured, tokenizer) if offered else params.structured
    if opens and structured is not None:
        structured = after_thinking(structured, tokenizer)
    params = dataclasses.replace(params, structured=structured)
    field = "tools" if offered and offered.held else asked.grammar
    deltas = await service.start([ids], params, "messages", field)
    read = {"tools": offered.schemas, "form": offered.form, "customs": offered.customs} if offered else {}
    replies = [TokenReply(Reply(thinking=opens, **read), tokenizer, ids) for _ in range(params.n)]
    return deltas, replies, len(ids)


async def _whole(service: Service, head: dict[str, Any], deltas: Deltas, replies: list[TokenReply]) -> dict[str, Any]:
    messages = [Message() for _ in replies]
    last: Delta | None = None
    async with contextlib.aclosing(deltas):  # pyright: ignore[reportArgumentType]
        async for _, delta in deltas:
            check(delta)
            for piece in pieces(replies[delta.index], delta):
                messages[delta.index].add(piece)
            last = delta
    assert last is not None and last.output is not None, "the last delta has the output"
    choices = []
    for completion, message in zip(last.output.outputs, messages, strict=True):
        logprobs = None if completion.logprobs is None else of_chat(service.tokenizer, completion.logprobs)
        reason = reason_of(replies[completion.index], completion.finish_reason)
        choice = {"index": completion.index, "message": message.body, "logprobs": logprobs, "finish_reason": reason}
        choices.append(choice)
    return {**head, "choices": choices, "usage": usage_of([last])}


@dataclasses.dataclass
class Message:
    """A reply's pieces put together."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """The next piece."""
        if piece.kind in CALLS:
            self.calls.append(call_of(piece))
        elif piece.kind in TEXTS:
            kind, name = TEXTS[piece.kind]
            self.calls[piece.call][kind][name] += piece.text
        elif piece.kind == "content":
            self.content += piece.text
        else:
            self.reasoning += piece.text

    @property
    def body(self) -> dict[str, Any]:
        """The message."""
        content = None if self.calls and not self.content else self.content
        made: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self.reasoning:
            made |= {"reasoning_content": self.reasoning, "reasoning": self.reasoning}
        return {**made, "tool_calls": self.calls} if self.calls else made


async def _chunks(service: Service, chunks: Chunks, deltas: Deltas, replies: list[TokenReply]) -> AsyncIterator[str]:
    """The text of the events, those together that are sent at once."""
    left = len(replies)
    last: list[Delta] = []

    def chunk(index: int, new: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> str:
        return chunks.of({"index": index, "delta": new, "logprobs": logprobs, "finish_reason": reason})

    async with contextlib.aclosing(deltas):  # pyright: ignore[reportArgumentType]
        some = "".join(chunk(index, {"role": "assistant", "content": ""}) for index in range(len(replies)))
        async for _, delta in deltas:
            check(delta)
            last = [delta]
            chunks.count(delta)
            news = [_news(piece) for piece in pieces(replies[delta.index], delta)]
            logprobs = of_chat(service.tokenizer, delta.logprobs) if delta.logprobs else None
            for i, new in enumerate(news or ([{"content": ""}] if logprobs else [])):
                some += chunk(delta.index, new, None, None if i else logprobs)
            if delta.finish_reason is not None:
                some += chunk(delta.index, {}, reason_of(replies[delta.index], delta.finish_reason))
                left -= 1
            if some and left:  # the last go with the usage
                yield some
                some = ""
    yield some + chunks.last(last)


def _news(piece: Piece) -> dict[str, Any]:
    """A piece as a chunk's delta."""
    if piece.kind in CALLS:
        return {"tool_calls": [{"index": piece.call, **call_of(piece)}]}
    if piece.kind in TEXTS:
        kind, name = TEXTS[piece.kind]
        return {"tool_calls": [{"index": piece.call, kind: {name: piece.text}}]}
    return dict.fromkeys(("content",) if piece.kind == "content" else ("reasoning_content", "reasoning"), piece.text)


def call_of(piece: Piece) -> dict[str, Any]:
    """A tool call that begins."""
    kind, text = CALLS[piece.kind]
    return {"id": identifier("call"), "type": kind, kind: {"name": piece.text, text: ""}}


def reason_of(reply: TokenReply, reason: str | None) -> str | None:
    """Why an answer ended, for clients."""
    return "tool_calls" if reason == "stop" and reply.reply.calls else reason


def pieces(reply: TokenReply, delta: Delta) -> list[Piece]:
    """What is new of a reply."""
    return reply.feed(delta.text, delta.token_ids, delta.finish_reason is not None)
