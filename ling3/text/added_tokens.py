"""The special and added tokens of a checkpoint's tokenizer settings.

`tokenizer_config.json` names special tokens (`eos_token` and others of that ending, `extra_special_tokens` as a map)
and lists more of them (`additional_special_tokens`, `extra_special_tokens` as a list); its `added_tokens_decoder` has
the id and the flags of each added token. If that field is missing, older files are read: `special_tokens_map.json`,
whose fields replace those of `tokenizer_config.json`, and `added_tokens.json`, the ids of added tokens. transformers 5
reads the same (tests/parity/test_tokenizers.py), but does not refuse a token whose id differs from the given one.
"""

import json
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from ling3.runtime.quoting import shown
from ling3.text.tokenizer_file import LONGEST_STRING, TokenizerError, read_object

SETTINGS, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FILES = (SETTINGS, NAMES, ADDED)

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
LISTS = ("extra_special_tokens", "additional_special_tokens")
FLAGS = ("lstrip", "normalized", "rstrip", "single_word", "special")

Names = dict[str, str]
"""The texts of special tokens by name, such as `eos_token`."""


def settings_of(directory: pathlib.Path) -> dict[str, Any]:
    """The fields of `tokenizer_config.json`, replaced by those of `special_tokens_map.json` if that is read."""
    settings = read_object(directory / SETTINGS)
    if "added_tokens_decoder" in settings:
        return settings
    older = read_object(directory / NAMES)
    if isinstance(listed := next((settings[name] for name in LISTS if name in settings), None), list):
        more = older.get("extra_special_tokens")
        older = {name: value for name, value in older.items() if name not in LISTS}
        older["extra_special_tokens"] = [*listed, *(more if isinstance(more, list) else [])]
    return settings | older


def add(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], directory: pathlib.Path, rows: int) -> Names:
    """Adds the tokens of a checkpoint's settings to `backend`, and returns the named special tokens.

    A token without an id gets the next one, or is not added if the model's embedding has no row for it (it has `rows`).
    Raises TokenizerError for a malformed token, an id that differs from the given one, and an `eos_token` without id.
    """
    path = directory / SETTINGS
    names = {name: _token(value, f"{path}: {name}") for name, value in _named(settings).items()}
    more = [_token(value, f"{path}: a special token") for value in _listed(settings)]
    # A token that was special stays special, as the library would still hide it.
    before = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    special = before | {token.content for token in names.values()}
    if "added_tokens_decoder" in settings:
        given = by_id(settings["added_tokens_decoder"], path)
    else:
        listed = {token.content for token in (*names.values(), *more)}
        given = _older(directory / ADDED, listed) | backend.get_added_tokens_decoder()
    for token in given.values():
        token.special = token.special or token.content in special
    backend.add_tokens([token for _, token in sorted(given.items())])
    for place, token in given.items():
        if (found := backend.token_to_id(token.content)) != place:
            raise TokenizerError(
                f"{directory}: {SETTINGS} or {ADDED} gives {shown(token.content)} the id {place}, and after the tokens "
                f"of the vocabulary it is {found}; fetch the files again, of one revision"
            )
    if "eos_token" in names and backend.token_to_id(names["eos_token"].content) is None:
        end = shown(names["eos_token"].content)
        raise TokenizerError(f"{path}: eos_token is {end}, which is no token of the vocabulary")
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    for token in (*names.values(), *more):
        if token.content not in known and (backend.token_to_id(token.content) is not None or _next(backend) < rows):
            token.special = True
            backend.add_tokens([token])
            known.add(token.content)
    return {name: token.content for name, token in names.items()}


def without_token(backend: tokenizers.Tokenizer, token: str, rows: int) -> tokenizers.Tokenizer:
    """`backend` without an added token for which the model's embedding, with `rows` rows, has none."""
    place = backend.token_to_id(token)
    if place is None or place < rows:
        return backend
    file = json.loads(backend.to_str())
    file["added_tokens"] = [each for each in file["added_tokens"] if each["id"] != place]
    return tokenizers.Tokenizer.from_str(json.dumps(file))


def _named(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens with a name: the usual ones first, then those of this model."""
    usual = {name: settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None}
    own = {
        name: value
        for name, value in settings.items()
        if name not in SPECIAL_TOKENS and name.endswith("_token") and isinstance(value, str)
    }
    for field in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(value := settings.get(field), dict):
            own |= value
    return {**usual, **own}


def _listed(settings: Mapping[str, Any]) -> list[Any]:
    """The special tokens without a name."""
    value = next((settings[name] for name in LISTS if settings.get(name)), [])
    return value if isinstance(value, list) else []


def by_id(decoder: Any, path: object) -> dict[int, AddedToken]:
    """The tokens of an `added_tokens_decoder`; errors name the file `path`."""
    if not isinstance(decoder, dict) or not all(key.isascii() and key.isdecimal() for key in decoder):
        raise TokenizerError(f"{path}: added_tokens_decoder is {shown(decoder)}, where tokens by id were expected")
    return {int(key): _token(value, f"{path}: added_tokens_decoder, {key}") for key, value in decoder.items()}


def _older(path: pathlib.Path, special: Collection[str]) -> dict[int, AddedToken]:
    """The tokens of `added_tokens.json`, which maps contents to ids; `special` ones are not normalized."""
    tokens: dict[int, AddedToken] = {}
    for content, place in read_object(path).items():
        if type(place) is not int or place < 0 or place in tokens:
            raise TokenizerError(
                f"{path}: {shown(content)} is {shown(place)}, where an id was expected that no other has"
            )
        flags = {"special": content in special, "normalized": content not in special}
        tokens[place] = _token({"content": content, **flags}, str(path))
    return tokens


def _token(value: Any, where: str) -> AddedToken:
    """An added token of a file: a string, which is special, or an object of its content and flags."""
    content = value.get("content") if isinstance(value, dict) else value
    flags = {name: value[name] for name in FLAGS if name in value} if isinstance(value, dict) else {"special": True}
    if not isinstance(content, str) or not content or len(content) > LONGEST_STRING:
        raise TokenizerError(f"{where} is {shown(value)}, where a string or {{'content': …}} was expected")
    if any(type(flag) is not bool for flag in flags.values()):
        raise TokenizerError(f"{where}: {', '.join(FLAGS)} are true or false, found {shown(value)}")
    return AddedToken(content, **flags)


def _next(backend: tokenizers.Tokenizer) -> int:
    """The id that the next added token will get."""
    added = backend.get_added_tokens_decoder()
    return max(backend.get_vocab_size(with_added_tokens=False), 1 + max(added, default=-1))
