"""Tokenizers as transformers reads them: the same ids, added tokens and texts, whatever the settings' files say."""

import json
import random
import shutil

import pytest
from tokenizer_cases import FAST, directory, load, parts_of_characters
from transformers import AutoTokenizer

import ling3

TEXTS = (
    "the cat sat",
    " a  b\n\nc ",
    "你好 😀 é",
    "<s>the</s> cat",
    "a <x> b <y>  c<z>the",
    "<think>[PAD]<|role_end|>",
    "",
)
every = pytest.mark.parametrize("name", FAST)


def theirs(path):
    (path / "config.json").write_text('{"model_type": "llama"}')
    return AutoTokenizer.from_pretrained(str(path))


def changed(name, path, settings, files=None):
    """One of the tokenizers with other settings; None takes one away."""
    shutil.copytree(directory(name), path, dirs_exist_ok=True)
    (path / "config.json").unlink(missing_ok=True)
    place = path / "tokenizer_config.json"
    fields = json.loads(place.read_text()) | settings
    place.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))
    for file, content in (files or {}).items():
        (path / file).write_text(json.dumps(content))
    return path


def same(path):
    ours, other = ling3.load_tokenizer(path), theirs(path)
    same_texts(ours, other)
    flags = {place: repr(token) for place, token in ours.backend.get_added_tokens_decoder().items()}
    assert flags == {place: repr(token) for place, token in other.added_tokens_decoder.items()}
    assert ours.special_tokens == other.special_tokens_map
    return ours, other


def same_texts(ours, other):
    for text in TEXTS:
        for special in (True, False):
            assert ours.encode(text, special) == other.encode(text, add_special_tokens=special), text
        ids = ours.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == other.decode(ids, skip_special_tokens=skip), text


@every
def test_ids_and_texts(name, tmp_path):
    ours, other = same(changed(name, tmp_path, {}))
    draw = random.Random(0)
    for _ in range(200):
        text = "".join(chr(draw.choice((32, 97, 233, 0x4F60, 0x1F600, draw.randrange(1, 0x2FFF)))) for _ in range(20))
        ids = ours.encode(text)
        assert ids == other.encode(text) and ours.decode(ids) == other.decode(ids, skip_special_tokens=True)


@every
def test_a_run_of_invalid_bytes(name):
    """Where all bytes of a run are invalid; ling3 shows the valid ones of others (ling3/text/byte_fallback.py)."""
    ours = load(name)
    other = AutoTokenizer.from_pretrained(str(directory(name)))
    for token in parts_of_characters(name)[::20]:
        assert ours.decode([token]) == other.decode([token])
        assert ours.decode([token] * 3) == other.decode([token] * 3)


FLAGS = [
    {name: value} for name in ("add_bos_token", "add_eos_token") for value in (True, False)
] + [{"add_bos_token": True, "add_eos_token": True}]  # fmt: skip


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "Qwen2Tokenizer", "GPT2Tokenizer"])
@pytest.mark.parametrize("name", ["byte-level", "sentencepiece"])
def test_flags_that_do_not_count_beside_a_tokenizer_json(name, kind, tmp_path):
    """In any class of tokenizer; what a class makes of the rest of the file is its own affair."""
    named = {"bos_token": "<|endoftext|>"} if name == "byte-level" else {}
    for i, flags in enumerate(FLAGS):
        path = changed(name, tmp_path / str(i), {"tokenizer_class": kind, **named, **flags})
        added = [
            [token in ids for token in (0, 1, 2)]
            for ids in (ling3.load_tokenizer(path).encode("cat"), theirs(path).encode("cat"))
        ]
        assert added[0] == added[1], flags


def test_the_file_decides_about_blanks(tmp_path):
    """SentencePiece puts a blank before a text, whatever it begins with, and so does the file."""
    path = changed("sentencepiece", tmp_path, {"tokenizer_class": "LlamaTokenizer"})
    ours, other = ling3.load_tokenizer(path), theirs(path)
    assert ours.encode("the") == other.encode("the")
    assert ours.backend.encode(" the").tokens == ["<s>", "▁", "▁the"]
    assert other.convert_ids_to_tokens(other.encode(" the")) == ["<s>", "▁the"]


def settings(size):
    """Fields of tokenizer_config.json, and other files, for a vocabulary of `size`."""
    new = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    plain = {**new, "special": False, "normalized": True}
    return {
        "new tokens": ({"added_tokens_decoder": {str(size): {"content": "<x>", **new}}}, {}),
        "new tokens out of order": (
            {
                "added_tokens_decoder": {
                    str(size + 1): {"content": "<y>", **plain},
                    str(size): {"content": "<x>", **new, "lstrip": True},
                }
            },
            {},
        ),
        "extra tokens": ({"additional_special_tokens": ["<x>", "the"]}, {}),
        "extra tokens with flags": (
            {"additional_special_tokens": [{"__type": "AddedToken", "content": "<y>", **new, "rstrip": True}]}, {},
        ),
        "extra tokens, as version 5 names them": ({"extra_special_tokens": ["<x>", "the"]}, {}),
        "tokens with names": ({"extra_special_tokens": {"image_token": "<x>"}, "video_token": "<y>"}, {}),
        "a pad token outside the vocabulary": ({"pad_token": "[PAD]"}, {}),
        "a pad token with flags": ({"pad_token": {"__type": "AddedToken", "content": "[PAD]", **new}}, {}),
        "an older map": (
            {}, {"special_tokens_map.json": {"pad_token": "[PAD]", "unk_token": {"content": "<x>", **new}}},
        ),
        "an older map's list": ({}, {"special_tokens_map.json": {"additional_special_tokens": ["<x>", "<y>"]}}),
        "an older map that does not count": (
            {"added_tokens_decoder": {str(size): {"content": "<x>", **new}}},
            {"special_tokens_map.json": {"pad_token": "<y>"}, "added_tokens.json": {"<z>": size + 1}},
        ),
        "older added tokens": ({"pad_token": "<y>"}, {"added_tokens.json": {"<x>": size, "<y>": size + 1}}),
        "older added tokens that are listed": (
            {"additional_special_tokens": ["<x>"]}, {"added_tokens.json": {"<x>": size, "<z>": size + 1}},
        ),
    }  # fmt: skip


@every
@pytest.mark.parametrize("case", settings(0))
def test_tokens_that_the_settings_add(name, case, tmp_path):
    fields, files = settings(load(name).vocab_size)[case]
    same(changed(name, tmp_path, fields, files))


def test_other_flags_of_a_token(tmp_path):
    flags = {"lstrip": True, "normalized": False, "rstrip": False, "single_word": False, "special": False}
    fields = {"added_tokens_decoder": {"2": {"content": "<role>", **flags}, "4": {"content": "<think>", **flags}}}
    path = changed("byte-level", tmp_path, fields)
    ours = ling3.load_tokenizer(path)
    same_texts(ours, theirs(path))
    # The tokenizers library goes on hiding a token that was special.
    ids = ours.encode("a <role>b")
    assert ours.decode(ids) == "ab" and ours.stream().feed(ids) == "ab"
