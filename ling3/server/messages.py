"""A conversation's messages as a chat template takes them, and the prompt that it makes of them."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

from collections.abc import Mapping, Sequence
from typing import Any

from ling3.server.errors import ApiError
from ling3.server.known_fields import check_names
from ling3.server.running import Service
from ling3.text.custom_inputs import INPUT
from ling3.text.json_text import loaded

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
KNOWN = {"role", "content", "name"}
OF_ROLE = {
    "assistant": {*KNOWN, "refusal", "reasoning_content", "reasoning", "tool_calls"},
    "tool": {*KNOWN, "tool_call_id"},
}
PARTS = {"text": "text", "refusal": "refusal"}
"""Parts of a message's content, and the fields with their text."""


def rendered(
    service: Service,
    given: Sequence[dict[str, Any]],
    variables: Mapping[str, Any] | None,
    tools: Sequence[dict[str, Any]] = (),
    param: str = "messages",
) -> tuple[str, list[int]]:
    """The rendered prompt and its ids; ApiError 400, which names no file, for messages that it cannot take."""
    called: dict[str, str] = {}
    allow = service.allow_unknown_fields
    messages = [_message(message, f"{param}[{i}]", called, allow) for i, message in enumerate(given)]
    tokenizer = service.tokenizer
    if any(message["role"] == "tool" or "tool_calls" in message for message in messages) and not tokenizer.tool_form:
        raise ApiError(400, f"{param}: this model's chat template has no tools", param)
    variables = {**(variables or {}), **({"tools": list(tools)} if tools else {})}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        return text, service.encode(text, param, add_special_tokens=False)
    except (ValueError, TypeError) as error:
        raise ApiError(400, service.plain(error), param) from None


def _message(message: dict[str, Any], where: str, called: dict[str, str], allow: bool) -> dict[str, Any]:
    """The template's message; `called` are the ids of tool calls so far with their names.

    With `allow`, fields that are unknown are ignored.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{where}.role is not supported, expected one of {', '.join(ROLES)}", f"{where}.role")
    check_names("message", message, OF_ROLE.get(role, KNOWN), where, allow)
    calls = _calls(message["tool_calls"], f"{where}.tool_calls", called) if message.get("tool_calls") else []
    if isinstance(content, list):
        content = _joined(content, f"{where}.content")
    if content is None and role == "assistant":
        content = message.get("refusal") or ("" if calls else None)
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content is no text", f"{where}.content")
    made: dict[str, Any] = {"role": ROLES[role], "content": content, **({"tool_calls": calls} if calls else {})}
    if (name := message.get("name")) is not None:
        if not isinstance(name, str):
            raise ApiError(400, f"{where}.name is no text", f"{where}.name")
        made["name"] = name
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        made["reasoning_content"] = reasoning
    if role == "tool":
        call = message.get("tool_call_id")
        if not isinstance(call, str) or call not in called:
            text = f"{where}.tool_call_id names no call of a message before"
            raise ApiError(400, text, f"{where}.tool_call_id")
        made |= {"tool_call_id": call, "name": called[call]}
    return made


def _joined(parts: list[Any], where: str) -> str:
    texts = [part.get(PARTS.get(str(part.get("type")))) if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"{where} has a part that is no text", where)
    return "".join(map(str, texts))


def _calls(given: Any, where: str, called: dict[str, str]) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects."""
    calls = []
    for i, call in enumerate(given if isinstance(given, list) else [given]):
        kind = call.get("type", "function") if isinstance(call, dict) else None
        function = call.get(kind) if kind in ("function", "custom") else None
        if not isinstance(function, dict):
            raise ApiError(400, f"{where}[{i}] is no call of a function or a custom tool", f"{where}[{i}]")
        named, name = call.get("id"), function.get("name")
        if not isinstance(named, str) or not isinstance(name, str) or not named or not name:
            field = f"{where}[{i}].{f'{kind}.name' if isinstance(named, str) and named else 'id'}"
            raise ApiError(400, f"{field} is no text", field)
        arguments = _arguments(function, f"{where}[{i}].{kind}", kind == "custom")
        called[named] = name
        calls.append({"id": named, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def _arguments(function: Mapping[str, Any], where: str, custom: bool) -> dict[str, Any]:
    """A call's arguments; of a custom tool's, those of the function that stands for it."""
    if custom:
        if not isinstance(given := function.get("input"), str):
            raise ApiError(400, f"{where}.input is no text", f"{where}.input")
        return {INPUT: given}
    try:
        arguments = loaded(function.get("arguments") or "{}")
    except (ValueError, TypeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise ApiError(400, f"{where}.arguments is no JSON object as text", f"{where}.arguments")
    return arguments
