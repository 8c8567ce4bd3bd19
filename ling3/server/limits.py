"""Limits on request bodies, so that none takes the server's time or memory from other requests.

They are checked in a few passes of C code over the bytes, before anything is parsed: the time for parsing, validation
and all later steps grows with the counts that are limited here.
"""

import itertools

from ling3.server.errors import ApiError

MOST_BYTES = 2**24
"""The most bytes of a body."""
LONGEST_STRING = 2**22
"""The most bytes of a string in a body: about a million tokens."""
MOST_STRINGS = 2**17
"""The most strings in a body, names of fields included."""
MOST_VALUES = 2**20
"""The most values in a body, which are mostly token ids."""
MOST_LISTS = 2**15
"""The most lists and objects in a body."""
DEEPEST = 64
"""The most levels of nesting in a body's JSON."""
LARGE, MOST_LARGE = 2**20, 2**26
"""Bytes above which a body is large, and the most bytes beyond these that all running requests may hold together."""

LEVELS = bytes.maketrans(b"[{]}", b"++--")


def check(content: bytes) -> None:
    """Raises ApiError 400 for too many strings, values, lists or levels, or too long a string; takes linear time."""
    unescaped = content.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') > 2 * MOST_STRINGS:
        raise ApiError(400, f"the body's JSON has more than {MOST_STRINGS} strings")
    pieces = unescaped.split(b'"')  # every other piece is a string
    if max(map(len, pieces[1::2]), default=0) > LONGEST_STRING:
        raise ApiError(400, f"the body has a string of more than {LONGEST_STRING} bytes")
    outside = b"".join(pieces[::2])
    lists = outside.count(b"[") + outside.count(b"{")
    if lists > MOST_LISTS:
        raise ApiError(400, f"the body's JSON has more than {MOST_LISTS} lists and objects")
    if outside.count(b",") + lists > MOST_VALUES:
        raise ApiError(400, f"the body's JSON has more than {MOST_VALUES} values")
    other = bytes(set(range(256)) - set(b"[{]}"))
    brackets = outside.translate(LEVELS, other)[: 2 * MOST_LISTS]  # valid JSON has no more
    if max(itertools.accumulate(1 if each == ord("+") else -1 for each in brackets), default=0) > DEEPEST:
        raise ApiError(400, f"the body's JSON has more than {DEEPEST} levels")
