"""The bytes of single tokens, which may be a part of a character."""

import re

import tokenizers

from ling3.text.byte_alphabet import BYTES
from ling3.text.byte_fallback import decoder_steps

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
