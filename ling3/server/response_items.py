"""The items of `/v1/responses`: those of a request as a chat's messages, and an answer's, with the events of each."""

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
"""The fields of each item that count; an output's `name` is that of its call anyway."""
PARTS = {"input_text": "text", "output_text": "text", "reasoning_text": "text", "text": "text", "refusal": "refusal"}
"""Parts of a content, and the fields with their text."""


def messages_of(
    given: str | Sequence[dict[str, Any]], instructions: str | None, allow_unknown: bool = False
) -> list[dict[str, Any]]:
    """The messages of a chat; ApiError 400 for other items, and unknown fields unless they are allowed.

    Thinking, text and calls of one turn, which are items of their own, are one message.
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
        said = last.get("content") or "tool_calls" in last  # after which only calls belong to the same turn
        if not message["role"] == "assistant" == last.get("role") or (said and not calls):
            messages.append({"content": "", **message})
        else:
            last |= {**message, **({"tool_calls": [*last.get("tool_calls", []), *calls]} if calls else {})}
    return messages


def _message(kind: str, item: dict[str, Any], where: str) -> dict[str, Any]:
    """An item as a chat's message, without content where that has none."""
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
    """A kind of item, by the reply's pieces that it is made of."""

    type: str
    prefix: str
    """Of its id."""
    text: str
    """The field with its text, in its only part of `content` if it has `parts`."""
    event: str
    """What the events about its text are called."""
    parts: bool = True


MESSAGE = Kind("message", "msg", "text", "output_text")
ITEMS = {
    "content": MESSAGE,
    "reasoning": Kind("reasoning", "rs", "text", "reasoning_text"),
    "call": Kind("function_call", "fc", "arguments", "function_call_arguments", False),
    "custom": Kind("custom_tool_call", "ctc", "input", "custom_tool_call_input", False),
}
CALL_TYPES = {ITEMS[kind].type: CALLS[kind] for kind in CALLS}
"""Items that are calls, as a chat has them."""


class Items:
    """An answer's items, made of a reply's pieces; each is the last of `output` until it is closed."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind: Kind | None = None

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The events for a new piece of the reply."""
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
        """The events of the last item's end, if it is open."""
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
        """What the text goes to."""
        return self._item["content"][0] if kind.parts else self._item

    def _event(self, kind: Kind, name: str, fields: dict[str, Any]) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item["id"], "output_index": len(self.output) - 1}
        place |= {"content_index": 0} if kind.parts else {}
        return {"type": f"response.{name}", **place, **fields}
