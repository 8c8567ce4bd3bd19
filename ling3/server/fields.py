"""The requests' fields. What is not listed is refused by name; null counts as absent."""

import dataclasses
from typing import Any

import pydantic

from ling3.engine.sampling_params import SamplingParams
from ling3.server.errors import ApiError

# Which do not change the answer.
IGNORED = ("user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "store")


class Options(pydantic.BaseModel):
    """How a stream reports."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Fields(pydantic.BaseModel):
    """What chats and completions share: OpenAI's fields, and vLLM's extras under their names."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    model: str
    stream: bool | None = None
    stream_options: Options | None = None
    n: int | None = pydantic.Field(None, ge=1, le=16)
    stop: str | list[str] | None = None
    max_tokens: int | None = None
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

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: x for name, x in value.items() if x is not None and name not in IGNORED}

    def params(self, most: int, logprobs: int | None) -> SamplingParams:
        """The engine's parameters, for at most `most` tokens; ApiError 400 for senseless values."""
        same = ("n", "stop", "seed", "top_p", "presence_penalty", "frequency_penalty", "top_k", "min_p")
        same = (*same, "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")
        given = {name: x for name in same if (x := getattr(self, name)) is not None}
        temperature = 1.0 if self.temperature is None else self.temperature
        try:
            bias = None
            if self.logit_bias:
                bias = {int(token): x for token, x in self.logit_bias.items()}
            return SamplingParams(**given, temperature=temperature, max_tokens=most, logprobs=logprobs, logit_bias=bias)
        except ValueError as error:
            text = str(error).removeprefix("sampling parameters: ")
            names = {field.name for field in dataclasses.fields(SamplingParams)}
            param = next((word for word in text.split() if word in names), None)
            raise ApiError(400, text, param) from None


class Chat(Fields):
    """A request to answer a conversation."""

    messages: list[dict[str, Any]] = pydantic.Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    chat_template_kwargs: dict[str, Any] | None = None
