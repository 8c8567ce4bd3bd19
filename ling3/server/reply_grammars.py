"""Grammars of replies: free thinking, then tool calls in the model's format, a text, or a structured answer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ling3.engine.one_of import REMEDY
from ling3.engine.structured import Grammar, JSONSchema, Regex, Structured
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
BREAKS = r"NL: /\n{1,2}/"
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
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    """Whether every keyword of the schema must be enforced."""
    form: Structured | None = None
    """The grammar of a custom tool's only argument; None for any text."""
    custom: bool = False
    """Whether it represents a custom tool, whose input is its only argument."""
    shown: Mapping[str, Any] = {}
    """The function as the chat template takes it."""


def after_thinking(reply: Structured, tokenizer: Tokenizer) -> Grammar:
    """A grammar of free thinking without tool calls, `</think>`, and then the `reply`."""
    tags = _Tags(tokenizer)
    thinking = tags.until("thinking", f"/{ANY}/", THINK_END, CALL_START)
    return Grammar(f"start: thinking NL? @reply\n{thinking}\n{BREAKS}\n", {"reply": reply})


def calls(
    functions: Sequence[Callable], form: ToolForm, tokenizer: Tokenizer, several: bool, answer: Structured | bool
) -> Grammar:
    """A grammar of calls of the functions, one or `several`, whose arguments satisfy their schemas.

    `answer` is what the reply may be instead: False for nothing, True for a text, which may contain calls too, or a
    constraint. The form "bare" allows at most one call, as Llama's template does. Raises ValueError for a schema that
    cannot be enforced.
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
    lines = [f"call: {' | '.join(f'call{i}' for i in range(len(bodies)))}", *bodies, BREAKS]
    if form == "bare":
        lines.append(f"one: {tags.optional(PYTHON_TAG)} call")
        lines.append(r"OTHER: /([ \n\t]*[^ \n\t{](.|\n)*)?/")
        start = "one | OTHER" if answer is True else "one" if answer is False else "one | @answer"
    else:
        lines += [f"one: {tags.literal(CALL_START)} rest", f"rest: NL? call NL? {tags.literal(CALL_END)}"]
        lines += [tags.until("head", f"/{ANY}/", CALL_START), f"TAIL: {without(f'/{ANY}/', CALL_START)}"]
        forced = "NL? one (NL? one)*" if several else "NL? one"
        texts = "(head rest)* TAIL" if several else "TAIL | head rest"
        start = texts if answer is True else forced if answer is False else f"{forced} | @answer"
    return Grammar(f"start: {start}\n" + "\n".join(lines) + "\n", parts)


def _json(function: Callable, form: ToolForm, i: int) -> tuple[str, dict[str, Structured]]:
    """A call as a JSON object: its rule, and the constraint on its arguments."""
    if function.form is not None:
        raise ValueError(
            "a grammar cannot be held in this model's form of tool calls, where the input is a JSON string"
        )
    parameters = {"type": "object", **function.parameters}
    if not parameters.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
        parameters = {"properties": {}, "additionalProperties": False, **parameters}
    key = "parameters" if form == "bare" else "arguments"
    # Lexemes as in JSON: the lexer takes the longest match, and an answer in JSON may be allowed too.
    words = ["{", '"name"', ": ", json.dumps(function.name), ", ", f'"{key}"', ": "]
    begin = " ".join(map(json.dumps, words))
    return f'call{i}: {begin} @arguments{i} "}}"', {f"arguments{i}": JSONSchema(parameters)}


def _tagged(tags: "_Tags", function: Callable, i: int) -> tuple[str, dict[str, Structured]]:
    """A call with arguments in tags, in the schema's order: strings are bare, other values JSON."""
    root = function.parameters
    schema = resolved(root, root)
    if function.strict:
        _check(schema, OF_ARGUMENTS)
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    lines, parts, wanted = [], {}, []
    for j, (name, inner) in enumerate(properties.items()):
        key = json.dumps(name, ensure_ascii=False)
        head = f"{tags.literal(KEY)} {key} {tags.literal(KEY_END)} NL? {tags.literal(VALUE)}"
        if isinstance(function.form, Regex):
            lines.append(tags.until(f"value{i}x{j}", f"/{_slashed(function.form.pattern)}/", VALUE_END))
        elif function.form is None and kinds(inner, root) == {"string"}:
            lines.append(tags.until(f"value{i}x{j}", _text(inner, root, function.strict), VALUE_END))
        else:
            own = {key: root[key] for key in ("$defs", "definitions") if key in root}
            value = {**inner, **own} if isinstance(inner, Mapping) else inner
            parts[f"value_{i}_{j}"] = JSONSchema(value) if function.form is None else function.form
            lines.append(f"value{i}x{j}: @value_{i}_{j} {tags.literal(VALUE_END)}")
        lines.append(f"argument{i}x{j}: {head} value{i}x{j}")
        wanted.append(f"(NL? argument{i}x{j})" + ("" if name in required else "?"))
    return "\n".join([f"call{i}: {json.dumps(function.name)} {' '.join(wanted)}", *lines]), parts


def _text(schema: Any, root: Mapping[str, Any], strict: bool, depth: int = 0) -> str:
    """The expression of a terminal for a string between tags."""
    schema = resolved(schema, root)
    if strict:
        _check(schema, OF_TEXT)
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in values)
    options = schema.get("anyOf") or schema.get("oneOf") or ()
    if "oneOf" in schema:
        _check_apart([resolved(option, root) for option in schema["oneOf"]])
    if options and depth < DEEPEST:
        return " | ".join(f"({_text(option, root, strict, depth + 1)})" for option in options)
    least, most = schema.get("minLength") or 0, schema.get("maxLength")
    bounds = f"{{{least},{'' if most is None else most}}}" if least or most is not None else "*"
    text, pattern = f"/{CHARACTER}{bounds}/", schema.get("pattern")
    return text if pattern is None else f"{text} & /{_anchored(str(pattern))}/"


def _check_apart(options: Sequence[Mapping[str, Any]]) -> None:
    """Raises ValueError unless no string satisfies two options: all list their values, and the lists are disjoint."""
    lists = [{json.dumps(x) for x in option.get("enum", [option.get("const")])} for option in options]
    listed = all("enum" in option or "const" in option for option in options)
    if len(options) > 1 and not (listed and sum(map(len, lists)) == len(set().union(*lists))):
        raise ValueError(f"oneOf cannot be enforced, as two of its options may hold of one string: {REMEDY}")


def _anchored(pattern: str) -> str:
    """A schema's pattern, which may match anywhere, as a pattern for all of the text."""
    begin, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = _slashed(pattern[begin : len(pattern) - end])
    return ("" if begin else ANY) + f"({inner})" + ("" if end else ANY)


def _slashed(pattern: str) -> str:
    """Escapes a regular expression to be put between slashes."""
    return pattern.replace("\\/", "/").replace("/", "\\/")


def _check(schema: Mapping[str, Any], known: set[str]) -> None:
    if unknown := schema.keys() - known:
        raise ValueError(f"{min(unknown)} cannot be held strictly in this model's form of tool calls")


class _Tags:
    """Tags in a grammar: text, or added tokens, which llguidance never matches as text if they look like `<…>`.

    The reply's parser also finds tags that several tokens spell, so text must not contain a tag's spelling either.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokens = {token.content: i for i, token in tokenizer.backend.get_added_tokens_decoder().items()}

    def literal(self, tag: str) -> str:
        """The tag as an expression of the grammar."""
        return f"<[{self._tokens[tag]}]>" if tag in self._tokens else json.dumps(tag)

    def optional(self, tag: str) -> str:
        """The tag or nothing; only nothing if the tokenizer has no such token."""
        return f"{self.literal(tag)}?" if tag in self._tokens else ""

    def until(self, rule: str, text: str, tag: str, *others: str) -> str:
        """A rule for text up to the first `tag`, and the tag. The text matches a terminal and has none of `others`."""
        terminal = rule.upper()
        if tag in self._tokens:
            return f"{rule}: {terminal} {self.literal(tag)}\n{terminal}: {without(text, tag, *others)}"
        return f"{rule}[suffix={json.dumps(tag)}]: {terminal}\n{terminal}: {without(text, *others)}"


def without(text: str, *tags: str) -> str:
    """A terminal's expression that excludes texts with one of the tags in them."""
    spelled = "|".join(tag.replace("/", "\\/") for tag in tags)
    return f"({text}) & ~/{ANY}({spelled}){ANY}/" if tags else text
