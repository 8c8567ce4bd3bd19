"""The files of a tokenizer in a checkpoint's directory, which go along when a model is saved or quantized."""

import logging
import os

from ling3.checkpoint import hub
from ling3.checkpoint.safetensors_file import CheckpointError
from ling3.model import Origin
from ling3.runtime import regular_file

logger = logging.getLogger(__name__)

VOCABULARIES = ("tokenizer.json", "tiktoken.model")
NAMES = (
    *VOCABULARIES,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
TEMPLATES = "additional_chat_templates"
"""A folder of chat templates, `*.jinja`."""


def read(source: str | os.PathLike[str], revision: str | None = None) -> dict[str, bytes]:
    """The contents of a checkpoint's tokenizer files, by name; empty without one of VOCABULARIES.

    Raises CheckpointError for a file that is too large or no regular file, and what `hub.resolve` raises.
    """
    directory = hub.resolve(source, (*NAMES, f"{TEMPLATES}/*.jinja"), revision)
    names = [*NAMES, *(f"{TEMPLATES}/{path.name}" for path in (directory / TEMPLATES).glob("*.jinja"))]
    there = [name for name in names if (directory / name).exists()]
    if not set(VOCABULARIES) & set(there):
        return {}
    try:
        return {name: regular_file.read(directory / name, regular_file.TOKENIZER_BYTES) for name in there}
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def chosen(origin: Origin, source: str | os.PathLike[str] | bool | None) -> dict[str, bytes]:
    """The files of the tokenizer that `save` should take along, by its `tokenizer_from`: `source`.

    If that is True, the tokenizer of the model's origin, or a warning if there is none. Raises CheckpointError if any
    other source has none.
    """
    if source is not True:
        files = read(source) if source else {}
        if source and not files:
            raise CheckpointError(f"{source}: found no tokenizer.json; give tokenizer_from a checkpoint that has one")
        return files
    if origin.path is None:
        return {}
    try:
        files, why = read(origin.path, origin.revision), f"{origin.path} has none"
    except (CheckpointError, OSError) as error:
        files, why = {}, str(error)
    if not files:
        logger.warning("a model is saved without a tokenizer, which serving needs: give tokenizer_from (%s)", why)
    return files
