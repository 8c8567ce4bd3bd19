"""The text that goes to a custom tool, out of the arguments of the call that stands for it."""

import json
import re

INPUT = "input"
"""The argument that has it."""
BEGIN = re.compile(rf'\{{\s*"{INPUT}"\s*:\s*"')
CHARACTERS = re.compile(r'(?:[^"\\]|\\.)*')


class CustomInput:
    """Takes the input out of a call's arguments, `{"input": "…"}` as strict JSON, as they come, with escapes uncut."""

    def __init__(self) -> None:
        self._text, self._at = "", -1

    def feed(self, arguments: str) -> str:
        """The part of the input that more of the arguments adds."""
        self._text += arguments
        if self._at == -1 and (begun := BEGIN.match(self._text)):
            self._at = begun.end()
        return self._read() if self._at >= 0 else ""

    def finish(self) -> str:
        """The input where the arguments are others than those: the only string of them, or all of them."""
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
