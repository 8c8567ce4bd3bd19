"""A checkpoint's chat templates, one or several by name, and how one is rendered: messages in, the prompt's text out.

`chat_template.jinja` is the template named `default`, and each file in `additional_chat_templates/` is one of its name.
If there is no such file, `chat_template` in `tokenizer_config.json` is the template or a list of named ones; if that is
missing too, the same field in `chat_template.json` is. transformers 5 reads the same except the last, and chooses the
same template for a conversation (tests/parity/test_template_files.py).

Templates are untrusted programs, so they run in a process with limits (`template_worker.py`), which is killed when one
takes too much time or memory. Memory is bounded on Linux only; on macOS and Windows only time is. Within the bounds,
templates are rendered as in transformers, with the same settings, globals and filters
(tests/parity/test_template_rendering.py).
"""

import atexit
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ling3.runtime import regular_file
from ling3.runtime.limited_process import LimitedProcess, LimitExceeded
from ling3.runtime.quoting import QuotingError, shown
from ling3.text.added_tokens import SETTINGS
from ling3.text.tokenizer_file import TokenizerError, read_object

# The longest published template is about 20,000 characters long.
LONGEST_TEMPLATE = 65_536
# For one rendering; 2,000 turns with 2,000,000 characters in total take about 0.1 seconds.
SECONDS = 3
# Of address space for rendering, in addition to the interpreter's.
MEBIBYTES = 512

WORKER = pathlib.Path(__file__).with_name("template_worker.py")


class ChatTemplateError(QuotingError):
    """Raised if the template is malformed, exceeds its bounds, or refuses these messages."""


class ChatTemplate:
    """A chat template; `source` is its text, `origin` the file and field that errors name.

    Raises ChatTemplateError, with the line number, if the template is not valid.
    """

    def __init__(self, source: str, origin: str = "the chat template"):
        if len(source) > LONGEST_TEMPLATE:
            raise ChatTemplateError(f"{origin}: {len(source)} characters long, where {LONGEST_TEMPLATE} are allowed")
        self.source = source
        self.origin = origin
        self._ask(given=None)

    def render(self, messages: Sequence[Any], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Renders the prompt for `messages`: dicts with the strings `role` and `content`, and other plain JSON values
        that the template reads (`tool_calls`, `reasoning_content`). A value of None counts as absent.

        `variables` go to the template, such as `enable_thinking`; `tools` and `documents` are None by default.
        Raises ValueError for malformed messages or variables, ChatTemplateError for errors in the template.
        """
        given = {
            "messages": _validate_messages(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **{name: _plain(value, name) for name, value in variables.items()},
        }
        return self._ask(given)

    def _ask(self, given: dict[str, Any] | None) -> str:
        try:
            reply = _worker().ask(SECONDS, source=self.source, given=given)
        except LimitExceeded as error:
            raise ChatTemplateError(f"{self.origin}: {error}") from None
        if "error" in reply:
            raise ChatTemplateError(self.origin + reply["error"])
        return reply["text"]


# By process id, so that a forked child starts another worker.
_workers: dict[int, LimitedProcess] = {}


def _worker() -> LimitedProcess:
    return _workers.setdefault(os.getpid(), LimitedProcess(WORKER, MEBIBYTES))


atexit.register(lambda: _worker().stop())


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
                raise ValueError(f"{where}: {field!r} is missing; a message has a 'role' and its 'content'")
        for field in ("role", "content"):
            value = message.get(field, "")
            if not isinstance(value, str):
                raise ValueError(f"{where}: {field!r} is a {type(value).__name__}, where a string was expected")
        checked.append(_plain(message, where))
    return checked


def _plain(value: Any, where: str) -> Any:
    """A copy of `value` in exact JSON types."""
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


TEMPLATE, LEGACY = "chat_template.jinja", "chat_template.json"
NAMED = "additional_chat_templates"
FILES = (TEMPLATE, LEGACY, f"{NAMED}/*.jinja")
DEFAULT, TOOLS = "default", "tool_use"
MOST_TEMPLATES = 32


def chat_templates(directory: pathlib.Path, settings: Mapping[str, Any]) -> dict[str, ChatTemplate]:
    """The templates of a checkpoint by name; `settings` are the fields of `tokenizer_config.json`."""
    files = {DEFAULT: directory / TEMPLATE} if (directory / TEMPLATE).exists() else {}
    files |= {path.stem: path for path in sorted((directory / NAMED).glob("*.jinja"))}
    if files:
        _check_count(len(files), str(directory / NAMED))
        return {name: ChatTemplate(_text(path), str(path)) for name, path in files.items()}
    source, value = directory / SETTINGS, settings.get("chat_template")
    if value is None:
        source = directory / LEGACY
        value = read_object(source).get("chat_template")
    if value is None:
        return {}
    where = f"{source}: chat_template"
    if isinstance(value, str):
        return {DEFAULT: ChatTemplate(value, where)}
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        value = {item.get("name"): item.get("template") for item in value}
    if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
        expected = "a string or a list of {'name', 'template'}"
        raise TokenizerError(f"{where} is {shown(value)}, where {expected} was expected")
    _check_count(len(value), where)
    return {name: ChatTemplate(text, f"{where}, {name}") for name, text in value.items()}


def chosen_template(templates: Mapping[str, ChatTemplate], tools: object) -> ChatTemplate:
    """The template for a conversation: `tool_use` if there are `tools` and it exists, else `default`.

    Raises ValueError if the checkpoint has no template `default`.
    """
    if tools is not None and TOOLS in templates:
        return templates[TOOLS]
    if DEFAULT not in templates:
        raise ValueError(f"the chat templates are {', '.join(templates)}, and none is the {DEFAULT} one")
    return templates[DEFAULT]


def _text(path: pathlib.Path) -> str:
    try:
        # UTF-8 has at most four bytes for a character.
        return regular_file.read(path, 4 * LONGEST_TEMPLATE).decode("utf-8")
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: not UTF-8 ({error})") from error
    except ValueError as error:
        raise TokenizerError(str(error)) from error


def _check_count(count: int, where: str) -> None:
    if not 1 <= count <= MOST_TEMPLATES:
        raise TokenizerError(f"{where}: {count} templates, where 1 to {MOST_TEMPLATES} were expected")
