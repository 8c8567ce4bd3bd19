"""Reads a checkpoint's `tokenizer.json`, an untrusted program, within bounds; failures are TokenizerErrors.

The tokenizers library runs it. How much longer its steps may make a text is checked before the file is loaded. The time
of a regex is not bounded: the library stops it only after ten million backtracks at one position of a text, about a
fifth of a second, and a regex that stays below that may take as long at every position.
"""

import base64
import math
import pathlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import tokenizers

from ling3.runtime import regular_file, strict_json
from ling3.runtime.quoting import QuotingError, printable, shown

MOST_STEPS = 32
"""The most steps of normalizer, pre-tokenizer and decoder together; published tokenizers have up to ten."""
MOST_GROWTH = 256
"""How many times longer normalizer and pre-tokenizer, or the decoder, may make a text."""
LONGEST_STRING = 16_384
"""The most characters of a token, a pattern or a replacement."""
LONGEST_WORD = 1_000
"""The most characters of a word that WordPiece splits, in quadratic time; published tokenizers have 100."""

PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
"""The parts that are made of steps, and the field in which a `Sequence` lists its steps."""


class TokenizerError(QuotingError):
    """Raised if a tokenizer's file is damaged, does not fit the others, or fails on its input."""


class Reported:
    """`with Reported(path, problem)` raises a TokenizerError with the `problem` if the tokenizers library fails.

    The library raises bare Exceptions, and on a panic a class that is not derived from Exception.
    """

    def __init__(self, source: object, problem: str):
        self.source = source
        self.problem = problem

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # The class of a panic, pyo3_runtime.PanicException, cannot be imported.
        if kind is Exception or (kind is not None and kind.__name__ == "PanicException"):
            raise TokenizerError(f"{self.source}: {self.problem} ({printable(error)})") from error


def read(path: pathlib.Path) -> tokenizers.Tokenizer:
    """The tokenizer in a file. Raises FileNotFoundError, and TokenizerError if it is damaged or out of bounds."""
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing: a checkpoint's tokenizer is its {path.name} (the Hugging Face fast format), or "
            "tiktoken.model for a Kimi model"
        )
    try:
        text = regular_file.read(path, regular_file.TOKENIZER_BYTES).decode("utf-8")
        _check(strict_json.parse(text, str(path)))
    except (ValueError, RecursionError) as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise TokenizerError(f"{path}: not a tokenizer that ling3 can read: {reason}") from error
    with Reported(path, "not a tokenizer that the tokenizers library can read"):
        backend = tokenizers.Tokenizer.from_str(text)
    # A file may ask for these in batches; here a text always gives all its ids and no others.
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises TokenizerError."""
    if not path.exists():
        return {}
    try:
        value = strict_json.read(path)
    except ValueError as error:
        raise TokenizerError(str(error)) from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: a {type(value).__name__}, where an object was expected")
    return value


def _check(file: Any) -> None:
    """Raises ValueError for a file that is out of bounds, or has a form in which that cannot be checked."""
    if not isinstance(file, dict) or not isinstance(file.get("model"), dict):
        raise ValueError(f"found {shown(file)}; expected an object with a model")
    if (longest := _longest(file)) > LONGEST_STRING:
        raise ValueError(f"found a string of {longest:,} characters; expected at most {LONGEST_STRING:,}")
    word = file["model"].get("max_input_chars_per_word", 0)
    if not isinstance(word, int) or word > LONGEST_WORD:
        raise ValueError(f"max_input_chars_per_word: found {shown(word)}; expected at most {LONGEST_WORD:,}")
    steps = {part: list(_steps(file.get(part), part)) for part in PARTS}
    if (count := sum(map(len, steps.values()))) > MOST_STEPS:
        raise ValueError(f"{', '.join(PARTS)}: found {count} steps in all; expected at most {MOST_STEPS}")
    for parts in (("normalizer", "pre_tokenizer"), ("decoder",)):
        growth = math.prod(_growth(step) for part in parts for step in steps[part])
        if growth > MOST_GROWTH:
            found = f"found steps that make a text up to {growth:,.0f} times longer"
            raise ValueError(f"{' and '.join(parts)}: {found}; expected at most {MOST_GROWTH}")


def _longest(value: Any) -> int:
    """The length of the longest string in a JSON value, except merges (of tokens) and charsmaps (see `_growth`)."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        within = (item for key, item in value.items() if key not in ("merges", "precompiled_charsmap"))
        return max(max(map(len, value), default=0), _longest([item for item in within if not isinstance(item, int)]))
    return max(map(_longest, value), default=0) if isinstance(value, list) else 0


def _steps(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """A part of the file, and all steps in it if it is a sequence."""
    if part is None:
        return
    # The library also accepts a list instead of an object, and guesses a missing type.
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError(f"{name}: found {shown(part)}; expected an object with a type")
    yield part
    if part["type"] == "Sequence":
        steps = part.get(PARTS[name])
        if not isinstance(steps, list):
            raise ValueError(f"{name}: found {shown(steps)}; expected the list of a sequence's steps")
        for step in steps:
            yield from _steps(step, name)


def _growth(step: dict[str, Any]) -> float:
    """How many times longer one occurrence of a step may make a text."""
    match step:
        case {"type": "Replace", "content": str(content), "pattern": {"String": str(pattern)}} if pattern:
            return max(1.0, len(content) / len(pattern))
        case {"type": "Replace", "content": str(content), "pattern": {}}:
            return 1 + len(content)  # inserted everywhere, if the pattern matches the empty string
        case {"type": "Replace"}:
            raise ValueError(f"found {shown(step)}; expected a pattern and a content")
        case {"type": "Precompiled", "precompiled_charsmap": str(charsmap)}:
            data = base64.b64decode(charsmap)
            replacements = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
            return max(1, *map(len, replacements))
        case {"type": "ByteLevel" | "BPEDecoder" | "CTC"}:
            return 2
    return 1
