"""`/v1/chat/completions`: answers conversations, in one body or as a stream, with separate thinking and tool calls."""

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from starlette.responses import Response

from ling3.engine.front import SHORT
from ling3.engine.outputs import Completion, Delta, RequestOutput
from ling3.server import tools
from ling3.server.errors import wrong
from ling3.server.events import Choices, head_of, identifier, respond
from ling3.server.fields import Chat
from ling3.server.messages import CALLS, GOES_ON, rendered
from ling3.server.reply_grammars import Callable, after_thinking
from ling3.server.scores import of_chat
from ling3.server.service import Deltas, Service
from ling3.text.replies import THINK_END, Piece, Reply, TokenReply, opens_thinking
from ling3.text.tokenizer import Tokenizer, thinking


async def answer(service: Service, asked: Chat) -> Response:
    """Answers a request for `/v1/chat/completions`, in one body or as a stream."""
    deltas, replies, tokens = await begin(service, asked, asked.offered)
    return await respond(_Messages(service, asked, replies, tokens), deltas, asked.stream)


class ChatPrompt(NamedTuple):
    """A conversation as the model gets it."""

    ids: list[int]
    opens: bool
    """Whether it opens the thinking."""
    offered: tools.Tools


async def prompt(service: Service, asked: Chat, given: Sequence[Callable], prefill: str = "") -> ChatPrompt:
    """The prompt of a chat; `given` are its tools, and `prefill` is how the answer begins.

    Raises ApiError for a request that cannot be answered.
    """
    tokenizer, effort = service.tokenizer, asked.reasoning_effort
    parallel = None if asked.tools == [] else asked.parallel_tool_calls  # clients send it without tools, too
    how = asked.tool_choice, parallel, tokenizer
    # Steps that take longer than a switch to another thread and back run there.
    offered = await asyncio.to_thread(tools.chosen, given, *how) if given else tools.chosen((), *how)
    if effort not in (None, "none", "minimal") and not await asyncio.to_thread(lambda: tokenizer.thinking_switch):
        message = f"is {effort}, and this model's chat template has no switch for thinking"
        raise wrong("reasoning_effort", message, "unsupported_parameter")
    variables = {**(thinking(effort) if effort else {}), **(asked.chat_template_kwargs or {})}
    parts = service, asked.messages, variables, offered.shown, prefill
    short = not offered.shown and len(str((asked.messages, variables))) <= SHORT
    text, ids = rendered(*parts) if short else await asyncio.to_thread(rendered, *parts)
    opens = opens_thinking(text)
    if opens and effort in ("none", "minimal"):
        raise wrong("reasoning_effort", f"is {effort}, and the prompt opens the thinking")
    return ChatPrompt(ids, opens, offered)


async def begin(
    service: Service, asked: Chat, given: Sequence[Callable], prefill: str = "", cut: bool = False
) -> tuple[Deltas, list[TokenReply], int]:
    """Starts generating the answers to a chat; `given` are its tools, and `prefill` is how the answer begins.

    An answer of more tokens than the context has room for is refused, or `cut`. Returns the deltas, a parser for each
    of the `n` replies, and the number of prompt tokens. Raises ApiError for a request that cannot be answered.
    """
    ids, opens, offered = await prompt(service, asked, given, prefill)
    room = service.room(len(ids), "messages")
    if asked.top_logprobs is not None and not asked.logprobs:
        raise wrong("top_logprobs", "needs logprobs: true")
    most = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
    most = room if most is None else min(most, room) if cut else most
    params = asked.params(most, (asked.top_logprobs or 0) if asked.logprobs else None)
    structured = offered.grammar(params.structured, service.tokenizer)
    if opens and structured is not None:
        structured = after_thinking(structured, service.tokenizer)
    params = dataclasses.replace(params, structured=structured, adapter=service.adapter(asked.model))
    field = "tools" if offered.held else asked.grammar
    deltas = await service.start([ids], params, "messages", field)
    read = {"tools": offered.schemas, "form": offered.form, "customs": offered.customs}
    replies = [TokenReply(Reply(thinking=opens, **read), service.tokenizer, ids) for _ in range(params.n)]
    return deltas, replies, len(ids)


class _Messages(Choices):
    """Choices whose answers are chat messages."""

    def __init__(self, service: Service, asked: Chat, replies: Sequence[TokenReply], prompt_tokens: int):
        head = head_of("chatcmpl", "chat.completion", asked.model)
        super().__init__(head, asked, prompt_tokens, bool(asked.logprobs), "chat.completion.chunk")
        self._tokenizer, self._replies = service.tokenizer, replies

    def complete(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        for completion, reply in zip(output.outputs, self._replies, strict=True):
            message = _message(pieces(reply, completion))
            logprobs = None if completion.logprobs is None else of_chat(self._tokenizer, completion.logprobs)
            reason = _reason(reply, completion)
            yield {"index": completion.index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def opening(self) -> Iterator[dict[str, Any]]:
        return (_chunk(index, {"role": "assistant", "content": ""}) for index in range(len(self._replies)))

    def new(self, place: int, delta: Delta) -> Iterator[dict[str, Any]]:
        reply = self._replies[delta.index]
        logprobs = of_chat(self._tokenizer, delta.logprobs) if delta.logprobs else None
        said = [_news(piece) for piece in pieces(reply, delta)]
        for i, new in enumerate(said or ([{"content": ""}] if logprobs else [])):
            yield _chunk(delta.index, new, logprobs=None if i else logprobs)
        if delta.finish_reason is not None:
            yield _chunk(delta.index, {}, _reason(reply, delta))


def _chunk(index: int, new: dict[str, Any], reason: str | None = None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "delta": new, "logprobs": logprobs, "finish_reason": reason}


def _message(said: Sequence[Piece]) -> dict[str, Any]:
    """Joins the pieces of a reply to a message."""
    reasoning, text = ("".join(x.text for x in said if x.kind == kind) for kind in ("reasoning", "content"))
    calls: list[dict[str, Any]] = []
    for piece in said:
        if piece.kind in CALLS:
            calls.append(_call(piece))
        elif piece.kind in GOES_ON:
            kind, name = CALLS[GOES_ON[piece.kind]]
            calls[piece.call][kind][name] += piece.text
    made = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    made |= {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}
    return {**made, "tool_calls": calls} if calls else made


def _news(piece: Piece) -> dict[str, Any]:
    """A piece of a reply as the `delta` of a chunk."""
    if piece.kind in CALLS:
        return {"tool_calls": [{"index": piece.call, **_call(piece)}]}
    if piece.kind in GOES_ON:
        kind, name = CALLS[GOES_ON[piece.kind]]
        return {"tool_calls": [{"index": piece.call, kind: {name: piece.text}}]}
    return dict.fromkeys(("content",) if piece.kind == "content" else ("reasoning_content", "reasoning"), piece.text)


def _call(piece: Piece) -> dict[str, Any]:
    """The beginning of a tool call: a new id, the name, and no text yet."""
    kind, text = CALLS[piece.kind]
    return {"id": identifier("call"), "type": kind, kind: {"name": piece.text, text: ""}}


def _reason(reply: TokenReply, said: Delta | Completion) -> str | None:
    """The finish reason for clients: `tool_calls` if the reply stopped and has calls."""
    return "tool_calls" if said.finish_reason == "stop" and reply.reply.calls else said.finish_reason


def pieces(reply: TokenReply, said: Delta | Completion) -> list[Piece]:
    """Parses the new text of a delta, or all the text of a completion, into pieces of the reply."""
    return reply.feed(said.text, said.token_ids, said.finish_reason is not None)


def thinking_tokens(tokenizer: Tokenizer, ids: Sequence[int], text: str, alone: bool) -> int:
    """How many tokens of a reply were thinking, which is `text`; `alone` says that the reply is nothing else.

    Where the end of the thinking is no token, the number is how many the tokenizer makes of the text.
    """
    end = tokenizer.backend.token_to_id(THINK_END)
    if not text:
        return 0
    if end is not None and end in ids:
        return list(ids).index(end) + 1
    return len(ids) if alone else len(tokenizer.encode(text, add_special_tokens=False))
