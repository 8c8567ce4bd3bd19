"""The chat templates of a checkpoint: one, or several by name.

`chat_template.jinja` is the template named `default`, and each file in `additional_chat_templates/` is one of its name.
If there is no such file, `chat_template` in `tokenizer_config.json` is the template or a list of named ones; if that is
missing too, the same field in `chat_template.json` is. transformers 5 reads the same except the last, and chooses the
same template for a conversation (tests/parity/test_template_files.py).
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from ling3.runtime import regular_file
from ling3.runtime.quoting import shown
from ling3.text.added_tokens import SETTINGS
from ling3.text.chat_template import LONGEST_TEMPLATE, ChatTemplate
from ling3.text.tokenizer_file import TokenizerError, read_object

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
