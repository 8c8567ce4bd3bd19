"""Items of `/v1/responses`: converts a request's to chat messages, and builds an answer's with their events."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from ling3.server.errors import wrong
from ling3.server.events import identifier
from ling3.server.known_fields import FieldNames
from ling3.server.messages import CALLS, GOES_ON, joined
from ling3.text.replies import Piece

ITEM_NAMES = FieldNames(
    {
        "id": "nothing is stored under it",
        "status": "an item that comes back has ended",
        "phase": "a label of the message, which no chat template knows",
        "summary": "the thinking is in `content`",
        "encrypted_content": "the thinking is in `content`",
    },
    {
        "caller": "models do not write programs that call tools here",
        "namespace": "tools have no namespaces here",
        "async": "calls are not asynchronous",
    },
)
FIELDS = {
    "message": {"type", "role", "content"},
    "function_call": {"type", "call_id", "name", "arguments"},
    "function_call_output": {"type", "call_id", "name", "output"},
    "custom_tool_call": {"type", "call_id", "name", "input"},
    "custom_tool_call_output": {"type", "call_id", "output"},
    "reasoning": {"type", "content"},
}
"""The fields of each item that are honoured. An output's `name` is accepted but not used: its call has it."""
PARTS = {"input_text": "text", "output_text": "text", "reasoning_text": "text", "text": "text", "refusal": "refusal"}
"""Types of parts of a content, and the field with each one's text."""


def messages_of(
    given: str | Sequence[dict[str, Any]], instructions: str | None, allow_unknown: bool = False
) -> list[dict[str, Any]]:
    """Converts a request's input to the messages of a chat.

    Thinking, text and calls of one turn, which are separate items, become one message. Raises ApiError 400 for
    unsupported items, and for unknown fields unless these are allowed.
    """
    messages: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    for i, item in enumerate(given):
        where, kind = f"input[{i}]", item.get("type", "message")
        if not isinstance(kind, str) or kind not in FIELDS:
            raise wrong(f"{where}.type", f"is not supported, expected one of {', '.join(FIELDS)}")
        ITEM_NAMES.check(item, FIELDS[kind], f"{where}.", allow_unknown)
        message, last = _message(kind, item, where), messages[-1] if messages else {}
        calls = message.get("tool_calls", [])
        said = last.get("content") or "tool_calls" in last  # then only calls can still belong to the same turn
        if not message["role"] == "assistant" == last.get("role") or (said and not calls):
            messages.append({"content": "", **message})
        else:
            last |= {**message, **({"tool_calls": [*last.get("tool_calls", []), *calls]} if calls else {})}
    return messages


def _message(kind: str, item: dict[str, Any], where: str) -> dict[str, Any]:
    """Converts an item to a chat message, without content if the item has none."""
    if kind == "message":
        return {"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")}
    if kind == "reasoning":
        return {"role": "assistant", "reasoning_content": _text(item.get("content") or [], f"{where}.content")}
    if kind not in CALL_TYPES:
        output = _text(item.get("output"), f"{where}.output")
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    named, text = CALL_TYPES[kind]
    call = {"name": item.get("name"), text: item.get(text)}
    return {"role": "assistant", "tool_calls": [{"id": item.get("call_id"), "type": named, named: call}]}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    return joined(content if isinstance(content, list) else [content], where, PARTS)


class Kind(NamedTuple):
    """A type of output item: the names of its fields and events."""

    type: str
    prefix: str
    """The prefix of the item's id."""
    text: str
    """The field with the text: in the only part of `content` if there are `parts`, else in the item."""
    event: str
    """The name of the events about the text; with `parts`, also the part's type."""
    parts: bool = True


MESSAGE = Kind("message", "msg", "text", "output_text")
ITEMS = {
    "content": MESSAGE,
    "reasoning": Kind("reasoning", "rs", "text", "reasoning_text"),
    "call": Kind("function_call", "fc", "arguments", "function_call_arguments", False),
    "custom": Kind("custom_tool_call", "ctc", "input", "custom_tool_call_input", False),
}
CALL_TYPES = {ITEMS[kind].type: CALLS[kind] for kind in CALLS}
"""The types of items that are calls, with the type and text field of the call in a chat."""


class Items:
    """Builds an answer's items from a reply's pieces; the last item of `output` is open until `close`."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind: Kind | None = None

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Adds a new piece of the reply and yields its events."""
        kind = ITEMS[GOES_ON.get(piece.kind, piece.kind)]
        begins = piece.kind in CALLS
        if kind != self._kind or begins:
            yield from self.close("completed")
            yield from self._open(kind, piece.text)
        if begins:
            return
        self._holder(kind)[kind.text] += piece.text
        more = {"logprobs": []} if kind == MESSAGE else {}
        yield self._event(kind, f"{kind.event}.delta", {"delta": piece.text, **more})

    def close(self, status: Literal["completed", "incomplete"]) -> Iterator[dict[str, Any]]:
        """Closes the last item, if it is open, and yields the events."""
        if (kind := self._kind) is None:
            return
        text = {kind.text: self._holder(kind)[kind.text]}
        more = {"logprobs": []} if kind == MESSAGE else {}
        more = {"name": self._item["name"]} if kind == ITEMS["call"] else more
        yield self._event(kind, f"{kind.event}.done", {**text, **more})
        if kind.parts:
            yield self._event(kind, "content_part.done", {"part": self._holder(kind)})
        self._item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": self._item}
        self._kind = None

    def _open(self, kind: Kind, name: str) -> Iterator[dict[str, Any]]:
        self._kind = kind
        item: dict[str, Any] = {"type": kind.type, "id": identifier(kind.prefix)}
        if not kind.parts:
            item |= {"call_id": identifier("call"), "name": name, kind.text: ""}
        else:
            item |= {"role": "assistant"} if kind == MESSAGE else {"summary": []}
            item["content"] = []
        self.output.append({**item, "status": "in_progress"})
        yield {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": {**self._item}}
        if kind.parts:
            more = {"annotations": [], "logprobs": []} if kind == MESSAGE else {}
            part = {"type": kind.event, **more, "text": ""}
            yield self._event(kind, "content_part.added", {"part": {**part}})
            self._item["content"] = [part]

    @property
    def _item(self) -> dict[str, Any]:
        return self.output[-1]

    def _holder(self, kind: Kind) -> dict[str, Any]:
        """The dictionary that holds the item's text."""
        return self._item["content"][0] if kind.parts else self._item

    def _event(self, kind: Kind, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item["id"], "output_index": len(self.output) - 1}
        place |= {"content_index": 0} if kind.parts else {}
        return {"type": f"response.{name}", **place, **fields}
