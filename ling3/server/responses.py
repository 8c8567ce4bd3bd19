"""`/v1/responses`, without storage: the conversation comes whole, and is answered as a chat is, in items and events."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import pydantic
from starlette.requests import Request
from starlette.responses import Response

from ling3.engine.outputs import Delta
from ling3.server import body, chat
from ling3.server.custom_tools import Custom, CustomTool, ResponseFormat
from ling3.server.errors import ApiError
from ling3.server.fields import Chat, Sampling, kind_of_tool
from ling3.server.known_fields import Known
from ling3.server.response_items import Items, messages_of
from ling3.server.running import (
    Deltas,
    Events,
    Service,
    StrictResponse,
    check,
    event,
    identifier,
    usage_of,
    while_there,
)
from ling3.server.tools import MOST, NAME, Function, Tool
from ling3.text.replies import THINK_END, TokenReply
from ling3.text.tokenizer import Tokenizer

SAME = (*Sampling.model_fields, "chat_template_kwargs")
"""Which a chat has under the same name."""
NAMES = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""A chat's fields, and what they are called here."""


class Effort(Known):
    """How much thinking there is to be; summaries are not made, so that their form may be left to the server alone."""

    kind = "reasoning"

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    """Which thinking of the conversation the model sees again: what its chat template shows."""
    mode: Literal["standard"] | None = None


class Text(Known):
    """The form of the answer."""

    kind = "text"

    format: dict[str, Any] | None = None


class Direct(Known):
    """A tool that the model calls itself, at once, and always knows."""

    kind = "response_tool"

    allowed_callers: list[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    asynchronous: Literal[False] | None = pydantic.Field(None, alias="async")


class FunctionTool(Direct):
    """A function with its type beside its name."""

    type: Literal["function"]
    name: str = pydantic.Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def as_chat(self) -> Tool:
        """The same as a chat's."""
        inner = self.model_dump(include=set(Function.model_fields), exclude_none=True)
        return Tool(type="function", function=Function(**inner))


class CustomToolParam(Direct):
    """A custom tool with its type beside its name."""

    type: Literal["custom"]
    name: str = pydantic.Field(pattern=NAME)
    description: str | None = None
    format: ResponseFormat | None = None

    @property
    def as_chat(self) -> CustomTool:
        """The same as a chat's."""
        form = None if self.format is None else self.format.as_chat
        return CustomTool(type="custom", custom=Custom(name=self.name, description=self.description, format=form))


AnyTool = Annotated[
    Annotated[FunctionTool, pydantic.Tag("of a function")]
    | Annotated[CustomToolParam, pydantic.Tag("of a custom tool")],
    pydantic.Discriminator(kind_of_tool),
]
"""A tool, by its type."""


class Options(Known):
    """How a stream reports."""

    kind = "stream_options"


class Asked(Sampling):
    """A request."""

    kind = "response"

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: Options | None = None
    max_output_tokens: int | None = None
    tools: list[AnyTool] | None = pydantic.Field(None, max_length=MOST)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Effort | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    """Of thinking, which comes as it is, there is nothing encrypted."""
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def as_chat(self, allow_unknown: bool = False) -> Chat:
        """The same as a chat; ApiError 400 for items that are none of a conversation."""
        tools = [each.as_chat for each in self.tools or ()]
        messages = messages_of(self.input, self.instructions, allow_unknown)
        if not messages:
            raise ApiError(400, "input is empty", "input")
        given = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": tools or None,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls if tools else None,
            "response_format": _format(self.text),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            **{name: getattr(self, name) for name in SAME},
        }
        return Chat(**given)


def _format(text: Text | None) -> dict[str, Any] | None:
    """A chat's `response_format`."""
    if text is None or text.format is None or text.format.get("type") != "json_schema":
        return None if text is None else text.format
    inner = {name: value for name, value in text.format.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": inner}


async def answer(request: Request) -> Response:
    """The endpoint."""
    service: Service = request.app.state.service
    asked = await body.read(request, Asked)
    service.check_model(asked.model)
    try:
        begun = await while_there(request, chat.begin(service, asked.as_chat(service.allow_unknown_fields)))
    except ApiError as error:
        raise _renamed(error) from None
    if isinstance(begun, Response):
        return begun
    deltas, (reply,), _ = begun
    stream = _Stream(service.tokenizer, _head(service, asked), deltas, reply)
    if asked.stream:
        return Events(stream.events(), stream.failed, done=False)
    whole = await while_there(request, _last(stream.objects()))
    return whole if isinstance(whole, Response) else StrictResponse(whole["response"])


def _renamed(error: ApiError) -> ApiError:
    """A chat's error in this endpoint's names."""
    message, param = str(error), error.param
    for theirs, ours in NAMES.items():
        if param is not None and param.split("[")[0].split(".")[0] == theirs:
            message, param = message.replace(param, ours).replace(theirs, ours), ours
    return ApiError(error.status, message, param, error.code, error.headers)


def _head(service: Service, asked: Asked) -> dict[str, Any]:
    effort = None if asked.reasoning is None else asked.reasoning.effort
    text = None if asked.text is None else asked.text.format
    return {
        "id": identifier("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "frequency_penalty": asked.frequency_penalty or 0.0,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "model": service.name,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "presence_penalty": asked.presence_penalty or 0.0,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": {"type": "text"} if text is None else text},
        "tool_choice": asked.tool_choice or "auto",
        "tools": [tool.model_dump(exclude=set(Direct.model_fields)) for tool in asked.tools or ()],
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": {},
    }


class _Stream:
    """A response as it comes, in numbered events."""

    def __init__(self, tokenizer: Tokenizer, head: dict[str, Any], deltas: Deltas, reply: TokenReply):
        self._tokenizer, self._head, self._deltas, self._reply = tokenizer, head, deltas, reply
        self._numbers = itertools.count()

    async def objects(self) -> AsyncIterator[list[dict[str, Any]]]:
        """The events as objects, in lists of those that are sent at once; the last event has the whole response."""
        items, last = Items(), None
        async with contextlib.aclosing(self._deltas) as deltas:  # pyright: ignore[reportArgumentType]
            yield [self._response(name, self._head) for name in ("created", "in_progress")]
            some: list[dict[str, Any]] = []
            async for _, delta in deltas:
                check(delta)
                last = delta
                for piece in chat.pieces(self._reply, delta):
                    some += map(self._numbered, items.add(piece))
                if some and delta.finish_reason is None:  # the last go with the end
                    yield some
                    some = []
        assert last is not None, "there is a last delta"
        status = "incomplete" if last.finish_reason == "length" else "completed"
        some += map(self._numbered, items.close(status))
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        made = {**self._head, "status": status, "incomplete_details": reason, "output": items.output}
        made["completed_at"] = int(time.time()) if status == "completed" else None
        made["usage"] = _usage(self._tokenizer, last, items)
        yield [*some, self._response(status, made)]

    async def events(self) -> AsyncIterator[str]:
        """The events as a client gets them."""
        async with contextlib.aclosing(self.objects()) as objects:  # pyright: ignore[reportArgumentType]
            async for some in objects:
                yield "".join(map(event, some))

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event that ends them where the answer fails."""
        said = {"code": "server_error", "message": str(error)}
        return self._response("failed", {**self._head, "status": "failed", "error": said})

    def _response(self, name: str, response: dict[str, Any]) -> dict[str, Any]:
        return self._numbered({"type": f"response.{name}", "response": response})

    def _numbered(self, said: dict[str, Any]) -> dict[str, Any]:
        return {**said, "sequence_number": next(self._numbers)}


async def _last(objects: AsyncIterator[list[dict[str, Any]]]) -> dict[str, Any]:
    some: list[dict[str, Any]] = []
    async with contextlib.aclosing(objects):  # pyright: ignore[reportArgumentType]
        async for some in objects:  # noqa: B007 -- the last one is wanted
            pass
    return some[-1]


def _usage(tokenizer: Tokenizer, last: Delta, items: Items) -> dict[str, Any]:
    assert last.output is not None, "the last delta has the output"
    counts = usage_of([last])
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": _thought(tokenizer, last.output.token_ids, items.output)},
        "total_tokens": counts["total_tokens"],
    }


def _thought(tokenizer: Tokenizer, ids: Sequence[int], output: Sequence[dict[str, Any]]) -> int:
    """How many tokens were thinking; where its end is no token, how many the tokenizer makes of its text."""
    thinking = [item["content"][0]["text"] for item in output if item["type"] == "reasoning"]
    end = tokenizer.backend.token_to_id(THINK_END)
    if not thinking:
        return 0
    if end is not None and end in ids:
        return list(ids).index(end) + 1
    return len(ids) if len(output) == 1 else len(tokenizer.encode("".join(thinking), add_special_tokens=False))
