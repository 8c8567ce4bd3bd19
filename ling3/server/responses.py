"""`/v1/responses`, without storage: the conversation comes whole, and is answered as a chat is, in items and events."""

import itertools
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Annotated, Any, Literal

import pydantic
from starlette.responses import Response

from ling3.engine.outputs import Delta, RequestOutput
from ling3.server import chat
from ling3.server.custom_tools import Custom, ResponseFormat
from ling3.server.errors import ApiError
from ling3.server.events import Events, StrictResponse, event, identifier, outputs_of, streamed, usage_of
from ling3.server.fields import Chat, Sampling, kind_of_tool
from ling3.server.known_fields import Known
from ling3.server.response_items import Items, messages_of
from ling3.server.service import Deltas, Service
from ling3.server.tools import MOST, Function
from ling3.text.replies import THINK_END, Piece, TokenReply
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


class FunctionTool(Direct, Function):
    """A function with its type beside its name."""

    type: Literal["function"]


class CustomToolParam(Direct, Custom):
    """A custom tool with its type beside its name."""

    type: Literal["custom"]
    format: ResponseFormat | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


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
        """The same as a chat, but for its tools; ApiError 400 for items that are none of a conversation."""
        messages = messages_of(self.input, self.instructions, allow_unknown)
        if not messages:
            raise ApiError(400, "input is empty", "input")
        given = {
            "model": self.model,
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls if self.tools else None,
            "response_format": _format(self.text),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            **{name: getattr(self, name) for name in SAME},
        }
        return Chat.model_construct(**given)  # whose fields have been validated here


def _format(text: Text | None) -> dict[str, Any] | None:
    """A chat's `response_format`."""
    if text is None or text.format is None or text.format.get("type") != "json_schema":
        return None if text is None else text.format
    inner = {name: value for name, value in text.format.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": inner}


async def answer(service: Service, asked: Asked) -> Response:
    """The endpoint."""
    try:
        chat_alike = asked.as_chat(service.allow_unknown_fields)
        deltas, (reply,), _ = await chat.begin(service, chat_alike, [each.callable for each in asked.tools or ()])
    except ApiError as error:
        raise _renamed(error) from None
    made = _Response(service.tokenizer, _head(service, asked))
    if asked.stream:
        return Events(made.events(deltas, reply), made.failed, done=False)
    [output] = await outputs_of(deltas)
    made.add(chat.pieces(reply, output.outputs[0]))
    return StrictResponse(made.end(output)[-1]["response"])


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


class _Response:
    """A response as it comes, in numbered events."""

    def __init__(self, tokenizer: Tokenizer, head: dict[str, Any]):
        self._tokenizer, self._head, self._items, self._numbers = tokenizer, head, Items(), itertools.count()

    def events(self, deltas: Deltas, reply: TokenReply) -> AsyncGenerator[str, None]:
        """The events as a client gets them."""

        async def news(place: int, delta: Delta) -> str:
            return "".join(map(event, self.add(chat.pieces(reply, delta))))

        begin = [self._whole(name, self._head) for name in ("created", "in_progress")]
        end = lambda outputs: "".join(map(event, self.end(outputs[0])))  # noqa: E731
        return streamed(deltas, 1, "".join(map(event, begin)), news, end)

    def add(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        """The events of pieces of the reply."""
        return [self._numbered(said) for piece in pieces for said in self._items.add(piece)]

    def end(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The events of the end; the last one has the whole response."""
        cut, usage = output.finish_reason == "length", usage_of([output])
        status = "incomplete" if cut else "completed"
        some = [self._numbered(said) for said in self._items.close(status)]
        thought = _thought(self._tokenizer, output.token_ids, self._items.output)
        made = {
            **self._head,
            "status": status,
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items.output,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": thought},
                "total_tokens": usage["total_tokens"],
            },
        }
        return [*some, self._whole(status, made)]

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The event that ends them where the answer fails."""
        said = {"code": "server_error", "message": str(error)}
        return self._whole("failed", {**self._head, "status": "failed", "error": said})

    def _whole(self, name: str, response: dict[str, Any]) -> dict[str, Any]:
        return self._numbered({"type": f"response.{name}", "response": response})

    def _numbered(self, said: dict[str, Any]) -> dict[str, Any]:
        return {**said, "sequence_number": next(self._numbers)}


def _thought(tokenizer: Tokenizer, ids: Sequence[int], output: Sequence[dict[str, Any]]) -> int:
    """How many tokens were thinking; where its end is no token, how many the tokenizer makes of its text."""
    thinking = [item["content"][0]["text"] for item in output if item["type"] == "reasoning"]
    end = tokenizer.backend.token_to_id(THINK_END)
    if not thinking:
        return 0
    if end is not None and end in ids:
        return list(ids).index(end) + 1
    return len(ids) if len(output) == 1 else len(tokenizer.encode("".join(thinking), add_special_tokens=False))
