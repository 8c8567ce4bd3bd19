"""`/v1/responses`, without storage: the conversation comes whole, and is answered as a chat is, in items and events."""

import itertools
import time
from typing import Any, Literal

import pydantic
from starlette.responses import Response

from ling3.engine.outputs import Completion, Delta, RequestOutput
from ling3.server import chat
from ling3.server.custom_tools import Custom, ResponseFormat
from ling3.server.errors import ApiError, renamed
from ling3.server.events import ProtocolAnswer, event, identifier, respond, usage_of
from ling3.server.fields import Chat, Sampling
from ling3.server.fields import Options as StreamOptions
from ling3.server.known_fields import MODERATION, REQUEST, VERBOSITY, FieldNames, Known, List
from ling3.server.response_items import Items, messages_of
from ling3.server.service import Service
from ling3.server.tools import MOST, Function, ToolOf
from ling3.text.json_text import dumped
from ling3.text.replies import TokenReply
from ling3.text.tokenizer import Tokenizer

SAME = (*Sampling.model_fields, "chat_template_kwargs")
"""Which a chat has under the same name."""
NOTHING_STORED = "nothing is stored here: give the whole conversation as `input`"
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

    names = FieldNames(refused={"generate_summary": "thinking comes as it is, without summaries"})

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = None
    context: Literal["auto"] | None = None
    """Which thinking of the conversation the model sees again: what its chat template shows."""
    mode: Literal["standard"] | None = None


class Text(Known):
    """The form that the answer's text must have."""

    names = FieldNames({"verbosity": VERBOSITY})

    format: dict[str, Any] | None = None


class Direct(Known):
    """A tool that the model calls itself, at once, and always knows."""

    names = FieldNames({"output_schema": "it is for programs that call tools, which are refused"})

    allowed_callers: List[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None
    asynchronous: Literal[False] | None = pydantic.Field(None, alias="async")


class FunctionTool(Direct, Function):
    """A function with its type beside its name."""

    type: Literal["function"]


class CustomToolParam(Direct, Custom):
    """A custom tool with its type beside its name."""

    type: Literal["custom"]
    format: ResponseFormat | None = None  # pyright: ignore[reportIncompatibleVariableOverride]


class Options(Known):
    """Options of a stream: what it reports beside texts."""

    names = StreamOptions.names


class Asked(Sampling):
    """The fields of a request for `/v1/responses`."""

    names = FieldNames(
        {
            **REQUEST,
            "max_tool_calls": "it counts calls of built-in tools, which there are none of",
            "image": "it is about images, which are refused",
        },
        {
            "access_programs": "they are those of OpenAI's accounts",
            "background_options": "requests are answered at once",
            "context_management": "conversations are not compacted",
            "conversation": NOTHING_STORED,
            "previous_response_id": NOTHING_STORED,
            "prompt": "there are no stored prompts: give `instructions` and `input`",
            "moderation": MODERATION,
            "top_logprobs": "ask /v1/chat/completions for log-probabilities",
        },
    )

    model: str
    input: str | List[dict[str, Any]]
    instructions: str | None = None
    stream: bool | None = None
    stream_options: Options | None = None
    max_output_tokens: int | None = None
    tools: List[ToolOf[FunctionTool, CustomToolParam]] | None = pydantic.Field(None, max_length=MOST)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Effort | None = None
    include: List[Literal["reasoning.encrypted_content"]] | None = None
    """Of thinking, which comes as it is, there is nothing encrypted."""
    truncation: Literal["disabled"] | None = None
    store: Literal[False] | None = None
    background: Literal[False] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def as_chat(self, allow_unknown: bool = False) -> Chat:
        """The request as a chat, without its tools. Raises ApiError 400 for items that a conversation cannot have."""
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
    """Answers requests for `/v1/responses`, whole or as a stream."""
    try:
        chat_alike = asked.as_chat(service.allow_unknown_fields)
        deltas, (reply,), _ = await chat.begin(service, chat_alike, [each.callable for each in asked.tools or ()])
    except ApiError as error:
        raise renamed(error, NAMES) from None
    return await respond(_Response(service.tokenizer, _head(asked), reply), deltas, asked.stream)


def _head(asked: Asked) -> dict[str, Any]:
    reasoning = asked.reasoning or Effort()
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
        "max_tool_calls": None,
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "presence_penalty": asked.presence_penalty or 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "safety_identifier": None,
        "service_tier": "default",
        "store": False,
        "temperature": 1.0 if asked.temperature is None else asked.temperature,
        "text": {"format": {"type": "text"} if text is None else text},
        "tool_choice": asked.tool_choice or "auto",
        "tools": [tool.model_dump(exclude=set(Direct.model_fields)) for tool in asked.tools or ()],
        "top_logprobs": 0,
        "top_p": 1.0 if asked.top_p is None else asked.top_p,
        "truncation": "disabled",
        "usage": None,
        "metadata": {},
    }


class _Response(ProtocolAnswer):
    """A response, as numbered events."""

    def __init__(self, tokenizer: Tokenizer, head: dict[str, Any], reply: TokenReply):
        self._tokenizer, self._head, self._reply = tokenizer, head, reply
        self._items, self._numbers = Items(), itertools.count()

    async def whole(self, outputs: list[RequestOutput]) -> str:
        self._add(outputs[0].outputs[0])
        return dumped(self._ended(outputs[0])[-1]["response"])

    def begin(self) -> str:
        return "".join(event(self._whole(name, self._head)) for name in ("created", "in_progress"))

    async def news(self, place: int, delta: Delta) -> str:
        return "".join(map(event, self._add(delta)))

    def end(self, outputs: list[RequestOutput]) -> str:
        return "".join(map(event, self._ended(outputs[0])))

    def failed(self, error: ApiError) -> str:
        said = {"code": "server_error", "message": str(error)}
        return event(self._whole("failed", {**self._head, "status": "failed", "error": said}))

    def _add(self, said: Delta | Completion) -> list[dict[str, Any]]:
        return [self._numbered(new) for piece in chat.pieces(self._reply, said) for new in self._items.add(piece)]

    def _ended(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The events of the end; the last one has the whole response."""
        cut, usage = output.finish_reason == "length", usage_of([output])
        status = "incomplete" if cut else "completed"
        some = [self._numbered(said) for said in self._items.close(status)]
        items = self._items.output
        thinking = "".join(item["content"][0]["text"] for item in items if item["type"] == "reasoning")
        thought = chat.thinking_tokens(self._tokenizer, output.token_ids, thinking, len(items) == 1)
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

    def _whole(self, name: str, response: dict[str, Any]) -> dict[str, Any]:
        return self._numbered({"type": f"response.{name}", "response": response})

    def _numbered(self, said: dict[str, Any]) -> dict[str, Any]:
        return {**said, "sequence_number": next(self._numbers)}
