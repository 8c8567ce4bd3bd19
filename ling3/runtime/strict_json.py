"""JSON from untrusted files: no duplicate keys, no NaN, no nesting deep enough to exhaust the stack."""

import json
import os
from typing import Any

from ling3.runtime import regular_file
from ling3.runtime.quoting import shown

CONFIG_BYTES = 2**22
"""The largest configuration or settings file that is read; published ones have at most a few hundred thousand bytes."""


def read(path: str | os.PathLike[str], largest: int = CONFIG_BYTES) -> Any:
    """The value in a JSON file of at most `largest` bytes. Raises what `regular_file.read` and `parse` do."""
    return parse(regular_file.read(path, largest), str(path))


def parse(text: str | bytes, source: str) -> Any:
    """The value of the JSON `text` (UTF-8); `source` is the file that errors name.

    Python's own parser keeps the last of two equal keys and accepts `NaN` and `Infinity`, which are not JSON.
    Raises ValueError, with line and column for malformed JSON.
    """
    try:
        return _value(text, source)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: no valid JSON ({error}); fetch or write the file again") from error


def parse_line(text: str | bytes, source: str, advice: str = "mend the line") -> Any:
    """`parse` for a line of JSONL, which `source` names; errors add the column and the `advice`."""
    try:
        return _value(text, source)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}, column {error.colno}: no valid JSON ({error.msg}); {advice}") from error


def _value(text: str | bytes, source: str) -> Any:
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError(f"{source}: nested too deeply to be read; a Ling-3 file has at most four levels") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen: set[str] = set()
        twice = sorted({key for key, _ in pairs if key in seen or seen.add(key)})
        raise ValueError(f"the same key twice: {', '.join(map(shown, twice[:5]))}; keep one of each")
    return mapping


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value; write a finite number")
