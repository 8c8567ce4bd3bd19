"""Renders chat templates in a process with limits, which runs this file; it imports jinja2, but nothing of ling3.

A template is an untrusted program. jinja2's sandbox keeps it away from Python's internals, but does not bound its time
and memory; a process can be given limits, and killed.
"""

import datetime
import functools
import json
import traceback
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_TEXT = 20_000_000
LONGEST_ERROR = 2_000


class _Refusal(jinja2.TemplateError):
    pass


class _GenerationTag(Extension):
    """`{% generation %} … {% endgeneration %}`, with which templates mark the assistant's tokens for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        """Parses the statements between the two tags as one scope."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _raise_exception(message: Any) -> None:
    raise _Refusal(str(message))


def _tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False):
    # jinja2's built-in filter escapes for HTML.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    """Compiles a template in an environment that renders as transformers does (see `chat_template.py`)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
    }
    return environment.from_string(source)


def prepare() -> None:
    """Prepares nothing, since templates have nothing in common."""


def answer(source: str, given: dict[str, Any] | None) -> dict[str, str]:
    """Renders the template with the variables `given`: its `text`. If `given` is None, only compiles it: "".

    If anything goes wrong, returns an `error` instead: a message to follow the template's name.
    """
    try:
        template = _compiled(source)
        text = "" if given is None else template.render(given)
        if len(text) > LONGEST_TEXT:
            raise SecurityError(f"it makes a text of {len(text)} characters, where at most {LONGEST_TEXT} are allowed")
    except MemoryError:
        raise
    except Exception as error:
        return {"error": _words(error)[:LONGEST_ERROR]}
    return {"text": text}


def _words(error: Exception) -> str:
    if isinstance(error, _Refusal):
        return f" refuses these messages: {error}"
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f", line {error.lineno}: {error.message}"
    message = str(error) or type(error).__name__
    if isinstance(error, RecursionError):
        message = "it is nested too deeply"
    elif not isinstance(error, jinja2.TemplateError):
        message = f"{type(error).__name__}: {message}"
    # jinja2 puts the template's lines into the traceback.
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if frame.f_code.co_filename == "<template>"]
    return f", line {lines[-1]}: {message}" if lines else f": {message}"
