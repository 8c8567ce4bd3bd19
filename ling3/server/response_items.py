"""The items of `/v1/responses`: those of a request as a chat's messages, and an answer's, with the events of each."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ling3.server.errors import ApiError
from ling3.server.running import identifier
from ling3.text.replies import Piece

FIELDS = {
    "message": {"type", "id", "status", "role", "content", "phase"},
    "function_call": {"type", "id", "status", "call_id", "name", "arguments"},
    "function_call_output": {"type", "id", "status", "call_id", "output"},
    "reasoning": {"type", "id", "status", "summary", "content", "encrypted_content"},
}
PARTS = ("input_text", "output_text", "reasoning_text", "text")


def messages_of(given: str | Sequence[dict[str, Any]], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat; ApiError 400 for other items.

    Thinking, text and calls of one turn, which are items of their own, are one message.
    """
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    turn: dict[str, Any] | None = None
    for i, item in enumerate(given):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        if kind not in FIELDS:
            raise ApiError(400, f"{where}.type is not supported, expected one of {', '.join(FIELDS)}", f"{where}.type")
        for name, value in item.items():
            if name not in FIELDS[kind] and value is not None:
                raise ApiError(400, f"{where}.{name} is not supported", f"{where}.{name}", "unsupported_parameter")
        own = kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant")
        if own:
            begins = turn is None or (kind == "reasoning" and (turn["content"] or "tool_calls" in turn))
            if turn is None or begins or (kind == "message" and (turn["content"] or "tool_calls" in turn)):
                turn = {"role": "assistant", "content": ""}
                messages.append(turn)
            _add(turn, kind, item, where)
            continue
        turn = None
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"), f"{where}.content")})
        else:
            output = _text(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    return messages


def _add(turn: dict[str, Any], kind: str, item: dict[str, Any], where: str) -> None:
    """Adds an item of the assistant's to its message."""
    if kind == "message":
        turn["content"] = _text(item.get("content"), f"{where}.content")
    elif kind == "reasoning":
        turn["reasoning_content"] = _text(item.get("content") or [], f"{where}.content")
    else:
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "function": function})


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") in PARTS else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise ApiError(400, f"{where} has a part that is no text", where)
    return "".join(map(str, texts))


class Items:
    """An answer's items, made of a reply's pieces; each is the last of `output` until it is closed."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._kind: Literal["reasoning", "content", "call"] | None = None

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """The events of a piece."""
        kind = "call" if piece.kind == "arguments" else piece.kind
        if kind != self._kind or piece.kind == "call":
            yield from self.close("completed")
            yield from self._open(kind, piece.text)
        if piece.kind == "call":
            return
        self._holder[self._key] += piece.text
        more = {"logprobs": []} if kind == "content" else {}
        yield self._event(f"{self._name}.delta", {"delta": piece.text, **more})

    def close(self, status: Literal["completed", "incomplete"]) -> Iterator[dict[str, Any]]:
        """The events of the last item's end, if it is open."""
        if self._kind is None:
            return
        text = {self._key: self._holder[self._key]}
        more = {"logprobs": []} if self._kind == "content" else {}
        more = {"name": self._item["name"]} if self._kind == "call" else more
        yield self._event(f"{self._name}.done", {**text, **more})
        if self._kind != "call":
            yield self._event("content_part.done", {"part": self._holder})
        self._item["status"] = status
        yield {"type": "response.output_item.done", "output_index": len(self.output) - 1, "item": self._item}
        self._kind = None

    def _open(self, kind: Literal["reasoning", "content", "call"], name: str) -> Iterator[dict[str, Any]]:
        self._kind, begun = kind, {"status": "in_progress"}
        if kind == "call":
            call = {"type": "function_call", "id": identifier("fc"), "call_id": identifier("call"), "name": name}
            self.output.append({**call, "arguments": "", **begun})
        elif kind == "content":
            self.output.append(
                {"type": "message", "id": identifier("msg"), "role": "assistant", "content": [], **begun}
            )
        else:
            self.output.append({"type": "reasoning", "id": identifier("rs"), "summary": [], "content": [], **begun})
        yield {"type": "response.output_item.added", "output_index": len(self.output) - 1, "item": {**self._item}}
        if kind != "call":
            text = {"type": "output_text", "annotations": [], "logprobs": []}
            part = {**(text if kind == "content" else {"type": "reasoning_text"}), "text": ""}
            yield self._event("content_part.added", {"part": {**part}})
            self._item["content"] = [part]

    @property
    def _item(self) -> dict[str, Any]:
        return self.output[-1]

    @property
    def _holder(self) -> dict[str, Any]:
        """What the text goes to."""
        return self._item if self._kind == "call" else self._item["content"][0]

    @property
    def _key(self) -> str:
        return "arguments" if self._kind == "call" else "text"

    @property
    def _name(self) -> str:
        assert self._kind is not None, "an item is open"
        names = {"reasoning": "reasoning_text", "content": "output_text", "call": "function_call_arguments"}
        return names[self._kind]

    def _event(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._item["id"], "output_index": len(self.output) - 1}
        place |= {} if self._kind == "call" else {"content_index": 0}
        return {"type": f"response.{kind}", **place, **fields}
