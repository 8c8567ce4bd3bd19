"""Extracts the text for a custom tool from the arguments of a function call."""

import json
import re

INPUT = "input"
"""The name of the argument that holds the text."""
BEGIN = re.compile(rf'\{{\s*"{INPUT}"\s*:\s*"')
CHARACTERS = re.compile(r'(?:[^"\\]|\\.)*')


class CustomInput:
    """Extracts the input from streamed arguments, `{"input": "…"}` in strict JSON, whose pieces split no escape."""

    def __init__(self) -> None:
        self._text, self._at = "", -1

    def feed(self, arguments: str) -> str:
        """The next part of the input, from the next part of the arguments."""
        self._text += arguments
        if self._at == -1 and (begun := BEGIN.match(self._text)):
            self._at = begun.end()
        return self._read() if self._at >= 0 else ""

    def finish(self) -> str:
        """The rest of the input: empty, or for arguments of another form their only string or else all their text."""
        if self._at != -1:
            return ""
        try:
            value = json.loads(self._text)
        except ValueError:
            return self._text
        only = list(value.values()) if isinstance(value, dict) else [value]
        return only[0] if len(only) == 1 and isinstance(only[0], str) else self._text

    def _read(self) -> str:
        part = CHARACTERS.match(self._text, self._at)
        assert part is not None, "it matches nothing, too"
        self._at = part.end()
        return json.loads(f'"{part.group()}"')
