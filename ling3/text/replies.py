"""Parses a model's reply as it streams: thinking, answer and tool calls.

The result does not depend on how the text is split: joined pieces equal those of the complete text.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, Literal, NamedTuple

from ling3.text import tool_calls
from ling3.text.custom_inputs import CustomInput
from ling3.text.detokenizer import beginning
from ling3.text.tokenizer import Tokenizer
from ling3.text.tool_calls import CALL_START, PYTHON_TAG, CallReader, Malformed, Said, ToolForm

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
    """A new part of a reply: text of its thinking or its answer, or the name or some arguments of a tool call.

    For a custom tool, the kind of the name is `custom`, and there is `input` instead of arguments.
    """

    kind: Literal["reasoning", "content", "call", "arguments", "custom", "input"]
    text: str
    call: int = -1
    """The index of the tool call, from 0."""


def opens_thinking(prompt: str) -> bool:
    """True if a rendered prompt ends with `<think>`, so that the reply begins inside the thinking."""
    return prompt.rstrip().endswith(THINK_START)


class Reply:
    """A parser of one reply, which is fed with its text as it comes.

    `thinking` means that the prompt opened the thinking; a reply that begins with `<think>` opens it too. Text up to
    `</think>` is reasoning, or all text if that never comes. Tool calls are parsed if there are `tools` (their
    parameters' JSON schemas by name) and a `form`, also inside the thinking, which goes on after them. Text that turns
    out to be no tool call stays text. Line breaks next to tags are dropped. `customs` are the names of custom tools.
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
        # The form "tags" reads both forms of calls in tags.
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
        """True if `tag` would be read as a tag if it came next, and not as text."""
        begins = (self._begins or self._after_call) and not self._held.strip()
        if self._reader is not None:
            return tag in CALL_TAGS
        if tag == THINK_START:
            return begins and self._begins and not self._fresh
        if tag == THINK_END:
            return self._kind == "reasoning"
        return self._form == "tags" if tag == CALL_START else tag == PYTHON_TAG and self._form == "bare" and begins

    def flush(self) -> list[Piece]:
        """The pieces held back, at the end of the reply."""
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
        """Parses some of the held text; False if the rest has to wait for more text."""
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
        """Looks for thinking or a bare call at the beginning; False if that needs more text."""
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
            # The reader also gets the space before it, which is text again if this turns out to be no call.
            self._reader, self._held = CallReader("bare", self._tools, space + tag), text[len(tag) :]
        elif self._after_call:
            self._form = None  # text follows the calls
        return True

    def _read_call(self, reader: CallReader) -> bool:
        """Feeds the held text to a call's reader; False if that needs more text."""
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
        """The rest of a custom tool's input, at the end of its call."""
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
        """Takes the pieces so far, with consecutive ones of the same kind and call joined."""
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
    """Feeds a `Reply` with an engine's deltas, whose text lacks the tags that are special tokens.

    It puts such tags back at their places in the text, if they would be read as tags. The text may come later than its
    ids, as stop strings hold it back. `prompt_ids` are the tokens before the reply.
    """

    def __init__(self, reply: Reply, tokenizer: Tokenizer, prompt_ids: Sequence[int]):
        self.reply = reply
        added = tokenizer.backend.get_added_tokens_decoder()
        tags = (THINK_START, THINK_END, *CALL_TAGS, PYTHON_TAG)
        self._tags = {i: token.content for i, token in added.items() if token.special and token.content in tags}
        self._decoder = tokenizer.stream(prompt_ids) if self._tags else None
        self._unread: list[int] = []
        self._decoded = self._fed = 0
        """Numbers of characters: decoded from the ids up to the last tag, and fed to `reply`."""
        self._waiting: list[tuple[int, str]] = []
        """Tags that are still to be fed, with their offsets in the text."""

    def feed(self, text: str, ids: Sequence[int], last: bool = False) -> list[Piece]:
        """The pieces that a delta completes; with the `last` delta, also those held back."""
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
