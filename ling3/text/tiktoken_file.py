"""Reads `tiktoken.model`, the vocabulary of the Kimi models, as a tokenizer of the tokenizers library.

Each line has a token, in Base64, and its rank, which is its id. How a text is split into pieces, and which ids the
special tokens have, is defined by `tokenization_kimi.py`, a program published beside it. That is never run; its rules
are repeated here, for Kimi only. Within a piece, tiktoken merges the two neighbours that make up the token of the
lowest rank, the leftmost of several. The library does the same if it is given a merge for every two tokens that make up
a third, in the order of the thirds (tests/parity/test_tiktoken.py).
"""

import base64
import pathlib
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from ling3.checkpoint.gguf_splitting import KIMI
from ling3.runtime import regular_file
from ling3.runtime.quoting import shown
from ling3.text.added_tokens import SETTINGS, by_id
from ling3.text.byte_alphabet import CHARACTERS
from ling3.text.tokenizer_file import Reported, TokenizerError

VOCABULARY = "tiktoken.model"
CODE = "tokenization_kimi."
RESERVED = 256 + 2
"""The number of ids after the vocabulary's, which are those of special tokens."""
LONGEST_TOKEN = 512
MOST_MERGES = 2**22
"""The most merges that are made; a published vocabulary of 160,000 tokens has some 300,000."""


def read(path: pathlib.Path, settings: Mapping[str, Any], model_type: object, rows: int) -> tokenizers.Tokenizer:
    """The tokenizer of a Kimi model; `settings` are the fields of `tokenizer_config.json`.

    Reserved tokens beyond the `rows` of the model's embedding are left out. Raises TokenizerError for a damaged file,
    and for that of another model, whose rules are not known.
    """
    code = settings.get("auto_map")
    named = code.get("AutoTokenizer") if isinstance(code, Mapping) else code
    if not (CODE in str(named) or (named is None and str(model_type).startswith("kimi"))):
        raise TokenizerError(
            f"{path}: the pieces of this tokenizer are in code that ling3 does not run ({shown(named)}), and it knows "
            "only those of Kimi (tokenization_kimi); convert the file to a tokenizer.json"
        )
    ranks = _ranks(path)
    vocabulary = {_written(token): rank for token, rank in ranks.items()}
    with Reported(path, "not a tokenizer that the tokenizers library can read"):
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, _merges(ranks, path), ignore_merges=True))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(KIMI), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        special = _special(settings, len(ranks), rows)
        backend.add_tokens(special)
    for place, token in enumerate(special, len(ranks)):
        if backend.token_to_id(token.content) != place:
            raise TokenizerError(f"{path}: the special token {shown(token.content)}, id {place}, is another token too")
    return backend


def _ranks(path: pathlib.Path) -> dict[bytes, int]:
    """The rank of each token. Raises TokenizerError unless ranks are 0, 1, 2, … and every byte is a token."""
    try:
        lines = regular_file.read(path, regular_file.TOKENIZER_BYTES).splitlines()
    except ValueError as error:
        raise TokenizerError(str(error)) from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        try:
            word, rank = line.split()
            token = base64.b64decode(word, validate=True)
            ranks[token] = int(rank)
        except ValueError as error:
            expected = "a token in Base64 and its rank were expected"
            raise TokenizerError(f"{path}, line {number}: {shown(line)}, where {expected}") from error
        if not 1 <= len(token) <= LONGEST_TOKEN:
            raise TokenizerError(f"{path}, line {number}: {len(token)} bytes, where 1 to {LONGEST_TOKEN} were expected")
    if sorted(ranks.values()) != list(range(len(lines))):
        raise TokenizerError(f"{path}: the ranks of its {len(lines):,} lines are not 0 and up, one for each token")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise TokenizerError(f"{path}: no token is the byte {missing[0]}, and every byte must be one")
    return ranks


def _merges(ranks: Mapping[bytes, int], path: pathlib.Path) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in ranks and token[cut:] in ranks:
                merges.append((_written(token[:cut]), _written(token[cut:])))
        if len(merges) > MOST_MERGES:
            raise TokenizerError(f"{path}: more than {MOST_MERGES:,} pairs of tokens make up a third")
    return merges


def _special(settings: Mapping[str, Any], first: int, rows: int) -> list[AddedToken]:
    """The special tokens from the id `first` on: those of the settings, and reserved ones for the other ids."""
    decoder = settings.get("added_tokens_decoder")
    given = by_id(decoder, SETTINGS) if decoder is not None else {}
    places = range(first, min(first + RESERVED, max(rows, 1 + max(given, default=0))))
    reserved = {place: AddedToken(f"<|reserved_token_{place}|>", special=True, normalized=False) for place in places}
    return [given.get(place, token) for place, token in reserved.items()]


def _written(token: bytes) -> str:
    return "".join(map(CHARACTERS.__getitem__, token))
