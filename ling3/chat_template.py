"""A checkpoint's own chat template: messages in, the prompt's text out.

Templates are programs from strangers, so they run in `ling3.sandbox`, with work and output bounded in proportion to the
messages. For what stays in bounds the result is what transformers renders: the same settings, globals and filters.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from ling3.quoting import QuotingError
from ling3.sandbox.environment import BoundedEnvironment
from ling3.sandbox.meter import Meter

# The longest published template is about 20,000 characters long.
LONGEST_TEMPLATE = 65_536

# What a rendering may spend: this much in any case, and so much for each element and character of its input.
STEPS, STEPS_PER_ELEMENT = 300_000, 1_000
CHARACTERS, CHARACTERS_PER_CHARACTER = 8_000_000, 128

FILENAME = "<chat template>"


class ChatTemplateError(QuotingError):
    """The template is malformed, oversteps its bounds, or refuses these messages."""


class ChatTemplate:
    """A compiled chat template; `source` is its text, `origin` the file and field that errors name.

    Raises ChatTemplateError, with the line, if the template is not valid or uses what a chat template may not.
    """

    def __init__(self, source: str, origin: str = "the chat template"):
        if len(source) > LONGEST_TEMPLATE:
            raise ChatTemplateError(f"{origin}: {len(source)} characters long, where {LONGEST_TEMPLATE} are allowed")
        self.source = source
        self.origin = origin
        self._code = self._compile()

    def __reduce__(self) -> tuple[type["ChatTemplate"], tuple[str, str]]:
        return ChatTemplate, (self.source, self.origin)

    def render(
        self,
        messages: Sequence[Any],
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`, each a dict with a `role` and a `content` of strings, and whatever else the
        template reads as plain JSON values (`tool_calls`, `reasoning_content`); a value of None counts as absent.

        `variables` are the template's own, such as `enable_thinking`; `tools` and `documents` are None unless given.
        Raises ValueError for malformed messages or variables, ChatTemplateError for what goes wrong in the template.
        """
        given = {
            "messages": _validate_messages(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **{name: _plain(value, name) for name, value in variables.items()},
        }
        elements, characters, _ = Meter(steps=2**62, characters=2**62).weigh(given)
        meter = Meter(
            STEPS + STEPS_PER_ELEMENT * elements,
            CHARACTERS + CHARACTERS_PER_CHARACTER * characters,
        )
        environment = _environment(meter)
        template = environment.template_class.from_code(environment, self._code, environment.make_globals(None))
        try:
            return template.render(given)
        except _Refusal as error:
            raise ChatTemplateError(f"{self.origin} refuses these messages: {error}") from error
        except Exception as error:
            raise ChatTemplateError(f"{self.origin}{_line(error)}: {_reason(error)}") from error

    def _compile(self) -> CodeType:
        try:
            return _environment(Meter(0, 0)).compile(self.source, filename=FILENAME)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"{self.origin}, line {error.lineno}: {error.message}") from error
        except Exception as error:
            raise ChatTemplateError(f"{self.origin}: cannot be compiled ({_reason(error)})") from error


class _Refusal(jinja2.TemplateError):
    pass


def _environment(meter: Meter) -> BoundedEnvironment:
    functions = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return BoundedEnvironment(meter, functions, _tojson)


def _raise_exception(message: Any) -> None:
    raise _Refusal(message)


def _strftime_now(format: str) -> str:
    # The C library expands a format to as much as 256 times its length, and takes a width: %9999d.
    if len(format) > 256:
        raise SecurityError(f"a time format of {len(format)} characters, where a template has at most 256")
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _validate_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise ValueError(f"messages: a {type(messages).__name__}, where a list of {{'role', 'content'}} was expected")
    if not messages:
        raise ValueError("messages: an empty list, where at least one message was expected")
    checked: list[dict[str, Any]] = []
    for index, given in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(given, Mapping):
            raise ValueError(f"{where}: a {type(given).__name__}, where {{'role', 'content'}} was expected")
        message = {key: value for key, value in given.items() if value is not None}
        required = ("role",) if message.get("tool_calls") else ("role", "content")
        for field in required:
            if field not in message:
                raise ValueError(f"{where}: {field!r} is missing")
        for field in ("role", "content"):
            value = message.get(field, "")
            if not isinstance(value, str):
                raise ValueError(f"{where}: {field!r} is a {type(value).__name__}, where a string was expected")
        checked.append(_plain(message, where))
    return checked


def _plain(value: Any, where: str) -> Any:
    """A copy of `value` in exact JSON types: what a template is given has no methods of its own."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ValueError(f"{where}: the key {key!r} is not a string")
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ValueError(f"{where}: a {type(value).__name__}, where a plain JSON value was expected")


def _line(error: Exception) -> str:
    """Where in the template `error` arose; jinja2 puts the template's lines into the traceback."""
    line, frame = None, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename in (FILENAME, "<template>"):
            line = frame.tb_lineno
        frame = frame.tb_next
    return "" if line is None else f", line {line}"


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it takes too much memory"
    message = str(error) or type(error).__name__
    return message if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {message}"
