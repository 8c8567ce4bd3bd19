"""Characters out of byte tokens: SentencePiece's fallback for text that its vocabulary has no piece for.

Such a vocabulary has a token for each byte, `<0xE1>`, and its decoder joins a run of them to UTF-8. The tokenizers
library shows nothing but U+FFFD for a run that has any invalid byte, up to the last one. Here every character of a run
is complete as soon as its own bytes are there, and each invalid byte is one U+FFFD, as SentencePiece decodes it: so a
text that goes on never changes what came before, and one that is cut inside a character loses only that.
"""

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers


class ByteFallback:
    """The 256 byte tokens of a vocabulary; there are none where the decoder has no such step.

    `bytes` has the byte of each, `invalid` the three byte tokens that make up U+FFFD.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        kinds = {step["type"] for step in decoder_steps(backend)}
        found = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        tokens = {byte: token for byte, token in found.items() if token is not None}
        complete = "ByteFallback" in kinds and len(tokens) == 256
        self.bytes = {token: byte for byte, token in tokens.items()} if complete else {}
        self.invalid = [tokens[byte] for byte in "\N{REPLACEMENT CHARACTER}".encode()] if complete else []

    def valid(self, ids: Iterable[int]) -> list[int]:
        """`ids` with the byte tokens of U+FFFD in place of each invalid one."""
        run = ByteRun(self)
        groups = [*(group for token in ids for group in run.feed(token)), *run.flush()]
        return [token for group in groups for token in group]


class ByteRun:
    """Groups the tokens of a text, as they come, so that each group is decoded to whole characters.

    A group is one token that is no byte, the bytes of one character, or `ByteFallback.invalid` for an invalid byte.
    `pending` are the byte tokens of a character that is not complete.
    """

    def __init__(self, fallback: ByteFallback):
        self._fallback = fallback
        self.pending: list[int] = []

    def feed(self, token: int) -> Iterator[list[int]]:
        """The groups that a further token completes."""
        if token not in self._fallback.bytes:
            yield from self.flush()
            yield [token]
            return
        self.pending.append(token)
        while self.pending:
            complete = _complete(bytes(self._fallback.bytes[each] for each in self.pending))
            if complete is False:
                return
            size = len(self.pending) if complete else 1
            group, self.pending = self.pending[:size], self.pending[size:]
            yield group if complete else self._fallback.invalid

    def flush(self) -> Iterator[list[int]]:
        """The groups of an incomplete character's bytes, where the run ends."""
        count, self.pending = len(self.pending), []
        for _ in range(count):
            yield self._fallback.invalid


def decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder."""
    return [] if backend.decoder is None else _steps(json.loads(backend.decoder.__getstate__()))


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for each in decoder.get("decoders", ()) for inner in _steps(each)] or [decoder]


def _complete(held: bytes) -> bool | None:
    """Whether bytes are a whole character or only the beginning of one; None if they are the beginning of none."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(held) != ""
    except UnicodeDecodeError:
        return None
