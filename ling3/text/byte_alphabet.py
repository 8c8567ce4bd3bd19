"""GPT-2's alphabet: a printable character for each byte, in which byte-level vocabularies write their tokens."""

from tokenizers import pre_tokenizers


def _characters() -> list[str]:
    """Printable characters are themselves, the others come in order from U+0100."""
    printable = {ord(character) for character in pre_tokenizers.ByteLevel.alphabet() if ord(character) < 256}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]


CHARACTERS = _characters()
"""The character of each byte."""
BYTES = {character: bytes([byte]) for byte, character in enumerate(CHARACTERS)}
"""The byte of each character."""
