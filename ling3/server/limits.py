"""Limits of what a request may hold, so that no body takes the server's time or memory from the others.

They are checked in a few passes of C code over the bytes, before anything is parsed: the time of parsing, validation
and of what follows grows with the counts that are bounded here.
"""

import itertools

from ling3.server.errors import ApiError

MOST_BYTES = 2**24
"""The largest body."""
LONGEST_STRING = 2**22
"""Bytes of a string of the body: about a million tokens."""
MOST_STRINGS = 2**17
"""Strings of a body, the names of fields among them."""
MOST_VALUES = 2**20
"""Values of a body: token ids, for the most part."""
MOST_LISTS = 2**15
"""Lists and objects of a body."""
DEEPEST = 64
"""Levels of a body's JSON."""
LARGE, MOST_LARGE = 2**20, 2**26
"""Bytes above which a body is large, and bytes that all requests together may have beyond that."""

LEVELS = bytes.maketrans(b"[{]}", b"++--")


def check(content: bytes) -> None:
    """ApiError 400 if the JSON has too many strings, values, lists or levels, or too long a string; in linear time."""
    unescaped = content.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') > 2 * MOST_STRINGS:
        raise ApiError(400, f"the body's JSON has more than {MOST_STRINGS} strings")
    pieces = unescaped.split(b'"')  # of which every other one is a string
    if max(map(len, pieces[1::2]), default=0) > LONGEST_STRING:
        raise ApiError(400, f"the body has a string of more than {LONGEST_STRING} bytes")
    outside = b"".join(pieces[::2])
    lists = outside.count(b"[") + outside.count(b"{")
    if lists > MOST_LISTS:
        raise ApiError(400, f"the body's JSON has more than {MOST_LISTS} lists and objects")
    if outside.count(b",") + lists > MOST_VALUES:
        raise ApiError(400, f"the body's JSON has more than {MOST_VALUES} values")
    other = bytes(set(range(256)) - set(b"[{]}"))
    brackets = outside.translate(LEVELS, other)[: 2 * MOST_LISTS]  # more than that are an error
    if max(itertools.accumulate(1 if each == ord("+") else -1 for each in brackets), default=0) > DEEPEST:
        raise ApiError(400, f"the body's JSON has more than {DEEPEST} levels")
