"""Grammars of whole replies: free thinking, then tool calls in the model's own form, text, or a structured answer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ling3.engine.structured import Grammar, JSONSchema, Structured
from ling3.text.replies import THINK_END
from ling3.text.tokenizer import Tokenizer
from ling3.text.tool_calls import (
    CALL_END,
    CALL_START,
    DEEPEST,
    KEY,
    KEY_END,
    PYTHON_TAG,
    VALUE,
    VALUE_END,
    ToolForm,
    kinds,
    resolved,
)

CHARACTER = r"[^\x00-\x08\x0B-\x1F\x7F]"
ANY = r"(.|\n)*"
NOTES = {
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "$schema",
    "$comment",
    "$ref",
    "$defs",
    "definitions",
}
OF_TEXT = {*NOTES, "type", "enum", "const", "anyOf", "oneOf", "minLength", "maxLength", "pattern"}
OF_ARGUMENTS = {*NOTES, "type", "properties", "required", "additionalProperties"}


class Callable(NamedTuple):
    """A function that may be called."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    """Whether every keyword of the schema has to hold."""


def after_thinking(answer: Structured, tokenizer: Tokenizer) -> Grammar:
    """Free thinking without tool calls up to `</think>`, then the answer."""
    tags = _Tags(tokenizer)
    lark = f"start: thinking NL? @answer\n{tags.until('thinking', 'FREE', THINK_END)}{tags.free(CALL_START)}"
    return Grammar(lark + "NL: /\\n{1,2}/\n", {"answer": answer})


def calls(
    functions: Sequence[Callable], form: ToolForm, tokenizer: Tokenizer, several: bool, answer: Structured | bool
) -> Grammar:
    """Calls of the functions, `several` or one, whose arguments have their schemas.

    `answer` says what the reply may be instead: False for nothing, True for a text, which may have calls in it too.
    Of bare calls there is one at most, as Llama's template allows. ValueError for a schema with what cannot be held.
    """
    tags, parts = _Tags(tokenizer), {} if isinstance(answer, bool) else {"answer": answer}
    bodies = []
    for i, function in enumerate(functions):
        try:
            body, own = _tagged(tags, function, i) if form == "tags" else _json(function, form, i)
        except ValueError as error:
            raise ValueError(f"{function.name}: {error}") from None
        bodies.append(body)
        parts |= own
    lines = [f"call: {' | '.join(f'call{i}' for i in range(len(bodies)))}", *bodies, "NL: /\\n{1,2}/"]
    if form == "bare":
        lines.append(f"one: {tags.optional(PYTHON_TAG)} call")
        lines.append(r"OTHER: /([ \n\t]*[^ \n\t{](.|\n)*)?/")
        start = "one | OTHER" if answer is True else "one" if answer is False else "one | @answer"
    else:
        lines += [f"one: {tags.literal(CALL_START)} rest", f"rest: NL? call NL? {tags.literal(CALL_END)}"]
        lines += [tags.until("head", "FREE", CALL_START), tags.free(CALL_START)]
        forced = "NL? one (NL? one)*" if several else "NL? one"
        texts = "(head rest)* FREE" if several else "FREE | head rest"
        start = texts if answer is True else forced if answer is False else f"{forced} | @answer"
    return Grammar(f"start: {start}\n" + "\n".join(lines) + "\n", parts)


def _json(function: Callable, form: ToolForm, i: int) -> tuple[str, dict[str, Structured]]:
    """A call as a JSON object."""
    parameters = {"type": "object", **function.parameters}
    if "$ref" not in parameters:
        parameters = {"properties": {}, "additionalProperties": False, **parameters}
    key = "parameters" if form == "bare" else "arguments"
    # Lexemes as in JSON: the longest one counts where an answer in JSON may stand instead.
    words = ["{", '"name"', ": ", json.dumps(function.name), ", ", f'"{key}"', ": "]
    begin = " ".join(map(json.dumps, words))
    return f'call{i}: {begin} @arguments{i} "}}"', {f"arguments{i}": JSONSchema(parameters)}


def _tagged(tags: "_Tags", function: Callable, i: int) -> tuple[str, dict[str, Structured]]:
    """A call with its arguments in tags, in the schema's order; strings are bare, and other values JSON."""
    root = function.parameters
    schema = resolved(root, root)
    if function.strict:
        _check(schema, OF_ARGUMENTS)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    lines, parts, wanted = [], {}, []
    for j, (name, inner) in enumerate(properties.items()):
        key = json.dumps(name, ensure_ascii=False)
        head = f"{tags.literal(KEY)} {key} {tags.literal(KEY_END)} NL? {tags.literal(VALUE)}"
        if kinds(inner, root) == {"string"}:
            lines.append(f"TEXT{i}X{j}: {_text(inner, root, function.strict)}")
            lines.append(tags.until(f"value{i}x{j}", f"TEXT{i}X{j}", VALUE_END))
        else:
            own = {key: root[key] for key in ("$defs", "definitions") if key in root}
            parts[f"value_{i}_{j}"] = JSONSchema({**inner, **own} if isinstance(inner, Mapping) else inner)
            lines.append(f"value{i}x{j}: @value_{i}_{j} {tags.literal(VALUE_END)}")
        lines.append(f"argument{i}x{j}: {head} value{i}x{j}")
        wanted.append(f"(NL? argument{i}x{j})" + ("" if name in required else "?"))
    return "\n".join([f"call{i}: {json.dumps(function.name)} {' '.join(wanted)}", *lines]), parts


def _text(schema: Any, root: Mapping[str, Any], strict: bool, depth: int = 0) -> str:
    """A string as it stands between tags, as a terminal's expression."""
    schema = resolved(schema, root)
    if strict:
        _check(schema, OF_TEXT)
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    options = schema.get("anyOf") or schema.get("oneOf") or ()
    if options and depth < DEEPEST:
        return " | ".join(f"({_text(option, root, strict, depth + 1)})" for option in options)
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    bounds = f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
    text, pattern = f"/{CHARACTER}{bounds}/", schema.get("pattern")
    return text if pattern is None else f"{text} & /{_anchored(str(pattern))}/"


def _anchored(pattern: str) -> str:
    """A schema's pattern, which may match anywhere, as one of the whole text."""
    begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begin : len(pattern) - end].replace("\\/", "/").replace("/", "\\/")
    return ("" if begin else ANY) + f"({inner})" + ("" if end else ANY)


def _check(schema: Mapping[str, Any], known: set[str]) -> None:
    if unknown := schema.keys() - known:
        raise ValueError(f"{min(unknown)} cannot be held strictly in this model's form of tool calls")


class _Tags:
    """Tags in a grammar, which may be special tokens: these are no text."""

    def __init__(self, tokenizer: Tokenizer):
        added = tokenizer.backend.get_added_tokens_decoder()
        self._special = {token.content: i for i, token in added.items() if token.special}

    def literal(self, tag: str) -> str:
        """The tag."""
        return f"<[{self._special[tag]}]>" if tag in self._special else json.dumps(tag)

    def optional(self, tag: str) -> str:
        """The tag or nothing; nothing where the tokenizer has no such token."""
        return f"{self.literal(tag)}?" if tag in self._special else ""

    def until(self, rule: str, terminal: str, tag: str) -> str:
        """A rule: a terminal up to the first such tag, and the tag."""
        if tag in self._special:
            return f"{rule}: {terminal} {self.literal(tag)}\n"
        return f"{rule}[suffix={json.dumps(tag)}]: {terminal}\n"

    def free(self, tag: str) -> str:
        """The terminal FREE: a text without such a tag."""
        return f"FREE: /{ANY}/" + ("\n" if tag in self._special else f" & ~/{ANY}{tag}{ANY}/\n")
