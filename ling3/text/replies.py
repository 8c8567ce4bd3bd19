"""A model's reply, taken apart as it comes: thinking, answer and tool calls.

The pieces that `Reply` returns do not depend on how the text is cut: joined, they are those of the whole text.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

from ling3.text import tool_calls
from ling3.text.custom_inputs import CustomInput
from ling3.text.tokenizer import Tokenizer
from ling3.text.tool_calls import CALL_START, PYTHON_TAG, CallReader, Malformed, Said, ToolForm, beginning

THINK_START, THINK_END = "<think>", "</think>"
CALL_TAGS = (
    CALL_START,
    tool_calls.CALL_END,
    tool_calls.KEY,
    tool_calls.KEY_END,
    tool_calls.VALUE,
    tool_calls.VALUE_END,
)


class Piece(NamedTuple):
    """A new part of a reply: a text of its thinking or its answer, or of a tool call the name or more arguments.

    A call of a custom tool has its name as `custom`, and its `input` for arguments.
    """

    kind: Literal["reasoning", "content", "call", "arguments", "custom", "input"]
    text: str
    call: int = -1
    """Which tool call, counted from 0."""


def opens_thinking(prompt: str) -> bool:
    """True if a rendered prompt ends inside the thinking that the reply goes on with."""
    return prompt.rstrip().endswith(THINK_START)


class Reply:
    """Takes a reply apart, fed with its text as it comes.

    `thinking` says that the prompt opened the thinking; a reply that begins with `<think>` opens it too. Text up to
    `</think>` is reasoning, or all of it if there is no such end. Tool calls are read if there are `tools` (their
    parameters' JSON schemas by name) and a `form`, also those inside the thinking, which goes on after them. What is
    no tool call after all stays text. Line breaks next to the tags belong to them. Tools of the names `customs` are
    custom tools.
    """

    def __init__(
        self,
        *,
        thinking: bool = False,
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        form: ToolForm | None = None,
        customs: Set[str] = frozenset(),
    ):
        self.thinking = thinking
        self.calls = 0
        # Tags are read in both forms.
        self._tools, self._form = tools or {}, ("tags" if form == "json" else form) if tools else None
        self._customs = customs
        self._input: CustomInput | None = None
        self._kind: Literal["reasoning", "content"] = "reasoning" if thinking else "content"
        self._begins, self._fresh = not thinking, thinking
        self._held = self._breaks = ""
        self._reader: CallReader | None = None
        self._out: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """The pieces of the reply that `text` completes."""
        self._held += text
        while self._held and self._advance():
            pass
        return self._taken()

    def reads(self, tag: str) -> bool:
        """True if a tag that comes next is one, and not text."""
        begins = (self._begins or self._after_call) and not self._held.strip()
        if self._reader is not None:
            return tag in CALL_TAGS
        if tag == THINK_START:
            return begins and self._begins and not self._fresh
        if tag == THINK_END:
            return self._kind == "reasoning"
        return self._form == "tags" if tag == CALL_START else tag == PYTHON_TAG and self._form == "bare" and begins

    def flush(self) -> list[Piece]:
        """The parts held back, at the end of the reply."""
        while (reader := self._reader) is not None:
            self._reader = None
            try:
                self._out += [*self._numbered(reader.end()), *self._input_left()]
            except Malformed:
                self._say(reader.raw)
                continue
            self._held, self._fresh = reader.unread, True
            while self._held and self._advance():
                pass
        self._begins = False
        self._say(self._held)
        self._held = ""
        if self._kind == "content" and not self.calls:
            self._out.append(Piece("content", self._breaks))
        self._breaks = ""
        return self._taken()

    def _advance(self) -> bool:
        """Reads some of the text held; False if the rest has to wait for more."""
        if self._reader is not None:
            return self._read_call(self._reader)
        if self._begins or self._after_call:
            return self._begin()
        tags = [THINK_END] if self._kind == "reasoning" else []
        tags += [CALL_START] if self._form == "tags" else []
        found = min(((place, tag) for tag in tags if (place := self._held.find(tag)) >= 0), default=None)
        if found is None:
            keep = max((beginning(self._held, tag) for tag in tags), default=0)
            said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            self._say(said)
            return False
        place, tag = found
        self._say(self._held[:place])
        self._held = self._held[place + len(tag) :]
        if tag == THINK_END:
            self._kind, self._fresh, self._breaks = "content", True, ""
            self._begins = self._form == "bare"
        else:
            self._reader = CallReader("tags", self._tools, tag)
        return True

    @property
    def _after_call(self) -> bool:
        """True where a bare call may follow another."""
        return self._form == "bare" and self.calls > 0 and self._kind == "content"

    def _begin(self) -> bool:
        """Looks for what a reply may begin with: thinking, or a bare call."""
        text = self._held.lstrip("\n \t;," if self._after_call else None)
        opens = [THINK_START] if self._begins and not self._fresh else []
        calls = [PYTHON_TAG, "{"] if self._form == "bare" else []
        if any(tag.startswith(text) for tag in [*opens, *calls] if len(text) < len(tag)):
            return False
        space, self._begins = self._held[: len(self._held) - len(text)], False
        if THINK_START in opens and text.startswith(THINK_START):
            self._kind, self._fresh, self._held = "reasoning", True, text[len(THINK_START) :]
            self.thinking = True
        elif tag := next((tag for tag in calls if text.startswith(tag)), None):
            # What was before it is text again if this turns out to be no call.
            self._reader, self._held = CallReader("bare", self._tools, space + tag), text[len(tag) :]
        elif self._after_call:
            self._form = None  # text follows the calls
        return True

    def _read_call(self, reader: CallReader) -> bool:
        """Feeds a call's reader; False if it wants more."""
        for place, character in enumerate(self._held):
            try:
                done = reader.feed(character)
            except Malformed:
                self._reader, rest = None, self._held[place + 1 :]
                self._held = rest
                if reader.form == "bare":
                    self._form = None
                self._say(reader.raw)
                return True
            self._out += self._numbered(reader.take())
            if done:
                self._out += self._input_left()
                self._reader, self._held, self._fresh = None, self._held[place + 1 :], True
                return True
        self._held = ""
        return False

    def _numbered(self, said: Iterable[Said]) -> list[Piece]:
        pieces = []
        for kind, text in said:
            if kind == "call":
                self.calls += 1
                self._breaks = ""
                self._input = CustomInput() if text in self._customs else None
                pieces.append(Piece("call" if self._input is None else "custom", text, self.calls - 1))
            elif self._input is None:
                pieces.append(Piece("arguments", text, self.calls - 1))
            else:
                pieces.append(Piece("input", self._input.feed(text), self.calls - 1))
        return pieces

    def _input_left(self) -> list[Piece]:
        """What is left of a custom tool's input at the end of its call."""
        left = "" if self._input is None else self._input.finish()
        return [Piece("input", left, self.calls - 1)] if left else []

    def _say(self, text: str) -> None:
        """Adds to the thinking or the answer, holding back line breaks that may belong to a tag."""
        if self._fresh:
            text = text.lstrip("\n")
        if not text:
            return
        self._fresh = False
        if self._kind == "reasoning" or self._form == "tags":
            text = self._breaks + text
            body = text.rstrip("\n")
            self._breaks = text[len(body) :]
            text = body
        if text:
            self._out.append(Piece(self._kind, text))

    def _taken(self) -> list[Piece]:
        """The pieces so far, those that continue each other joined."""
        joined: list[Piece] = []
        for piece in self._out:
            begins = piece.kind in ("call", "custom")
            if not piece.text and not begins:
                continue
            last = joined[-1] if joined else None
            if last is not None and not begins and (last.kind, last.call) == (piece.kind, piece.call):
                joined[-1] = last._replace(text=last.text + piece.text)
            else:
                joined.append(piece)
        self._out = []
        return joined


class TokenReply:
    """A `Reply` to be fed with an engine's deltas, whose text lacks the tags that are special tokens.

    It puts such tags back, where they are read as tags, at their places in the text, which comes as it was decoded or
    later: stop strings hold it back. `prompt_ids` are those that the reply follows.
    """

    def __init__(self, reply: Reply, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        self.reply = reply
        added = tokenizer.backend.get_added_tokens_decoder()
        tags = (THINK_START, THINK_END, *CALL_TAGS, PYTHON_TAG)
        self._tags = {i: token.content for i, token in added.items() if token.special and token.content in tags}
        self._decoder = tokenizer.stream(prompt_ids) if self._tags else None
        self._unread: list[int] = []
        self._decoded = self._fed = 0
        """Characters that came of the ids up to the last tag, and those that `reply` was fed with."""
        self._waiting: list[tuple[int, str]] = []
        """Tags with their places in the text."""

    def feed(self, text: str, ids: Sequence[int], last: bool = False) -> list[Piece]:
        """The pieces that a delta completes, or with the `last` one all that are left."""
        if self._decoder is not None:
            for token in ids:
                if token in self._tags:
                    self._decoded += len(self._decoder.feed(self._unread))
                    self._unread = []
                    self._waiting.append((self._decoded, self._tags[token]))
                else:
                    self._unread.append(token)
        pieces = []
        while self._waiting and self._waiting[0][0] <= self._fed + len(text):
            place, tag = self._waiting.pop(0)
            before, text = text[: place - self._fed], text[place - self._fed :]
            pieces += self.reply.feed(before)
            self._fed = place
            pieces += self.reply.feed(tag) if self.reply.reads(tag) else []
        self._fed += len(text)
        return [*pieces, *self.reply.feed(text), *(self.reply.flush() if last else [])]
