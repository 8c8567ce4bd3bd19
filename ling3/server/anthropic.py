"""`/v1/messages` and its `/count_tokens`, Anthropic's protocol: answers as a chat's, in content blocks and events."""

import asyncio
from typing import Any, Literal

import pydantic
from starlette.responses import JSONResponse, Response

from ling3.engine.outputs import Completion, Delta, RequestOutput
from ling3.server import chat
from ling3.server.anthropic_blocks import Blocks, conversation
from ling3.server.errors import ApiError, renamed, wrong
from ling3.server.events import ProtocolAnswer, event, identifier, respond, usage_of
from ling3.server.fields import COMMON, Chat, Sampling, honoured
from ling3.server.known_fields import ACCOUNT, CACHING, FieldNames, Known, List
from ling3.server.reply_grammars import Callable
from ling3.server.service import Service
from ling3.server.tools import MOST
from ling3.text.json_text import dumped
from ling3.text.replies import TokenReply
from ling3.text.tokenizer import Tokenizer

SAME = (*Sampling.model_fields, "chat_template_kwargs")
"""A chat's fields of the same names."""
NAMES = {
    "messages": "messages",
    "reasoning_effort": "thinking",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice",
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
}
"""A chat's fields, and what they are called here."""
EFFORTS = {2048: "low", 4096: "medium"}
"""Budgets of thinking, in tokens, below which the effort is this; it is high for larger ones, as in LiteLLM."""


class InputTool(Known):
    """A function that the model may call."""

    names = FieldNames(
        {
            "cache_control": CACHING,
            "eager_input_streaming": "every answer is streamed as it comes",
            "input_examples": "no chat template has a place for them",
        }
    )

    type: Literal["custom"] | None = None
    name: str = pydantic.Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    allowed_callers: List[Literal["direct"]] | None = None
    defer_loading: Literal[False] | None = None

    @property
    def callable(self) -> Callable:
        """The function as the chat template shows it to the model."""
        shown = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        shown = {name: value for name, value in shown.items() if value is not None}
        return Callable(self.name, self.input_schema, bool(self.strict), shown=shown)


class ToolChoice(Known):
    """Whether tools are called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @pydantic.model_validator(mode="after")
    def _whole(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("expected a name for the type tool alone")
        return self

    @property
    def of_chat(self) -> str | dict[str, Any]:
        """The choice in the form of a chat's `tool_choice`."""
        if self.type == "tool":
            return {"type": "function", "name": self.name}
        return "required" if self.type == "any" else self.type


class ThinkingConfig(Known):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = pydantic.Field(None, ge=1024)
    """How much thinking there may be, as an effort: nothing cuts thinking off at a number of tokens."""
    display: Literal["summarized", "omitted"] | None = None
    """Thinking comes as it is, without summaries, unless it is `omitted`."""

    @pydantic.model_validator(mode="after")
    def _whole(self) -> "ThinkingConfig":
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError("expected budget_tokens for the type enabled alone")
        return self


class JSONFormat(Known):
    """A JSON schema that the answer's text must satisfy."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = pydantic.Field(alias="schema")


class OutputConfig(Known):
    """The form of the answer, and how much effort goes into it."""

    names = FieldNames(refused={"task_budget": "no chat template has a place for it"})

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JSONFormat | None = None


class ClearThinking(Known):
    """Leaves out earlier thinking of the conversation; the chat template decides which the model sees again."""

    names = FieldNames({"keep": "it is what the chat template shows"})

    type: Literal["clear_thinking_20251015"]


class ContextManagement(Known):
    """Changes to the conversation before the model sees it."""

    edits: List[ClearThinking] | None = None


class CountTokens(Known):
    """A request for the number of tokens of a conversation."""

    names = FieldNames(
        {
            "cache_control": CACHING,
            "metadata": ACCOUNT,
            "service_tier": "there is one tier",
            "inference_geo": "the model runs where this server does",
            "speed": "there is one speed",
            "fallbacks": "the model that is asked answers",
            "fallback_credit_token": ACCOUNT,
        },
        {
            "container": "there are no containers",
            "mcp_servers": "the server calls no tools",
            "diagnostics": "nothing is stored under the id of an answer",
            "output_format": "give `output_config.format`",
        },
    )

    model: str
    messages: List[dict[str, Any]] = pydantic.Field(min_length=1)
    system: str | List[dict[str, Any]] | None = None
    tools: List[InputTool] | None = pydantic.Field(None, max_length=MOST)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def offered(self) -> list[Callable]:
        """The tools as functions that the model may call."""
        return [each.callable for each in self.tools or ()]

    @property
    def effort(self) -> str | None:
        """The effort of the thinking: a chat's `reasoning_effort`, or None if `thinking` is absent."""
        if self.thinking is None or self.thinking.type == "disabled":
            return self.thinking and "none"
        if self.output_config is not None and self.output_config.effort is not None:
            return self.output_config.effort
        budget = self.thinking.budget_tokens or max(EFFORTS)
        return next((effort for below, effort in EFFORTS.items() if budget < below), "high")

    async def as_chat(self, service: Service) -> tuple[Chat, str]:
        """The request as a chat, without its tools, and the beginning of the answer.

        Raises ApiError 400 for blocks that a conversation cannot have.
        """
        messages, prefill = conversation(self.messages, self.system, service.allow_unknown_fields)
        effort, output, choice = self.effort, self.output_config or OutputConfig(), self.tool_choice
        if self.thinking is not None and self.thinking.type == "adaptive":
            # The model decides, so that one whose template has no switch does so anyway.
            effort = effort if await asyncio.to_thread(lambda: service.tokenizer.thinking_switch) else None
        schema = None if output.format is None else {"schema": output.format.schema_}
        given = {name: value for name, value in self if name in SAME and value is not None}
        given |= {
            "model": self.model,
            "messages": messages,
            "reasoning_effort": effort,
            "response_format": schema and {"type": "json_schema", "json_schema": schema},
            "tool_choice": choice and choice.of_chat,
            "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        }
        return Chat.model_construct(**given), prefill  # whose fields have been validated here


class MessagesRequest(pydantic.create_model("Sampled", __base__=CountTokens, **COMMON)):
    """The fields of a request for `/v1/messages`."""

    max_tokens: int = pydantic.Field(ge=1)
    stream: bool | None = None
    stop_sequences: List[str] | None = honoured("stop")
    temperature: float | None = honoured("temperature", ge=0, le=1)
    top_p: float | None = honoured("top_p", ge=0, le=1)
    top_k: int | None = honoured("top_k", ge=0)
    seed: int | None = honoured("seed", ge=-(2**63), lt=2**63)


async def answer(service: Service, asked: MessagesRequest) -> Response:
    """Answers a request for `/v1/messages`, in one body or as a stream."""
    budget = asked.thinking and asked.thinking.budget_tokens
    if budget is not None and budget >= asked.max_tokens:
        raise wrong(
            "thinking.budget_tokens", f"is {budget}, expected less than max_tokens, which is {asked.max_tokens}"
        )
    chat_alike, prefill = await asked.as_chat(service)
    try:
        more = {"max_completion_tokens": asked.max_tokens, "stop": asked.stop_sequences, "top_k": asked.top_k or None}
        chat_alike = chat_alike.model_copy(update=more)
        deltas, (reply,), tokens = await chat.begin(service, chat_alike, asked.offered, prefill, cut=True)
    except ApiError as error:
        raise renamed(error, NAMES) from None
    return await respond(_Message(service.tokenizer, asked, reply, tokens), deltas, asked.stream)


async def count_tokens(service: Service, asked: CountTokens) -> Response:
    """Answers a request for the number of tokens of a conversation."""
    chat_alike, prefill = await asked.as_chat(service)
    try:
        prompt = await chat.prompt(service, chat_alike, asked.offered, prefill)
    except ApiError as error:
        raise renamed(error, NAMES) from None
    return JSONResponse({"input_tokens": len(prompt.ids)})


class _Message(ProtocolAnswer):
    """A message, as content blocks and their events."""

    def __init__(self, tokenizer: Tokenizer, asked: MessagesRequest, reply: TokenReply, prompt_tokens: int):
        self._tokenizer, self._asked, self._reply, self._prompt = tokenizer, asked, reply, prompt_tokens
        self._blocks = Blocks(asked.thinking is not None and asked.thinking.display == "omitted")
        self._head = {"id": identifier("msg"), "type": "message", "role": "assistant", "model": asked.model}

    async def whole(self, outputs: list[RequestOutput]) -> str:
        for _ in (*self._add(outputs[0].outputs[0]), *self._blocks.close()):
            pass
        ended = {**self._stopped(outputs[0].outputs[0]), "usage": self._usage(outputs[0])}
        return dumped({**self._head, "content": self._blocks.content, **ended})

    def begin(self) -> str:
        usage = _usage(self._prompt, 0, 0, 0)
        message = {**self._head, "content": [], **_stop(None), "usage": usage}
        return event({"type": "message_start", "message": message}) + event({"type": "ping"})

    async def news(self, place: int, delta: Delta) -> str:
        return "".join(map(event, self._add(delta)))

    def end(self, outputs: list[RequestOutput]) -> str:
        usage = self._usage(outputs[0])
        del usage["cache_creation"], usage["inference_geo"], usage["service_tier"]
        ended = {"type": "message_delta", "delta": self._stopped(outputs[0].outputs[0]), "usage": usage}
        return "".join(map(event, [*self._blocks.close(), ended, {"type": "message_stop"}]))

    def failed(self, error: ApiError) -> str:
        return event(error.anthropic_body)

    def _add(self, said: Delta | Completion) -> list[dict[str, Any]]:
        return [new for piece in chat.pieces(self._reply, said) for new in self._blocks.add(piece)]

    def _stopped(self, completion: Completion) -> dict[str, Any]:
        """Why the answer has ended."""
        if completion.finish_reason == "length":
            asked = len(completion.token_ids) >= self._asked.max_tokens
            return _stop("max_tokens" if asked else "model_context_window_exceeded")
        if isinstance(completion.stop_reason, str):
            return _stop("stop_sequence", completion.stop_reason)
        return _stop("tool_use" if self._reply.reply.calls else "end_turn")

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        usage, content = usage_of([output]), self._blocks.content
        alone = len(content) == 1
        thought = chat.thinking_tokens(self._tokenizer, output.token_ids, self._blocks.thinking, alone)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return _usage(usage["prompt_tokens"], cached, usage["completion_tokens"], thought)


def _stop(reason: str | None, sequence: str | None = None) -> dict[str, Any]:
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None, "container": None}


def _usage(prompt: int, cached: int, new: int, thought: int) -> dict[str, Any]:
    """The usage of an answer: cached tokens of the prompt do not count among its `input_tokens`."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "cache_creation": None,
        "output_tokens": new,
        "output_tokens_details": {"thinking_tokens": thought},
        "server_tool_use": None,
        "inference_geo": None,
        "service_tier": "standard",
    }
