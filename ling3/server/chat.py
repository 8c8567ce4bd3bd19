"""`/v1/chat/completions`: conversations answered, whole or as a stream, with thinking apart."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ling3.engine.outputs import Delta, Logprob
from ling3.engine.structured import Grammar
from ling3.server import body
from ling3.server.errors import ApiError
from ling3.server.fields import Chat
from ling3.server.running import Deltas, Events, Service, check, identifier, usage_of, while_there
from ling3.text.replies import Reply, TokenReply, opens_thinking
from ling3.text.tokenizer import Tokenizer

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


async def answer(request: Request) -> Response:
    """The endpoint."""
    service: Service = request.app.state.service
    asked = await body.read(request, Chat)
    service.check_model(asked.model)
    text, ids = await asyncio.to_thread(rendered, service, asked.messages, asked.chat_template_kwargs)
    room = service.room(len(ids), "messages")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    most = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    params = asked.params(room if most is None else most, (asked.top_logprobs or 0) if asked.logprobs else None)
    thinking = opens_thinking(text)
    if thinking and params.structured is not None and not isinstance(params.structured, Grammar):
        message = f"{asked.grammar} holds from the first token, and this prompt opens the thinking: turn it off"
        raise ApiError(400, message, asked.grammar)
    head = {"id": identifier("chatcmpl"), "created": int(time.time()), "model": service.name}
    deltas = await while_there(request, service.start([ids], params, "messages", asked.grammar))
    if isinstance(deltas, Response):
        return deltas
    replies = [TokenReply(Reply(thinking=thinking), service.tokenizer, ids) for _ in range(params.n)]
    if asked.stream:
        usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        return Events(_chunks(service, {**head, "object": "chat.completion.chunk"}, deltas, replies, usage))
    whole = await while_there(request, _whole(service, {**head, "object": "chat.completion"}, deltas, replies))
    return whole if isinstance(whole, Response) else JSONResponse(whole)


def rendered(
    service: Service, given: Sequence[dict[str, Any]], variables: Mapping[str, Any] | None
) -> tuple[str, list[int]]:
    """The rendered prompt and its ids; ApiError 400, which names no file, for messages that it cannot take."""
    messages = [_message(message, f"messages[{i}]") for i, message in enumerate(given)]
    tokenizer = service.tokenizer
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **(variables or {}))
        return text, tokenizer.encode(text, add_special_tokens=False)
    except (ValueError, TypeError) as error:
        raise ApiError(400, service.plain(error), "messages") from None


def _message(message: dict[str, Any], where: str) -> dict[str, str]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ApiError(400, f"{where}.role is not supported, expected one of {', '.join(ROLES)}", f"{where}.role")
    for name, value in message.items():
        if name not in ("role", "content", "refusal", "reasoning_content") and value is not None:
            raise ApiError(400, f"{where}.{name} is not supported", f"{where}.{name}", "unsupported_parameter")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise ApiError(400, f"{where}.content has a part that is no text", f"{where}.content")
        content = "".join(map(str, parts))
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content is no text", f"{where}.content")
    reasoning = message.get("reasoning_content")
    return {"role": ROLES[role], "content": content, **({"reasoning_content": reasoning} if reasoning else {})}


async def _whole(service: Service, head: dict[str, Any], deltas: Deltas, replies: list[TokenReply]) -> dict[str, Any]:
    said = [{"reasoning": "", "content": ""} for _ in replies]
    last: Delta | None = None
    async with contextlib.aclosing(deltas):  # pyright: ignore[reportArgumentType]
        async for _, delta in deltas:
            check(delta)
            for kind, text, _ in _pieces(replies[delta.index], delta):
                said[delta.index][kind] += text
            last = delta
    assert last is not None and last.output is not None, "the last delta has the output"
    choices = []
    for completion, texts in zip(last.output.outputs, said, strict=True):
        message: dict[str, Any] = {"role": "assistant", "content": texts["content"], "refusal": None}
        if texts["reasoning"]:
            message |= {"reasoning_content": texts["reasoning"], "reasoning": texts["reasoning"]}
        logprobs = None if completion.logprobs is None else _logprobs(service.tokenizer, completion.logprobs)
        reason = completion.finish_reason
        choices.append({"index": completion.index, "message": message, "logprobs": logprobs, "finish_reason": reason})
    return {**head, "choices": choices, "usage": usage_of([last])}


async def _chunks(
    service: Service, head: dict[str, Any], deltas: Deltas, replies: list[TokenReply], usage: bool
) -> AsyncIterator[dict[str, Any]]:
    unset = {"usage": None} if usage else {}
    last: Delta | None = None

    def chunk(index: int, new: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
        choice = {"index": index, "delta": new, "logprobs": logprobs, "finish_reason": reason}
        return {**head, "choices": [choice], **unset}

    async with contextlib.aclosing(deltas):  # pyright: ignore[reportArgumentType]
        for index in range(len(replies)):
            yield chunk(index, {"role": "assistant", "content": ""})
        async for _, delta in deltas:
            check(delta)
            last, news = delta, []
            for kind, text, _ in _pieces(replies[delta.index], delta):
                names = ("content",) if kind == "content" else ("reasoning_content", "reasoning")
                news.append(dict.fromkeys(names, text))
            logprobs = _logprobs(service.tokenizer, delta.logprobs) if delta.logprobs else None
            for i, new in enumerate(news or ([{"content": ""}] if logprobs else [])):
                yield chunk(delta.index, new, None, None if i else logprobs)
            if delta.finish_reason is not None:
                yield chunk(delta.index, {}, delta.finish_reason)
    if usage and last is not None:
        yield {**head, "choices": [], "usage": usage_of([last])}


def _pieces(reply: TokenReply, delta: Delta) -> list[Any]:
    return reply.feed(delta.text, delta.token_ids, delta.finish_reason is not None)


def _logprobs(tokenizer: Tokenizer, logprobs: Any) -> dict[str, Any]:
    def shown(token: int, value: float) -> dict[str, Any]:
        text = tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "logprob": max(value, -9999.0), "bytes": list(text.encode())}

    def entry(one: Logprob) -> dict[str, Any]:
        top = [shown(token, value) for token, value in one.top.items()]
        return {**shown(one.token_id, one.logprob), "top_logprobs": top}

    return {"content": [entry(one) for one in logprobs], "refusal": None}
