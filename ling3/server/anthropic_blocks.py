"""Content blocks of `/v1/messages`: converts a request's to chat messages, and builds an answer's with their events."""

import hashlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from ling3.server.errors import wrong
from ling3.server.events import identifier
from ling3.server.known_fields import CACHING, CITATIONS, FieldNames
from ling3.text.json_text import dumped, loaded
from ling3.text.replies import Piece

BLOCK_NAMES = FieldNames(
    {
        "cache_control": CACHING,
        "citations": CITATIONS,
        "caller": "every call is the model's",
        "is_error": "the result says it, and no chat template has a place for more",
        "signature": "the thinking is in `thinking`",
        "data": "thinking that another server has encrypted, which no model here can read",
    }
)
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "text": {"text": str},
    "thinking": {"thinking": str},
    "redacted_thinking": {},
    "tool_use": {"id": str, "name": str, "input": dict},
    "tool_result": {"tool_use_id": str, "content": (str, list, type(None))},
}
"""The fields of each type of block that are honoured, with the types of their values."""
BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""The types of blocks that the messages of each role may have."""


def conversation(
    given: Sequence[dict[str, Any]], system: str | Sequence[dict[str, Any]] | None, allow_unknown: bool = False
) -> tuple[list[dict[str, Any]], str]:
    """Converts a request's `messages` and its `system` to the messages of a chat, and the beginning of the answer.

    A last message of the assistant's is that beginning, which otherwise is empty.

    Raises ApiError 400 for unsupported blocks, and for unknown fields unless these are allowed.
    """
    messages = [{"role": "system", "content": _text(system, "system", allow_unknown)}] if system else []
    for i, message in enumerate(given):
        messages += _messages(message, f"messages.{i}", allow_unknown)
    if given[-1]["role"] != "assistant":
        return messages, ""
    last, where = messages.pop(), f"messages.{len(given) - 1}"
    if last.keys() != {"role", "content"}:
        raise wrong(where, "is the assistant's and the last one: only a text can be continued")
    if last["content"] != last["content"].rstrip():
        raise wrong(where, "ends in white space, which an answer cannot continue")
    return messages, last["content"]


def _messages(message: dict[str, Any], where: str, allow: bool) -> list[dict[str, Any]]:
    """Converts a message to those of a chat: a user's results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in BLOCKS:
        raise wrong(f"{where}.role", f"is not supported, expected one of {', '.join(BLOCKS)}")
    FieldNames().check(message, {"role", "content"}, f"{where}.", allow)
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = _blocks(content, f"{where}.content", BLOCKS[role], allow)
    if role == "assistant":
        return [_turn(blocks)]
    made: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        if block["type"] == "tool_result":
            result = _text(block.get("content") or "", f"{where}.content.{i}.content", allow)
            made.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
        elif made and made[-1]["role"] == role:
            made[-1]["content"] += block["text"]
        else:
            made.append({"role": role, "content": block["text"]})
    return made


def _turn(blocks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins the blocks of an assistant's message, whose template has one place each for thinking, text and calls."""
    texts = {name: "".join(block[name] for block in blocks if block["type"] == name) for name in ("text", "thinking")}
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": dumped(block["input"])},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    made: dict[str, Any] = {"role": "assistant", "content": texts["text"]}
    made |= {"reasoning_content": texts["thinking"]} if texts["thinking"] else {}
    return {**made, "tool_calls": calls} if calls else made


def _text(given: Any, where: str, allow: bool) -> str:
    """A text, or the joined texts of blocks."""
    if isinstance(given, str):
        return given
    return "".join(block["text"] for block in _blocks(given, where, ("text",), allow))


def _blocks(given: Any, where: str, types: Collection[str], allow: bool) -> list[dict[str, Any]]:
    """Checks a list of blocks, which must be of these types."""
    if not isinstance(given, list) or not given:
        raise wrong(where, "is neither a text nor a list of blocks")
    for i, block in enumerate(given):
        at, kind = f"{where}.{i}", block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in types:
            found = kind if isinstance(kind, str) else "missing"
            raise wrong(f"{at}.type", f"is {found:.80}, which is not supported: expected {' or '.join(types)}")
        fields = FIELDS[kind]
        BLOCK_NAMES.check(block, {"type", *fields}, f"{at}.", allow)
        for name, expected in fields.items():
            if not isinstance(block.get(name), expected):
                raise wrong(f"{at}.{name}", "is missing" if name not in block else "is of another type than expected")
    return given


class BlockKind(NamedTuple):
    """A type of block in an answer: its names of its text and of the deltas that have more of it."""

    type: str
    delta: str
    text: str
    """The field of a delta that has more of the block's text."""


KINDS = {
    "reasoning": BlockKind("thinking", "thinking_delta", "thinking"),
    "content": BlockKind("text", "text_delta", "text"),
    "call": BlockKind("tool_use", "input_json_delta", "partial_json"),
}


class Blocks:
    """Builds an answer's blocks from a reply's pieces; the last block of `content` is open until `close`."""

    def __init__(self, omit_thinking: bool = False):
        self.content: list[dict[str, Any]] = []
        self.thinking = ""
        """All thinking so far, also if blocks omit it."""
        self._kind: BlockKind | None = None
        self._omit, self._said = omit_thinking, ""

    def add(self, piece: Piece) -> Iterator[dict[str, Any]]:
        """Adds a new piece of the reply and yields its events."""
        kind = KINDS["call" if piece.kind == "arguments" else piece.kind]
        begins = piece.kind == "call"
        if kind != self._kind or begins:
            yield from self.close()
            yield self._open(kind, piece.text)
        if begins:
            return
        if kind == KINDS["reasoning"]:
            self.thinking += piece.text
            if self._omit:
                return
        self._said += piece.text
        yield self._delta(kind.delta, kind.text, piece.text)

    def close(self) -> Iterator[dict[str, Any]]:
        """Closes the last block, if it is open, and yields the events."""
        kind = self._kind
        if kind is None:
            return
        block = self.content[-1]
        if kind == KINDS["call"]:
            block["input"] = _input(self._said)
        else:
            block[kind.text] = self._said
        if kind == KINDS["reasoning"]:
            block["signature"] = hashlib.sha256(self.thinking.encode()).hexdigest()
            yield self._delta("signature_delta", "signature", block["signature"])
        yield {"type": "content_block_stop", "index": len(self.content) - 1}
        self._kind = None

    def _open(self, kind: BlockKind, name: str) -> dict[str, Any]:
        self._kind, self._said = kind, ""
        if kind == KINDS["call"]:
            block = {"id": identifier("toolu"), "name": name, "input": {}, "caller": {"type": "direct"}}
        else:
            block = {kind.text: "", **({"citations": None} if kind == KINDS["content"] else {"signature": ""})}
        self.content.append({"type": kind.type, **block})
        return {"type": "content_block_start", "index": len(self.content) - 1, "content_block": {**self.content[-1]}}

    def _delta(self, kind: str, field: str, text: str) -> dict[str, Any]:
        delta = {"type": kind, field: text}
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": delta}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; one without fields if the answer ended amid them."""
    try:
        made = loaded(arguments or "{}")
    except ValueError:
        return {}
    return made if isinstance(made, dict) else {}
