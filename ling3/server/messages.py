"""A conversation's messages as a chat template takes them, and the prompt that it makes of them."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ling3.server.errors import ApiError
from ling3.server.running import Service

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
KNOWN = {"role", "content"}
OF_ROLE = {
    "assistant": {*KNOWN, "refusal", "reasoning_content", "reasoning", "tool_calls"},
    "tool": {*KNOWN, "tool_call_id", "name"},
}


def rendered(
    service: Service,
    given: Sequence[dict[str, Any]],
    variables: Mapping[str, Any] | None,
    tools: Sequence[dict[str, Any]] = (),
    param: str = "messages",
) -> tuple[str, list[int]]:
    """The rendered prompt and its ids; ApiError 400, which names no file, for messages that it cannot take."""
    called: dict[str, str] = {}
    messages = [_message(message, f"{param}[{i}]", called) for i, message in enumerate(given)]
    tokenizer = service.tokenizer
    if any(message["role"] == "tool" or "tool_calls" in message for message in messages) and not tokenizer.tool_form:
        raise ApiError(400, f"{param}: this model's chat template has no tools", param)
    variables = {**(variables or {}), **({"tools": list(tools)} if tools else {})}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
        return text, service.encode(text, param, add_special_tokens=False)
    except (ValueError, TypeError) as error:
        raise ApiError(400, service.plain(error), param) from None


def _message(message: dict[str, Any], where: str, called: dict[str, str]) -> dict[str, Any]:
    """The template's message; `called` are the ids of tool calls so far with their names."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(400, f"{where}.role is not supported, expected one of {', '.join(ROLES)}", f"{where}.role")
    for name, value in message.items():
        if name not in OF_ROLE.get(role, KNOWN) and value is not None:
            raise ApiError(400, f"{where}.{name} is not supported", f"{where}.{name}", "unsupported_parameter")
    calls = _calls(message["tool_calls"], f"{where}.tool_calls", called) if message.get("tool_calls") else []
    if isinstance(content, list):
        content = _joined(content, f"{where}.content")
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise ApiError(400, f"{where}.content is no text", f"{where}.content")
    made: dict[str, Any] = {"role": ROLES[role], "content": content, **({"tool_calls": calls} if calls else {})}
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
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"{where} has a part that is no text", where)
    return "".join(map(str, texts))


def _calls(given: Any, where: str, called: dict[str, str]) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects."""
    calls = []
    for i, call in enumerate(given if isinstance(given, list) else [given]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise ApiError(400, f"{where}[{i}] is no call of a function", f"{where}[{i}]")
        named, name = call.get("id"), function.get("name")
        if not isinstance(named, str) or not isinstance(name, str) or not named or not name:
            field = f"{where}[{i}].{'function.name' if isinstance(named, str) and named else 'id'}"
            raise ApiError(400, f"{field} is no text", field)
        try:
            arguments = json.loads(function.get("arguments") or "{}", parse_constant=_refuse)
        except (ValueError, TypeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            field = f"{where}[{i}].function.arguments"
            raise ApiError(400, f"{field} is no JSON object as text", field)
        called[named] = name
        calls.append({"id": named, "type": "function", "function": {"name": name, "arguments": arguments}})
    return calls


def _refuse(name: str) -> Any:
    raise ValueError(name)
