"""The requests' fields. What is not listed is refused by name; null counts as absent."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import dataclasses
from typing import Any, Literal

import pydantic

from ling3.engine.sampling_params import SamplingParams
from ling3.engine.structured import Choice, Grammar, JSONObject, JSONSchema, Regex, Structured
from ling3.server.errors import ApiError
from ling3.server.limits import FirstErrors
from ling3.server.tools import MOST, Tool

# Which do not change the answer.
IGNORED = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "store")

# Which say what the text may be.
GRAMMARS = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)
KINDS = {"json": JSONSchema, "regex": Regex, "choice": Choice, "grammar": Grammar}


class Options(pydantic.BaseModel):
    """How a stream reports."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampling(FirstErrors):
    """How answers are drawn and where they end."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    stop: str | list[str] | None = None
    seed: int | None = None
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = None
    presence_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    frequency_penalty: float | None = pydantic.Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None


class Fields(Sampling):
    """What chats and completions share: OpenAI's fields, and vLLM's extras under their names."""

    model: str
    stream: bool | None = None
    stream_options: Options | None = None
    n: int | None = pydantic.Field(None, ge=1, le=16)
    max_tokens: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: x for name, x in value.items() if x is not None and name not in IGNORED}

    @property
    def grammar(self) -> str | None:
        """The field that says what the text may be; ApiError 400 if several do."""
        names = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(names) > 1:
            raise ApiError(400, f"{' and '.join(names)} exclude each other", names[1])
        return names[0] if names else None

    def params(self, most: int, logprobs: int | None, prompt_logprobs: int | None = None) -> SamplingParams:
        """The engine's parameters, for at most `most` tokens; ApiError 400 for senseless values."""
        name = self.grammar
        try:
            structured = None if name is None else _structured(name, getattr(self, name))
        except ValueError as error:
            raise ApiError(400, f"{name}: {error}", name) from None
        same = ("n", "stop", "seed", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p")
        same = (*same, "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")
        given: dict[str, Any] = {name: x for name in same if (x := getattr(self, name)) is not None}
        temperature = 1.0 if self.temperature is None else self.temperature
        try:
            bias = self.logit_bias and {int(token): x for token, x in self.logit_bias.items()}
        except ValueError:
            raise ApiError(400, "logit_bias: expected token ids as keys", "logit_bias") from None
        try:
            given |= {"temperature": temperature, "max_tokens": most, "logit_bias": bias, "structured": structured}
            return SamplingParams(**given, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        except ValueError as error:
            text = str(error).removeprefix("sampling parameters: ")
            names = {field.name for field in dataclasses.fields(SamplingParams)}
            param = next((word for word in text.split() if word in names), None)
            raise ApiError(400, text, param) from None


def _structured(name: str, value: Any) -> Structured | None:
    """What a field says the text may be; ValueError for what it may not say."""
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
    """A request to continue texts or ids."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    echo: bool | None = None


class Chat(Fields):
    """A request to answer a conversation."""

    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    tools: list[Tool] | None = pydantic.Field(None, min_length=1, max_length=MOST)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
