"""Tool calls as models write them, read a character at a time: the call's name, then its arguments as JSON.

tags (Ling-3):          <tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>
json, in tags (Qwen3):  <tool_call>{"name": …, "arguments": {…}}</tool_call>
bare JSON (Llama 3):    {"name": …, "parameters": {…}}, also after <|python_tag|>

Tags are read in both of their forms, whichever the model's is.
"""

import contextlib
import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal

ToolForm = Literal["tags", "json", "bare"]
Said = tuple[Literal["call", "arguments"], str]
Steps = Generator[None, str, Any]
"""Asks for a character with each yield; the empty text stands for the end."""

CALL_START, CALL_END, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
NAME = re.compile(r"[\w.:/-]+")
DEEPEST = 16
"""The most references and alternatives of a schema that are followed."""
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
    """How a chat template writes tool calls, by what it makes of one; None if it shows no tools, or writes otherwise.

    `render` is given messages and `tools`, as `ChatTemplate.render` is; its ValueErrors count as None.
    """
    try:
        shown, written = (render(messages, tools=[SHOWN]) for messages in (CONVERSATION[:1], CONVERSATION))
    except ValueError:
        return None
    forms: list[ToolForm] = [form for form, pattern in WRITTEN.items() if re.search(pattern, written)]
    return forms[0] if forms and PROBE in shown else None


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or what its `$ref` within the root stands for; {} for what is none or stands for nothing."""
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
    """This is no tool call: `CallReader.raw` is text."""


class _End(Exception):
    """The text ends inside the call."""


class CallReader:
    """Reads one tool call after its opening tag, which is `raw`'s beginning.

    Once its name is known the call stands, whatever follows; before, `Malformed` says that it is none. A bare call has
    to name one of the tools. Arguments that the text leaves unfinished stay so.
    """

    def __init__(self, form: ToolForm, tools: Mapping[str, Mapping[str, Any]], raw: str):
        self.form, self.raw = form, raw
        self._tools = tools
        self._name: str | None = None
        self._said: list[Said] = []
        self._back = self._closing = ""
        self._steps = self._tagged() if form == "tags" else self._bare(raw.endswith("{"))
        next(self._steps)

    def feed(self, character: str) -> bool:
        """True once the call is complete; raises Malformed where it turns out to be none."""
        self.raw += character
        try:
            self._steps.send(character)
        except StopIteration:
            return True
        return False

    def end(self) -> list[Said]:
        """What is left to say at the end of the text; Malformed if the name never came."""
        with contextlib.suppress(StopIteration, _End):
            self._steps.send("")
        if self._name is None:
            raise Malformed
        if self._closing:
            self._say(self._closing)
        return self.take()

    def take(self) -> list[Said]:
        """What is new."""
        said, self._said = self._said, []
        return said

    # The forms

    def _tagged(self) -> Steps:
        first = yield from self._solid()
        if first == "{":
            yield from self._object()
            yield from self._until(CALL_END)
            return
        self._back = first
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
            self._say(("{" if not written else ", ") + json.dumps(key.strip(), ensure_ascii=False) + ": ")
            tag = yield from self._value(self._kinds(key.strip()))
            written += 1
            self._closing = "}"
            if tag == VALUE_END:
                _, tag = yield from self._until(KEY, CALL_END)
        self._say("}" if written else "{}")

    def _value(self, kinds: frozenset[str]) -> Steps:
        """A value in tags: text as it comes for a string, or JSON where the schema does not ask for a string alone."""
        if kinds == {"string"}:
            self._say('"')
            _, tag = yield from self._until(VALUE_END, CALL_END, escaped=True)
            self._say('"')
            return tag
        text, tag = yield from self._until(VALUE_END, CALL_END)
        self._say(_as_json(text, kinds))
        return tag

    def _bare(self, opened: bool) -> Steps:
        if not opened and (yield from self._solid()) != "{":
            raise Malformed
        yield from self._object()

    def _object(self) -> Steps:
        """The JSON object of a call, after its opening brace."""
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
        """A JSON value from its first character on, said as it comes or not; line breaks in strings are escaped."""
        text, depth, character = "", 0, first
        quoted = backslash = False
        while True:
            if not quoted and not depth and text and character in ",}] \n\t\r":
                self._back = character
                return text
            shown = json.dumps(character)[1:-1] if quoted and character < " " else character
            text += shown
            if say:
                self._say(shown)
            if quoted:
                quoted, backslash = character != '"' or backslash, character == "\\" and not backslash
            else:
                quoted = character == '"'
                depth += (character in "{[") - (character in "}]")
            if not quoted and depth <= 0 and character in '"}]':
                return text
            character = yield from self._next()

    # Characters

    def _next(self) -> Steps:
        if self._back:
            character, self._back = self._back, ""
            return character
        character = yield
        if not character:
            raise _End
        return character

    def _solid(self) -> Steps:
        """The next character that is no white space."""
        while (character := (yield from self._next())).isspace():
            pass
        return character

    def _until(self, *tags: str, escaped: bool = False) -> Steps:
        """The text before the first of the tags, and that tag; with `escaped` it is said as a string's as it comes."""
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
    """A value's text as JSON: itself where it is JSON of the schema's kinds, or else a string if that is one of them.

    Text that is no JSON, and JSON of other kinds where no string is asked for, stay what they are.
    """
    if "boolean" in kinds and text.strip().lower() in ("true", "false"):
        return text.strip().lower()
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    fits = _kind(value) in kinds or (_kind(value) == "integer" and "number" in kinds)
    if "string" in kinds and not fits:
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _arguments(text: str) -> str:
    """Arguments as a JSON object's text: some models write it as a string, or null for none."""
    if text == "null":
        return "{}"
    return _decoded(text) if text.startswith('"') else text


def _decoded(text: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError:
        return text.strip('"')


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def beginning(text: str, tag: str) -> int:
    """How many characters at the end of `text` begin `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
