"""Repairs JSON as a model writes it: the result is readable by any parser of RFC 8259, and can be encoded in UTF-8."""

import json
import re
from typing import Any

SPACE = " \t\n\r"
CLOSING = {"{": "}", "[": "]"}
HEX = "[0-9a-fA-F]"
ESCAPE = re.compile(
    rf'\\["\\/bfnrt]|\\u(?![dD][89a-fA-F]){HEX}{{4}}|\\u[dD][89abAB]{HEX}{{2}}\\u[dD][c-fC-F]{HEX}{{2}}'
)
BEGUN = re.compile(rf"\\(u{HEX}{{0,3}})?|\\u[dD][89abAB]{HEX}{{2}}(\\(u([dD]([c-fC-F]{HEX}?)?)?)?)?")
"""The beginning of an escape, or of a pair of them."""
HIGH, LOW = re.compile(rf"\\u[dD][89abAB]{HEX}{{2}}"), re.compile(rf"\\u[dD][c-fC-F]{HEX}{{2}}")
"""Escapes of the high and the low half of a surrogate pair."""
HUGE = re.compile(r"[.eE](?:(?<=[eE])\+?[0-9]{3}|(?<=[0-9]{200}.))")
"""Matches within every number that overflows a float (and in some other texts)."""
NOTHING = "\ufffd"
"""Replaces half a surrogate pair, which UTF-8 cannot encode."""


def unicode(text: str) -> str:
    """The text with pairs of surrogates joined, and U+FFFD for lone ones."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def dumped(value: Any) -> str:
    """A value as JSON. Raises ValueError for numbers that are not finite."""
    return unicode(_ENCODE(value))


def loaded(text: str) -> Any:
    """The value of a JSON text. Raises ValueError for invalid JSON and for numbers that are not finite."""
    value = json.loads(text, parse_constant=_refused)
    if HUGE.search(text):
        _ENCODE(value)  # refuses infinity, and is many times faster than a check of each number
    return value


def in_string(text: str) -> bool:
    """True if the text is a JSON value that breaks off inside a string."""
    if text.lstrip(SPACE)[:1] not in ('"', "{", "["):
        return False
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.msg.startswith("Unterminated string")
    except RecursionError:
        return False
    return False


def strict(text: str) -> str:
    """An object or a list as strict JSON, completed if it breaks off; other text as a JSON value, or else a string."""
    if text.lstrip(SPACE)[:1] not in CLOSING:
        return _word(text)
    writer = StrictJSON()
    return "".join(map(writer.feed, text)) + writer.finish()


class StrictJSON:
    """Rewrites an object or a list as strict JSON, one character at a time; valid JSON is not changed.

    Words that are not JSON, and numbers that are not finite, become strings. Invalid escapes, and control characters in
    strings, are escaped; half a surrogate pair becomes U+FFFD. Missing commas and colons are inserted, superfluous ones
    are dropped; a key without a value gets null, and a closing bracket is replaced by the one that matches.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._after = "comma"
        """The thing before the next item: a `bracket`, a `comma`, a `key`, a `colon`, or the end of a `value`."""
        self._held = ""
        """A comma and white space, held back until an item follows."""
        self._word = self._escape = ""
        self._quoted = self._is_key = False

    def feed(self, character: str) -> str:
        """The text that the next character adds; after the end of the value, only white space is added."""
        if self._ended:
            return character if character in SPACE else ""
        if self._quoted:
            return self._in_string(character)
        if character not in SPACE and character not in '{}[]",:':
            begin = "" if self._word else self._item()
            self._word += character
            return begin
        return self._word_ended() + self._mark(character)

    def finish(self) -> str:
        """The text that completes a value that breaks off."""
        rest = ""
        if self._quoted:
            rest, self._escape = _broken(self._escape) + '"', ""
            self._string_ended()
        rest += self._word_ended()
        while self._open:
            rest += self._mark(CLOSING[self._open[-1]])
        return rest

    def unfinished(self) -> str:
        """The word that is held back, for a text that is not to be completed."""
        return self._word

    @property
    def _ended(self) -> bool:
        return not self._open and self._after == "value"

    def _mark(self, character: str) -> str:
        if character in SPACE:
            self._held += character if self._held else ""
            return "" if self._held else character
        if character == '"':
            begin = self._item()
            self._quoted = True
            return begin + character
        if character in CLOSING:
            begin = self._item()
            begin += '"": ' if self._is_key else ""
            self._open.append(character)
            self._after = "bracket"
            return begin + character
        if character == ":":
            colon = self._after == "key"
            self._after = "colon" if colon else self._after
            return ":" if colon else ""
        missing = {"key": ": null", "colon": "null"}.get(self._after, "")
        if character == ",":
            if missing or self._after == "value":
                self._after, self._held = "comma", ","
            return missing
        space, self._held, self._after = self._held.removeprefix(","), "", "value"
        return missing + space + CLOSING[self._open.pop()] if self._open else ""

    def _item(self) -> str:
        """The text to add before an item; sets `_is_key` to whether the item is a key."""
        begin, self._held = {"value": ", ", "key": ": "}.get(self._after, self._held), ""
        self._is_key = self._open[-1:] == ["{"] and self._after not in ("key", "colon")
        return begin

    def _word_ended(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        self._string_ended()
        return dumped(word) if self._is_key else _word(word)

    def _string_ended(self) -> None:
        self._quoted, self._after = False, "key" if self._is_key else "value"

    def _in_string(self, character: str) -> str:
        if self._escape or character == "\\":
            return self._escaped(character)
        if character == '"':
            self._string_ended()
            return character
        return json.dumps(character)[1:-1] if character < " " else unicode(character)

    def _escaped(self, character: str) -> str:
        """The text that a character of an escape adds: the escape, once it is complete."""
        before, text = self._escape, self._escape + character
        self._escape = ""
        if ESCAPE.fullmatch(text):
            return text
        if LOW.fullmatch(text):
            return NOTHING
        if BEGUN.fullmatch(text):
            self._escape = text
            return ""
        if HIGH.match(before):
            return NOTHING + "".join(map(self._in_string, before[6:] + character))
        return _broken(before) + self._in_string(character)


def _broken(escape: str) -> str:
    """The JSON text of an escape that is invalid or breaks off."""
    half = HIGH.match(escape)
    return NOTHING if half else escape.replace("\\", "\\\\")


def _word(text: str) -> str:
    """A value without brackets: unchanged if it is JSON, else as a string."""
    try:
        loaded(text)
    except (ValueError, RecursionError):
        return dumped(text)
    return text if not text.lstrip(SPACE).startswith('"') else dumped(json.loads(text))


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
