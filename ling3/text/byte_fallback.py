"""Byte tokens: SentencePiece's fallback for text that its vocabulary has no piece for, and the bytes of any token.

Such a vocabulary has a token for each byte, `<0xE1>`, and its decoder joins a run of them to UTF-8. The tokenizers
library replaces all bytes of a run by U+FFFD if one of them is invalid. Here a character is complete as soon as its
bytes are there, and only an invalid byte becomes U+FFFD, as in SentencePiece: so further text never changes earlier
text, and a text that is cut inside a character loses only that character.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers

from ling3.text.byte_alphabet import BYTES


class ByteFallback:
    """The 256 byte tokens of a vocabulary; empty if its decoder has no step for them.

    `bytes` maps each token to its byte; `invalid` has the three byte tokens that make up U+FFFD.
    """

    def __init__(self, backend: tokenizers.Tokenizer):
        kinds = {step["type"] for step in decoder_steps(backend)}
        found = {byte: backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        tokens = {byte: token for byte, token in found.items() if token is not None}
        complete = "ByteFallback" in kinds and len(tokens) == 256
        self.bytes = {token: byte for byte, token in tokens.items()} if complete else {}
        self.invalid = [tokens[byte] for byte in "\N{REPLACEMENT CHARACTER}".encode()] if complete else []

    def valid(self, ids: Iterable[int]) -> list[int]:
        """`ids` with each invalid byte token replaced by the three of U+FFFD."""
        run = ByteRun(self)
        groups = [*(group for token in ids for group in run.feed(token)), *run.flush()]
        return [token for group in groups for token in group]


class ByteRun:
    """Groups the tokens of a text, as they come, so that each group decodes to complete characters.

    A group is one token that is no byte, the bytes of one character, or `ByteFallback.invalid` for an invalid byte.
    `pending` has the byte tokens of an incomplete character.
    """

    def __init__(self, fallback: ByteFallback):
        self._fallback = fallback
        self.pending: list[int] = []

    def feed(self, token: int) -> Iterator[list[int]]:
        """Yields the groups that the next token completes."""
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
        """Ends the run, and yields `invalid` for each byte of an incomplete character."""
        count, self.pending = len(self.pending), []
        for _ in range(count):
            yield self._fallback.invalid


def decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder."""
    return [] if backend.decoder is None else _steps(json.loads(backend.decoder.__getstate__()))


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for each in decoder.get("decoders", ()) for inner in _steps(each)] or [decoder]


def _complete(held: bytes) -> bool | None:
    """True if the bytes are a complete character, False if they are the beginning of one, None if they are invalid."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(held) != ""
    except UnicodeDecodeError:
        return None


BYTE = re.compile(r"<0x([0-9A-F]{2})>")
BLANK = "▁"


class TokenBytes:
    """The bytes of each token of a vocabulary, as its decoder has them; of an added token, its text in UTF-8."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend, self._added = backend, backend.get_added_tokens_decoder()
        steps = decoder_steps(backend)
        kinds = {step["type"] for step in steps}
        self._table = BYTES if "ByteLevel" in kinds else None
        self._fallback = "ByteFallback" in kinds
        self._blank = "Metaspace" in kinds or any(step.get("pattern") == {"String": BLANK} for step in steps)

    def __getitem__(self, token: int) -> bytes:
        """The bytes of a token; empty for an id without a token."""
        if token in self._added:
            return self._added[token].content.encode()
        text = self._backend.id_to_token(token) or ""
        if self._table is not None:
            return b"".join(self._table.get(character) or character.encode() for character in text)
        if self._fallback and (byte := BYTE.fullmatch(text)):
            return bytes.fromhex(byte[1])
        return (text.replace(BLANK, " ") if self._blank else text).encode()
