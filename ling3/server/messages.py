"""Converts a conversation's messages for a chat template, and renders the prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

from ling3.server.errors import ApiError, wrong
from ling3.server.known_fields import CACHING, CITATIONS, FieldNames
from ling3.server.service import Service
from ling3.text.custom_inputs import INPUT
from ling3.text.json_text import loaded
from ling3.text.replies import opens_thinking

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
CALLS = {"call": ("function", "arguments"), "custom": ("custom", "input")}
"""For each kind of piece that begins a call: the call's type in a chat, and the field with its text."""
GOES_ON = {"arguments": "call", "input": "custom"}
"""Kinds of pieces that continue a call, and the kind that begins it."""
MESSAGE_NAMES = FieldNames(
    {"annotations": CITATIONS},
    {"audio": "messages are text", "function_call": "give `tool_calls`"},
)
PART_NAMES = FieldNames(
    {"prompt_cache_breakpoint": CACHING, "annotations": CITATIONS, "logprobs": "of a text that was said before"}
)
KNOWN = {"role", "content", "name"}
OF_ROLE = {
    "assistant": {*KNOWN, "refusal", "reasoning_content", "reasoning", "tool_calls"},
    "tool": {*KNOWN, "tool_call_id"},
}
PARTS = {"text": "text", "refusal": "refusal"}
"""Types of parts of a message's content, and the field with each one's text."""


def rendered(
    service: Service,
    given: Sequence[dict[str, Any]],
    variables: Mapping[str, Any] | None,
    tools: Sequence[dict[str, Any]] = (),
    prefill: str = "",
) -> tuple[str, list[int]]:
    """The rendered prompt and its token ids; `prefill` is the beginning of the answer, and the prompt's end.

    Raises ApiError 400, which names no file, for invalid messages.
    """
    called: dict[str, str] = {}
    allow = service.allow_unknown_fields
    messages = [_message(message, f"messages[{i}]", called, allow) for i, message in enumerate(given)]
    tokenizer = service.tokenizer
    if any(message["role"] == "tool" or "tool_calls" in message for message in messages) and not tokenizer.tool_form:
        raise ApiError(400, "messages: this model's chat template has no tools", "messages")
    variables = {**(variables or {}), **({"tools": list(tools)} if tools else {})}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
    except (ValueError, TypeError) as error:
        raise ApiError(400, service.plain(error), "messages") from None
    if prefill and opens_thinking(text):
        raise wrong("messages", "end in the beginning of an answer, which this model's thinking comes before")
    text += prefill
    return text, service.encode(text, "messages", add_special_tokens=False)


def _message(message: dict[str, Any], where: str, called: dict[str, str], allow: bool) -> dict[str, Any]:
    """Converts a message for the template; `called` maps the ids of tool calls so far to their names.

    With `allow`, unknown fields are ignored.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise wrong(f"{where}.role", f"is not supported, expected one of {', '.join(ROLES)}")
    MESSAGE_NAMES.check(message, OF_ROLE.get(role, KNOWN), f"{where}.", allow)
    calls = _calls(message["tool_calls"], f"{where}.tool_calls", called) if message.get("tool_calls") else []
    if isinstance(content, list):
        content = joined(content, f"{where}.content", PARTS)
    if content is None and role == "assistant":
        content = message.get("refusal") or ("" if calls else None)
    made: dict[str, Any] = {"role": ROLES[role], "content": _text(content, f"{where}.content")}
    made |= {"tool_calls": calls} if calls else {}
    if message.get("name") is not None:
        made["name"] = _text(message["name"], f"{where}.name")
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        made["reasoning_content"] = reasoning
    if role == "tool":
        call = message.get("tool_call_id")
        if not isinstance(call, str) or call not in called:
            raise wrong(f"{where}.tool_call_id", "names no call of a message before")
        made |= {"tool_call_id": call, "name": called[call]}
    return made


def _text(value: Any, where: str, empty: bool = True) -> str:
    if not isinstance(value, str) or not (value or empty):
        raise wrong(where, "is no text")
    return value


def joined(parts: Sequence[Any], where: str, fields: Mapping[str, str]) -> str:
    """Joins the texts of parts, which `fields` locates by type. Raises ApiError 400 for a part that is not a text."""
    texts = [part.get(fields.get(str(part.get("type")))) if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise wrong(where, "has a part that is no text")
    return "".join(map(str, texts))


def _calls(given: Any, where: str, called: dict[str, str]) -> list[dict[str, Any]]:
    """Converts tool calls for the template, with objects as arguments, and adds them to `called`."""
    calls = []
    for i, call in enumerate(given if isinstance(given, list) else [given]):
        at, kind = f"{where}[{i}]", call.get("type", "function") if isinstance(call, dict) else None
        function = call.get(kind) if kind in ("function", "custom") else None
        if not isinstance(function, dict):
            raise wrong(at, "is no call of a function or a custom tool")
        named = _text(call.get("id"), f"{at}.id", empty=False)
        name = called[named] = _text(function.get("name"), f"{at}.{kind}.name", empty=False)
        if kind == "custom":  # the model sees the tool as a function with this argument
            arguments = {INPUT: _text(function.get("input"), f"{at}.custom.input")}
        else:
            arguments = _arguments(function.get("arguments"), f"{at}.function.arguments")
        calls.append({"id": named, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def _arguments(given: Any, where: str) -> dict[str, Any]:
    """Parses a call's arguments, which must be a JSON object."""
    try:
        arguments = loaded(given or "{}")
    except (ValueError, TypeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise wrong(where, "is no JSON object as text")
    return arguments
