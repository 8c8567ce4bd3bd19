"""Fields of OpenAI's specification that no model here has: which are ignored, which are refused, and why.

A field of a request is honoured, as the models' fields are, ignored or refused; `tests/server/test_openai_schema.py`
holds the specification against these tables. What stands in none is unknown, and refused unless the server allows it.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import pydantic

from ling3.server.errors import wrong
from ling3.server.limits import FirstErrors

ALLOW = "allow_unknown_fields"
"""The key of a validation's context that says whether unknown fields are ignored."""

CACHING = "known prefixes are always used, and change no bit of an answer"
ACCOUNT = "it is about the account or the end user"
REQUEST = {
    "user": ACCOUNT,
    "metadata": "labels for requests that are stored",
    "client_metadata": "labels that Codex gives its requests",
    "service_tier": "there is one tier",
    "safety_identifier": ACCOUNT,
    "prompt_cache_key": CACHING,
    "prompt_cache_options": CACHING,
    "prompt_cache_retention": CACHING,
}
VERBOSITY = "a wish for the length of answers, which no chat template knows"
IGNORED: Mapping[str, Mapping[str, str]] = {
    "chat": {
        **REQUEST,
        "store": "nothing is stored",
        "verbosity": VERBOSITY,
        "prediction": "a guess at the answer, which only makes it faster",
    },
    "completion": {**REQUEST, "store": "nothing is stored"},
    "response": {
        **REQUEST,
        "max_tool_calls": "it counts calls of built-in tools, which there are none of",
        "image": "it is about images, which are refused",
    },
    "stream_options": {"include_obfuscation": "padding against those who see the sizes of packets"},
    "text": {"verbosity": VERBOSITY},
    "function": {},
    "response_tool": {"output_schema": "it is for programs that call tools, which are refused"},
    "message": {"annotations": "citations beside the text, which stays the same"},
    "part": {
        "prompt_cache_breakpoint": CACHING,
        "annotations": "citations beside the text, which stays the same",
        "logprobs": "of a text that was said before",
    },
    "item": {
        "id": "nothing is stored under it",
        "status": "an item that comes back has ended",
        "phase": "a label of the message, which no chat template knows",
        "summary": "the thinking is in `content`",
        "encrypted_content": "the thinking is in `content`",
    },
}
"""What changes no answer, with the reason, by what has the field."""

MODERATION = "answers are not moderated here"
TOOLS = "give `tools` and `tool_choice`"
NOTHING_STORED = "nothing is stored here: give the whole conversation as `input`"
PROGRAMS = "models do not write programs that call tools here"
REFUSED: Mapping[str, Mapping[str, str]] = {
    "chat": {
        "audio": "answers are text",
        "moderation": MODERATION,
        "web_search_options": "there is no web search",
        "functions": TOOLS,
        "function_call": TOOLS,
    },
    "completion": {"suffix": "models continue texts, and fill no gaps"},
    "response": {
        "access_programs": "they are those of OpenAI's accounts",
        "background_options": "requests are answered at once",
        "context_management": "conversations are not compacted",
        "conversation": NOTHING_STORED,
        "previous_response_id": NOTHING_STORED,
        "prompt": "there are no stored prompts: give `instructions` and `input`",
        "moderation": MODERATION,
        "top_logprobs": "ask /v1/chat/completions for log-probabilities",
    },
    "reasoning": {"generate_summary": "thinking comes as it is, without summaries"},
    "message": {"audio": "messages are text", "function_call": "give `tool_calls`"},
    "item": {"caller": PROGRAMS, "namespace": "tools have no namespaces here", "async": "calls are not asynchronous"},
}
"""What would change an answer or what comes beside it, and cannot be had, with what a client is told."""


class Known(FirstErrors):
    """A part of a request. Null counts as absent, and so do fields that change no answer."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    kind: ClassVar[str] = ""
    """Its name in the tables."""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _known(cls, value: Any, info: Any) -> Any:  # a ValidationInfo, which no run-time check knows
        if not isinstance(value, dict):
            return value
        ignored, refused = IGNORED.get(cls.kind, {}), REFUSED.get(cls.kind, {})
        given = {name: x for name, x in value.items() if x is not None and name not in ignored}
        if cls.kind in ("chat", "completion", "response"):
            for name in filter(refused.__contains__, given):
                raise wrong(name, f"is not supported: {refused[name]}", "unsupported_parameter")
        if (info.context or {}).get(ALLOW):
            names = {field.alias or name for name, field in cls.model_fields.items()} | refused.keys()
            given = {name: x for name, x in given.items() if name in names}
        return given


def check_names(kind: str, given: Mapping[str, Any], honoured: set[str], where: str, allow: bool) -> None:
    """ApiError 400 for a field of a message or an item that is neither honoured nor ignored; null counts as absent."""
    refused = REFUSED.get(kind, {})
    for name, value in given.items():
        if name in honoured or name in IGNORED[kind] or value is None or (allow and name not in refused):
            continue
        why = f": {refused[name]}" if name in refused else ""
        raise wrong(f"{where}.{name}", f"is not supported{why}", "unsupported_parameter")
