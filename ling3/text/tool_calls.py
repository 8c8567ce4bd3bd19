"""Parses tool calls as models write them, one character at a time: the call's name, then its arguments as JSON.

tags (Ling-3):          <tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>
json, in tags (Qwen3):  <tool_call>{"name": …, "arguments": {…}}</tool_call>
bare JSON (Llama 3):    {"name": …, "parameters": {…}}, also after <|python_tag|>

Both forms in tags are read, whichever the model is expected to write.
"""

import contextlib
import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal

from ling3.text.detokenizer import beginning
from ling3.text.json_text import StrictJSON, dumped, in_string, loaded, strict

ToolForm = Literal["tags", "json", "bare"]
Said = tuple[Literal["call", "arguments"], str]
Steps = Generator[None, str, Any]
"""A parser that receives a character at each yield, or an empty string at the end of the text."""

CALL_START, CALL_END, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
NAME = re.compile(r"[\w.:/-]+")
DEEPEST = 16
"""How many references are followed in a row, and how deep alternatives are, in a schema."""


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the one that its `$ref` within the root refers to; {} if it is malformed or refers to nothing."""
    for _ in range(DEEPEST):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = root
        for key in reference.removeprefix("#/").split("/"):
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return {}


def kinds(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a schema names, also by `enum`, `const`, `anyOf` and the like; empty if it names none."""
    schema = resolved(schema, root)
    if "type" in schema:
        return frozenset(each for each in _listed(schema["type"]) if isinstance(each, str))
    if "const" in schema or "enum" in schema:
        return frozenset(map(_kind, [schema["const"]] if "const" in schema else _listed(schema["enum"])))
    for key in ("allOf", "anyOf", "oneOf"):
        options = [kinds(option, root, depth + 1) for option in _listed(schema.get(key, []))] if depth < DEEPEST else []
        if key == "allOf" and any(options):
            return next(filter(None, options))
        if options and all(options):
            return frozenset().union(*options)
    return frozenset()


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _kind(value: Any) -> str:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return names.get(type(value), "null")


class Malformed(ValueError):
    """Raised if this is no tool call after all: then `CallReader.raw` is text."""


class _End(Exception):
    """The text ends inside the call."""


class CallReader:
    """Parses one tool call after its opening tag, with which `raw` begins.

    Once the name is known it is a call, whatever follows; before that, Malformed is raised if it turns out not to be
    one. A bare call must name one of the tools. Arguments are given as strict JSON; one that breaks off stays
    incomplete.

    A value in tags may contain the tags: an `</arg_value>` ends it only if the next argument or the call's end follows,
    and not inside a JSON string, unless that string never ends. Without one, `</tool_call>` ends it if no text follows.
    """

    def __init__(self, form: ToolForm, tools: Mapping[str, Mapping[str, Any]], raw: str):
        self.form, self.raw = form, raw
        self._tools = tools
        self._name: str | None = None
        self._said: list[Said] = []
        self._at, self._closing = len(raw), ""
        self._steps = self._tagged() if form == "tags" else self._bare(raw.endswith("{"))
        next(self._steps)

    def feed(self, character: str) -> bool:
        """Parses a character; True once the call is complete. Raises Malformed if this is no call."""
        self.raw += character
        try:
            self._steps.send(character)
        except StopIteration:
            return True
        return False

    def end(self) -> list[Said]:
        """The rest of the call, at the end of the text. Raises Malformed if the name never came."""
        with contextlib.suppress(StopIteration, _End):
            while True:  # after a string that never ends, some of the text is parsed again
                self._steps.send("")
        if self._name is None:
            raise Malformed
        if self._closing:
            self._say(self._closing)
        return self.take()

    def take(self) -> list[Said]:
        """The parts of the call that are new since the last `take`."""
        said, self._said = self._said, []
        return said

    @property
    def unread(self) -> str:
        """The text after the call, once it has ended."""
        return self.raw[self._at :]

    # The forms

    def _tagged(self) -> Steps:
        first = yield from self._solid()
        if first == "{":
            yield from self._object()
            yield from self._until(CALL_END)
            return
        self._at -= 1
        name, tag = yield from self._until(KEY, CALL_END)
        self._begin(name.strip())
        self._closing = "{}"
        written = 0
        while tag == KEY:
            key, tag = yield from self._until(KEY_END, VALUE)
            if tag == KEY_END:
                _, tag = yield from self._until(VALUE, CALL_END)
                if tag == CALL_END:
                    break
            self._closing = ""
            self._say(("{" if not written else ", ") + dumped(key.strip()) + ": ")
            kinds = self._kinds(key.strip())
            tag = yield from self._string() if kinds == {"string"} else self._value(kinds)
            written += 1
            self._closing = "}"
        self._closing = ""
        self._say("}" if written else "{}")

    def _string(self) -> Steps:
        """Parses a value that is a string, and passes it on as it comes; returns the tag after it."""
        self._say('"')
        while True:
            _, end = yield from self._until(VALUE_END, CALL_END, escaped=True)
            space, tag = yield from self._following(end)
            if tag:
                self._say('"')
                return tag
            self._say(_escaped(end + space))

    def _value(self, kinds: frozenset[str]) -> Steps:
        """Parses a value that need not be a string, and passes it on as JSON; returns the tag after it."""
        text, cut = "", None
        try:
            while True:
                more, end = yield from self._until(VALUE_END, CALL_END)
                text += more
                space, tag = yield from self._following(end)
                if tag and not in_string(text):
                    break
                cut = (text, tag, self._at) if tag and cut is None else cut
                text += end + space + tag
        except _End:
            if cut is None:
                raise
            text, tag, self._at = cut
        self._say(_as_json(text, kinds))
        return tag

    def _following(self, end: str) -> Steps:
        """The white space after the tag `end`, and the next tag; or "" for that if `end` is part of the value."""
        space = tag = ""
        nexts = (KEY, CALL_END) if end == VALUE_END else ()
        try:
            while (character := (yield from self._next())).isspace():
                space += character
            tag = character
            while tag not in nexts and any(each.startswith(tag) for each in nexts):
                tag += yield from self._next()
        except _End:
            return space, CALL_END
        if tag in nexts:
            return space, tag
        self._at -= len(tag)
        return space, ""

    def _bare(self, opened: bool) -> Steps:
        if not opened and (yield from self._solid()) != "{":
            raise Malformed
        yield from self._object()

    def _object(self) -> Steps:
        """Parses the JSON object of a call, after its opening brace."""
        arguments: str | None = None
        while (character := (yield from self._solid())) != "}":
            if character == ",":
                continue
            if character != '"':
                self._refuse()
                continue
            key = _decoded((yield from self._json('"', False)))
            if (yield from self._solid()) != ":":
                self._refuse()
            first = yield from self._solid()
            if key == "name" and self._name is None:
                name = _decoded((yield from self._json(first, False))) if first == '"' else ""
                self._begin(name)
                if arguments is not None:
                    self._say(arguments)
            elif key in ("arguments", "parameters") and arguments is None:
                direct = first == "{" and self._name is not None
                text = yield from self._json(first, direct)
                arguments = _arguments(text)
                if self._name is not None and not direct:
                    self._say(arguments)
            else:
                yield from self._json(first, False)
        if self._name is None:
            raise Malformed
        if arguments is None:
            self._say("{}")

    def _json(self, first: str, say: bool) -> Steps:
        """The text of a JSON value from its first character on, with control characters in strings escaped.

        With `say`, an object is passed on as it comes, as strict JSON.
        """
        text, depth, character, writer = "", 0, first, StrictJSON()
        quoted = backslash = False
        while True:
            if not quoted and not depth and text and character in ",}] \n\t\r":
                self._at -= 1
                return text
            text += dumped(character)[1:-1] if quoted and character < " " else character
            if say:
                self._say(writer.feed(character))
            if quoted:
                quoted, backslash = character != '"' or backslash, character == "\\" and not backslash
            else:
                quoted = character == '"'
                depth += (character in "{[") - (character in "}]")
            if not quoted and depth <= 0 and character in '"}]':
                return text
            try:
                character = yield from self._next()
            except _End:
                self._say(writer.unfinished())
                raise

    # Characters

    def _next(self) -> Steps:
        while self._at == len(self.raw):
            if not (yield):
                raise _End
        self._at += 1
        return self.raw[self._at - 1]

    def _solid(self) -> Steps:
        """The next character that is not white space."""
        while (character := (yield from self._next())).isspace():
            pass
        return character

    def _until(self, *tags: str, escaped: bool = False) -> Steps:
        """The text before the first of the tags, and that tag; `escaped` passes it on as it comes, escaped for JSON."""
        text = held = ""
        while True:
            held += yield from self._next()
            for tag in tags:
                if held.endswith(tag):
                    text += held[: len(held) - len(tag)]
                    if escaped:
                        self._say(_escaped(held[: len(held) - len(tag)]))
                    return text, tag
            keep = max(beginning(held, tag) for tag in tags)
            if escaped:
                self._say(_escaped(held[: len(held) - keep]))
            text, held = text + held[: len(held) - keep], held[len(held) - keep :]

    def _begin(self, name: str) -> None:
        if not NAME.fullmatch(name) or (self.form == "bare" and name not in self._tools):
            raise Malformed
        self._name = name
        self._said.append(("call", name))

    def _refuse(self) -> None:
        if self._name is None:
            raise Malformed

    def _say(self, text: str) -> None:
        if text:
            self._said.append(("arguments", text))

    def _kinds(self, key: str) -> frozenset[str]:
        root = self._tools.get(self._name or "", {})
        properties = resolved(root, root).get("properties")
        return kinds(properties.get(key), root) if isinstance(properties, Mapping) else frozenset()


def _as_json(text: str, kinds: frozenset[str]) -> str:
    """A value's text as JSON: a string if it is not JSON, or if the schema allows strings and not this kind of JSON.

    Other JSON stays what it is, even if the schema does not allow it.
    """
    if "boolean" in kinds and text.strip().lower() in ("true", "false"):
        return text.strip().lower()
    try:
        value = loaded(text)
    except (ValueError, RecursionError):
        return dumped(text)
    fits = _kind(value) in kinds or (_kind(value) == "integer" and "number" in kinds)
    return dumped(text if "string" in kinds and not fits else value)


def _arguments(text: str) -> str:
    """Arguments as strict JSON: some models write the object as a string, or null for none."""
    if text == "null":
        return "{}"
    return strict(_decoded(text) if text.startswith('"') else text)


def _decoded(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return text.strip('"')


def _escaped(text: str) -> str:
    return dumped(text)[1:-1]


PROBE = "probe_tool"
CALL = {"id": "call00000", "type": "function", "function": {"name": PROBE, "arguments": {"key": "value"}}}
CONVERSATION = (
    {"role": "user", "content": "question"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "result", "tool_call_id": CALL["id"], "name": PROBE},
)
SHOWN = {"type": "function", "function": {"name": PROBE, "description": "A tool.", "parameters": {"type": "object"}}}
WRITTEN: dict[ToolForm, str] = {
    "tags": rf"{CALL_START}\s*{PROBE}\s*{KEY}key{KEY_END}\s*{VALUE}value{VALUE_END}\s*{CALL_END}",
    "json": rf'{CALL_START}\s*{{"name": ?"{PROBE}", ?"arguments": ?{{"key": ?"value"}}}}\s*{CALL_END}',
    "bare": rf'{{"name": ?"{PROBE}", ?"parameters": ?{{"key": ?"value"}}}}',
}


def tool_form(render: Callable[..., str]) -> ToolForm | None:
    """The form in which a chat template writes tool calls; None if it shows no tools, or uses another form.

    `render` takes messages and `tools`, as `ChatTemplate.render` does; if it raises ValueError, the form is None.
    """
    try:
        shown, written = (render(messages, tools=[SHOWN]) for messages in (CONVERSATION[:1], CONVERSATION))
    except ValueError:
        return None
    forms: list[ToolForm] = [form for form, pattern in WRITTEN.items() if re.search(pattern, written)]
    return forms[0] if forms and PROBE in shown else None
