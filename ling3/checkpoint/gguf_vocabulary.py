"""Writes the tokenizer in a GGUF file's metadata as the files that `ling3.load_tokenizer` reads.

Two kinds of vocabulary are known, by `tokenizer.ggml.model`: `gpt2`, byte-level BPE, and `llama`, SentencePiece's BPE
with a token for each byte. Tokens of the type *unused* only fill up the embedding, so they are left out: their ids stay
free, and no text gives them.
"""

import json
import math
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ling3.checkpoint.gguf_splitting import SPLITTINGS, Splitting
from ling3.checkpoint.safetensors_file import CheckpointError
from ling3.runtime.quoting import shown

PREFIX = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
MODELS = (BYTE_LEVEL, SENTENCEPIECE)
NO_VOCABULARY = ("none", "no_vocab")
BLANK = "▁"
"""The character that SentencePiece writes for a space."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""The types of tokens."""
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)
"""The types of tokens that are found in a text before it is split."""

NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""The keys of named tokens' ids, without `_token_id`, by the field of `tokenizer_config.json`."""
ENDS = ("eos", "eot", "eom")
"""The keys of the ids that end a generation, without `_token_id`."""
CONVERT = "convert the model again with a current llama.cpp"


class Metadata:
    """The tokenizer's values in a GGUF file's metadata, by their names without `tokenizer.ggml.`; checks their types.

    The methods raise CheckpointError for a value of another type, and return None for one that is missing.
    """

    def __init__(self, values: Mapping[str, Any], source: str):
        self.values, self.source = values, source

    def error(self, name: str, found: str, expected: str, advice: str = CONVERT) -> CheckpointError:
        """The error for a value that does not fit."""
        key = name if name.startswith("tokenizer.") else f"{PREFIX}{name}"
        return CheckpointError(f"{self.source}: {key}: found {found}; expected {expected}; {advice}")

    def text(self, name: str) -> str | None:
        """The string of that name, such as `model`."""
        return self._typed(name, (str,), "a string")

    def flag(self, name: str, missing: bool) -> bool:
        """True or false; `missing` if the file does not say."""
        value = self._typed(name, (bool,), "true or false")
        return missing if value is None else value

    def strings(self, name: str) -> list[str] | None:
        """A list of strings that have a UTF-8 form."""
        values = self._list(name, (str,), "strings")
        if not encodable("".join(values or ())):  # all at once: vocabularies have hundreds of thousands
            i, value = next((i, value) for i, value in enumerate(values or ()) if not encodable(value))
            raise self.error(name, f"{shown(value)} at {i}", "text that has a UTF-8 form")
        return values

    def numbers(self, name: str, types: tuple[type, ...], count: int) -> list[Any]:
        """A list of finite numbers of the `types`, one for each of `count` tokens, which must not be missing."""
        values = self._list(name, types, "numbers")
        expected = f"{count:,} numbers, one for each token"
        if values is None:
            raise self.error(name, "none", expected)
        if len(values) != count:
            raise self.error(name, f"{len(values):,} numbers", expected)
        if bad := [value for value in values if not math.isfinite(value)]:
            raise self.error(name, shown(bad[0]), "finite numbers")
        return values

    def token_id(self, kind: str, count: int) -> int | None:
        """The id in `<kind>_token_id`, which is below `count`."""
        name = f"{kind}_token_id"
        value = self._typed(name, (int,), f"an id below {count:,}")
        if value is not None and not 0 <= value < count:
            raise self.error(name, shown(value), f"an id below {count:,}, the number of tokens", _repair(name))
        return value

    def _typed(self, name: str, types: tuple[type, ...], expected: str) -> Any:
        value = self.values.get(name if name.startswith("tokenizer.") else f"{PREFIX}{name}")
        if value is not None and type(value) not in types:
            raise self.error(name, shown(value), expected)
        return value

    def _list(self, name: str, types: tuple[type, ...], expected: str) -> list[Any] | None:
        values = self._typed(name, (list,), f"a list of {expected}")
        for i, value in enumerate(values or ()):
            if type(value) not in types:
                raise self.error(name, f"{shown(value)} at {i}", f"a list of {expected}")
        return values


class Vocabulary(NamedTuple):
    """The texts of all tokens and their types, by id."""

    tokens: list[str]
    types: list[int]

    def ids(self) -> dict[str, int]:
        """The ids of the tokens that are not unused, by text."""
        return {token: i for i, token in enumerate(self.tokens) if self.types[i] != UNUSED}

    def added(self) -> list[dict[str, Any]]:
        """The tokens that are found in a text before it is split, as `tokenizer.json` has them."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": self.tokens[i], **flags, "special": kind != USER_DEFINED}
            for i, kind in enumerate(self.types)
            if kind in ADDED
        ]


def tokenizer_files(metadata: Mapping[str, Any], source: str) -> dict[str, bytes]:
    """The files of the tokenizer in a GGUF file's metadata, by name; empty if the file has no tokenizer.

    `source` is the file's name for errors. Raises CheckpointError for a tokenizer that ling3 does not know, and for
    values that contradict each other.
    """
    values = Metadata(metadata, source)
    model = values.text("model")
    if model is None or model in NO_VOCABULARY:
        return {}
    if model not in MODELS:
        raise values.error("model", shown(model), " or ".join(MODELS), "use the original checkpoint's tokenizer")
    tokens = values.strings("tokens")
    if not tokens:
        raise values.error("tokens", "no tokens", "a list of strings")
    found = {name: values.token_id(name, len(tokens)) for name in (*NAMES.values(), *ENDS)}
    ids = {name: token for name, token in found.items() if token is not None}
    vocabulary = _vocabulary(values, tokens, set(ids.values()))
    make = _byte_level if model == BYTE_LEVEL else _sentencepiece
    files = {"tokenizer.json": make(values, vocabulary, ids), "tokenizer_config.json": _settings(vocabulary, ids)}
    if generation := _generation(ids):
        files["generation_config.json"] = generation
    written = {name: json.dumps(content, ensure_ascii=False).encode() for name, content in files.items()}
    return written | _templates(values)


def encodable(text: str) -> bool:
    """True if `text` has a UTF-8 form, which text with lone surrogates does not have."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _repair(name: str) -> str:
    return f"write the right {PREFIX}{name} into the file with llama.cpp's gguf_new_metadata.py"


def _vocabulary(values: Metadata, tokens: list[str], named: Collection[int]) -> Vocabulary:
    """The tokens with their types; an unused one among the `named` ids counts as a control token."""
    types = values.numbers("token_type", (int,), len(tokens))
    for i, kind in enumerate(types):
        if not NORMAL <= kind <= BYTE:
            raise values.error("token_type", f"{shown(kind)} at {i}", f"types from {NORMAL} to {BYTE}")
    types = [CONTROL if kind == UNUSED and i in named else kind for i, kind in enumerate(types)]
    first: dict[str, int] = {}
    for i, token in enumerate(tokens):
        if types[i] == UNUSED:
            continue
        if not token:
            raise values.error("tokens", f"an empty token at {i}", f"texts, or the type {UNUSED} (unused) for it")
        if first.setdefault(token, i) != i:
            raise values.error("tokens", f"{shown(token)} at {first[token]} and at {i}", "tokens that differ")
    return Vocabulary(tokens, types)


def _byte_level(values: Metadata, vocabulary: Vocabulary, ids: Mapping[str, int]) -> dict[str, Any]:
    """The `tokenizer.json` of byte-level BPE."""
    splitting, merges = _splitting(values), _merges(values, vocabulary)
    if merges is None:
        raise values.error("merges", "none", "the merges of a byte-level vocabulary")
    model = _bpe(vocabulary, merges, ignore_merges=splitting.ignore_merges)
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    parts = {
        "normalizer": splitting.normalizer(),
        "pre_tokenizer": splitting.pre_tokenizer(),
        "post_processor": _around(values, vocabulary, ids, splitting.adds_bos),
        "decoder": decoder,
    }
    return _file(vocabulary, parts, model)


def _sentencepiece(values: Metadata, vocabulary: Vocabulary, ids: Mapping[str, int]) -> dict[str, Any]:
    """The `tokenizer.json` of SentencePiece's BPE, as Llama 2's."""
    merges = _merges(values, vocabulary)
    if merges is None:
        merges = _scored_merges(vocabulary, values.numbers("scores", (float, int), len(vocabulary.tokens)))
    unknown = ids.get("unknown", next((i for i, kind in enumerate(vocabulary.types) if kind == UNKNOWN), None))
    model = _bpe(
        vocabulary,
        merges,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    prefixed = values.flag("add_space_prefix", missing=True)
    prepend = [{"type": "Prepend", "prepend": BLANK}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    steps = [_replace(BLANK, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    parts = {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, _replace(" ", BLANK)]},
        "pre_tokenizer": None,
        "post_processor": _around(values, vocabulary, ids, adds_bos=True),
        "decoder": {"type": "Sequence", "decoders": steps},
    }
    return _file(vocabulary, parts, model)


def _file(vocabulary: Vocabulary, parts: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    head = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": vocabulary.added()}
    return {**head, **parts, "model": model}


def _bpe(vocabulary: Vocabulary, merges: Sequence[tuple[str, str]], **settings: Any) -> dict[str, Any]:
    """The model of `tokenizer.json`; `settings` replace the usual ones."""
    usual = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    return {**usual, **settings, "vocab": vocabulary.ids(), "merges": merges}


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def _splitting(values: Metadata) -> Splitting:
    name = values.text("pre")
    if name is None or name not in SPLITTINGS:
        found = "none" if name is None else shown(name)
        raise CheckpointError(
            f"{values.source}: {PREFIX}pre: found {found}; expected the name of a known way to split texts, as another "
            f"way gives other ids; use the original checkpoint's tokenizer, or {_repair('pre')}\n"
            + textwrap.fill(f"the known names: {', '.join(sorted(SPLITTINGS))}", 120)
        )
    return SPLITTINGS[name]


def _merges(values: Metadata, vocabulary: Vocabulary) -> list[tuple[str, str]] | None:
    """The merges in the file, checked; None if it has none."""
    texts, known = values.strings("merges"), vocabulary.ids()
    if texts is None:
        return None
    merges: list[tuple[str, str]] = []
    for i, text in enumerate(texts):
        left, _, right = text.partition(" ")
        if not left or not right or " " in right:
            raise values.error("merges", f"{shown(text)} at {i}", "two tokens with a space between them")
        if left not in known or right not in known or left + right not in known:
            absent = next(token for token in (left, right, left + right) if token not in known)
            raise values.error("merges", f"{shown(text)} at {i}, but no token {shown(absent)}", "merges of tokens")
        merges.append((left, right))
    return merges


def _scored_merges(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that SentencePiece's scores imply: every pair of pieces that is a piece, the best score first.

    Pairs of equal score are in the order of transformers' converter, with which the published files were made.
    """
    pieces = {token: i for token, i in vocabulary.ids().items() if vocabulary.types[i] == NORMAL}
    ranked: list[tuple[tuple[float, int, int], tuple[str, str]]] = []
    for piece, i in pieces.items():
        pairs = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        found = [pair for pair in pairs if pair[0] in pieces and pair[1] in pieces]
        found.sort(key=lambda pair: (pieces[pair[0]], pieces[pair[1]]))
        ranked += [((scores[i], len(left), len(right)), (left, right)) for left, right in found]
    ranked.sort(key=lambda entry: entry[0], reverse=True)
    return [pair for _, pair in ranked]


def _around(values: Metadata, vocabulary: Vocabulary, ids: Mapping[str, int], adds_bos: bool) -> dict[str, Any] | None:
    """The post-processor that puts tokens around a text; None if it puts none."""
    first = _edge(values, ids, "bos", adds_bos)
    last = _edge(values, ids, "eos", False)
    if not first and not last:
        return None

    def tokens(places: Iterable[int], sequence: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": vocabulary.tokens[i], "type_id": sequence}} for i in places]

    def text(name: str, sequence: int) -> list[dict[str, Any]]:
        return [*tokens(first, sequence), {"Sequence": {"id": name, "type_id": sequence}}, *tokens(last, sequence)]

    special = {
        vocabulary.tokens[i]: {"id": vocabulary.tokens[i], "ids": [i], "tokens": [vocabulary.tokens[i]]}
        for i in (*first, *last)
    }
    single = text("A", 0)
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *text("B", 1)], "special_tokens": special}


def _edge(values: Metadata, ids: Mapping[str, int], kind: str, missing: bool) -> list[int]:
    """The id of the token that is put at one edge of every text; empty if there is none."""
    if not values.flag(f"add_{kind}_token", missing):
        return []
    if kind not in ids:
        name = f"{kind}_token_id"
        advice = f"{_repair(name)}, or set {PREFIX}add_{kind}_token to false"
        raise values.error(name, "none", f"an id, as the token is put at every text's edge (add_{kind}_token)", advice)
    return [ids[kind]]


def _settings(vocabulary: Vocabulary, ids: Mapping[str, int]) -> dict[str, Any]:
    """The `tokenizer_config.json`.

    It names no ordinary piece as `unk_token` or `pad_token`: files have the id 0 there for want of a better one, and a
    named token is special, so that texts with that piece would get other ids.
    """
    names = {
        field: vocabulary.tokens[ids[kind]]
        for field, kind in NAMES.items()
        if kind in ids and (kind in ("bos", "eos") or vocabulary.types[ids[kind]] in ADDED)
    }
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}


def _generation(ids: Mapping[str, int]) -> dict[str, Any]:
    """The `generation_config.json`; empty if the file names no tokens."""
    ends = sorted({ids[kind] for kind in ENDS if kind in ids})
    fields = {"bos_token_id": ids.get("bos"), "eos_token_id": ends or None, "pad_token_id": ids.get("padding")}
    return {name: value for name, value in fields.items() if value is not None}


def _templates(values: Metadata) -> dict[str, bytes]:
    """The files of the chat templates: the default one, and those with a name."""
    files: dict[str, str] = {}
    if (default := values.text(TEMPLATE)) is not None:
        files["chat_template.jinja"] = default
    for key in values.values:
        if key.startswith(f"{TEMPLATE}.") and (template := values.text(key)) is not None:
            name = key.removeprefix(f"{TEMPLATE}.")
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", name) or (name == "default" and default is not None):
                expected = "other names, of up to 64 letters, digits, _ and -"
                raise values.error(TEMPLATE, f"a template named {shown(name)}", expected)
            files[f"additional_chat_templates/{name}.jinja"] = template
    for name, template in files.items():
        if not encodable(template):
            raise values.error(TEMPLATE, f"the template of {name} with a lone surrogate", "text that has a UTF-8 form")
    return {name: template.encode() for name, template in files.items()}
