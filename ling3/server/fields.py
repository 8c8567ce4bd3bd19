"""The fields of completion and chat requests. A field neither declared here nor in `names` is refused by name."""

# pyright: reportMissingImports=false
# The imports need an extra, and types are checked without it too.

from typing import Any, Literal

import pydantic

from ling3.engine.sampling_params import MAX_SEED, SamplingParams
from ling3.engine.structured import Choice, Grammar, JSONObject, JSONSchema, Regex, Structured
from ling3.runtime.parameters import ParameterError, meanings, parameters
from ling3.server.custom_tools import CustomTool
from ling3.server.errors import ApiError
from ling3.server.known_fields import MODERATION, REQUEST, VERBOSITY, FieldNames, Known, List
from ling3.server.reply_grammars import Callable
from ling3.server.tools import MOST, Tool, ToolOf

TOOLS = "give `tools` and `tool_choice`"
SEEDS = MAX_SEED + 1
"""The number of seeds that the engine has; OpenAI's 64-bit seeds are taken modulo this number."""

# Fields that constrain the text; a request may have one of them.
GRAMMARS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
KINDS = {"json": JSONSchema, "regex": Regex, "choice": Choice, "grammar": Grammar}


class Options(Known):
    """Options of a stream: when it reports the usage."""

    names = FieldNames({"include_obfuscation": "padding against those who see the sizes of packets"})

    include_usage: bool | None = None
    """Whether a last event has the usage."""
    continuous_usage_stats: bool | None = None
    """vLLM's extension: whether every event has the usage so far."""


def honoured(name: str, **bounds: Any) -> Any:
    """A request's optional field for the engine's parameter `name`, with its meaning, and its bounds unless given."""
    if not bounds and name in parameters(SamplingParams):
        bounds = {**parameters(SamplingParams)[name].bounds}
    return pydantic.Field(None, description=meanings(SamplingParams)[name], **bounds)


COMMON: dict[str, Any] = {
    name: (each.kind | None, honoured(name)) for name, each in parameters(SamplingParams).items() if each.common
}
"""The engine's parameters that requests have under the same names, as pydantic fields."""


class Sampling(pydantic.create_model("Common", __base__=Known, **COMMON)):
    """How answers are sampled and where they end: the engine's parameters, some with OpenAI's bounds."""

    stop: str | List[str] | None = honoured("stop")
    seed: int | None = honoured("seed", ge=-(2**63), lt=2**63)
    temperature: float | None = honoured("temperature", ge=0, le=2)
    top_p: float | None = honoured("top_p", ge=0, le=1)
    top_k: int | None = honoured("top_k", ge=-1)
    presence_penalty: float | None = honoured("presence_penalty", ge=-2, le=2)
    frequency_penalty: float | None = honoured("frequency_penalty", ge=-2, le=2)
    logit_bias: dict[str, float] | None = honoured("logit_bias")
    stop_token_ids: List[int] | None = honoured("stop_token_ids")


class Fields(Sampling):
    """The fields that chats and completions share: OpenAI's fields, and vLLM's extras under their names."""

    model: str
    stream: bool | None = None
    stream_options: Options | None = None
    n: int | None = honoured("n", ge=1, le=16)
    max_tokens: int | None = honoured("max_tokens")
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: List[str] | None = None
    guided_grammar: str | None = None

    @property
    def grammar(self) -> str | None:
        """The name of the field that constrains the text, or None. Raises ApiError 400 if there are several."""
        names = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(names) > 1:
            raise ApiError(400, f"{' and '.join(names)} exclude each other", names[1])
        return names[0] if names else None

    def params(self, most: int, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
        """The engine's parameters, for at most `most` new tokens. Raises ApiError 400 for invalid values."""
        name = self.grammar
        try:
            structured = None if name is None else _structured(name, getattr(self, name))
        except ValueError as error:
            raise ApiError(400, f"{name}: {error}", name) from None
        given = {name: x for name in (*Sampling.model_fields, "n") if (x := getattr(self, name)) is not None}
        given = {"temperature": 1.0, **given, "max_tokens": most, "structured": structured}
        if self.top_p == 0:  # the smallest nucleus is the likeliest token alone
            given |= {"temperature": 0.0, "top_p": 1.0}
        if self.seed is not None:
            given["seed"] = self.seed % SEEDS
        try:
            given["logit_bias"] = self.logit_bias and {int(token): x for token, x in self.logit_bias.items()}
        except ValueError:
            raise ApiError(400, "logit_bias: expected token ids as keys", "logit_bias") from None
        try:
            return SamplingParams(**given, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        except ParameterError as error:
            raise ApiError(400, "; ".join(text for _, text in error.problems), error.field) from None


def _structured(name: str, value: Any) -> Structured | None:
    """The constraint on the text that a field describes. Raises ValueError if it is invalid."""
    if name == "response_format":
        return _formatted(value)
    if name.startswith("guided_"):
        return KINDS[name.removeprefix("guided_")](value)
    given = {kind: x for kind, x in value.items() if x is not None}
    if len(given) != 1 or not given.keys() <= {*KINDS, "json_object"}:
        raise ValueError(f"expected one of json_object, {', '.join(KINDS)}")
    [(kind, x)] = given.items()
    if kind != "json_object":
        return KINDS[kind](x)
    if x is not True:
        raise ValueError("json_object: expected true")
    return JSONObject()


def _formatted(value: dict[str, Any]) -> Structured | None:
    kind, inner = value.get("type"), value.get("json_schema")
    wanted = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
    if not isinstance(kind, str) or kind not in wanted:
        raise ValueError(f"type: expected one of {', '.join(wanted)}")
    if value.keys() != wanted[kind]:
        raise ValueError(f"expected {' and '.join(sorted(wanted[kind]))} alone for the type {kind}")
    if kind != "json_schema":
        return JSONObject() if kind == "json_object" else None
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
        raise ValueError("json_schema.schema: expected an object")
    if unknown := inner.keys() - {"name", "description", "schema", "strict"}:
        raise ValueError(f"json_schema.{min(unknown)} is not supported")
    return JSONSchema(inner["schema"])


class Completion(Fields):
    """A request to continue texts or token ids."""

    names = FieldNames({**REQUEST, "store": "nothing is stored"}, {"suffix": "models continue texts, and fill no gaps"})

    prompt: str | List[str] | List[int] | List[List[int]]
    logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    echo: bool | None = None
    best_of: Literal[1] | None = None


class Chat(Fields):
    """A request to answer a conversation."""

    names = FieldNames(
        {
            **REQUEST,
            "store": "nothing is stored",
            "verbosity": VERBOSITY,
            "prediction": "a guess at the answer, which only makes it faster",
        },
        {
            "audio": "answers are text",
            "moderation": MODERATION,
            "web_search_options": "there is no web search",
            "functions": TOOLS,
            "function_call": TOOLS,
        },
    )

    messages: List[dict[str, Any]] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: List[ToolOf[Tool, CustomTool]] | None = pydantic.Field(None, max_length=MOST)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: List[Literal["text"]] | None = None

    @property
    def offered(self) -> list[Callable]:
        """The tools as functions that the model may call."""
        return [each.callable for each in self.tools or ()]
