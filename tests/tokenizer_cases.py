"""The tokenizers that every law of texts is tested on, as checkpoint directories by name.

A file that tests a further one adds its maker to `MAKERS` before the tests are collected, as `make real` does.
"""

import functools
import importlib.metadata
import json
import pathlib
import tempfile
from collections.abc import Callable

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import ling3
from ling3.text import tokenizer as text_tokenizer
from ling3.train.tokenizer import train_tokenizer, write_tokenizer

CORPUS = ("the cat sat on the mat, and that was that", "hello world, wörld", "1 + 2 = 3", "你好 世界", "a b  c")
SPECIAL = ("<unk>", "<s>", "</s>")
SIZE = 512
"""Tokens of the SentencePiece-like vocabulary: the special ones, the bytes, its pieces, and pieces that fill it up."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content }} {{ eos_token }}{% endif %}{% endfor %}"
)


def byte_level(directory: pathlib.Path) -> None:
    """nano's kind: byte-level pieces, nothing added around a text."""
    write_tokenizer(train_tokenizer([*CORPUS] * 3, 480), directory, 512)


def sentencepiece(directory: pathlib.Path) -> None:
    """The kind of Llama 2 and Mistral: pieces with `▁`, bytes for what has no piece, `<s>` before a text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([*CORPUS] * 3, trainers.BpeTrainer(vocab_size=120, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].get)
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    names += [f"▁piece{i}" for i in range(SIZE - len(names))]
    merges = [tuple(pair) for pair in learned["merges"]]
    vocabulary = {name: i for i, name in enumerate(names)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(directory / "tokenizer.json"))
    _settings(directory, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE)


def published(directory: pathlib.Path) -> None:
    """Claude 2's, which the package `anthropic` has under MIT: 65,000 byte-level pieces, texts normalized by NFKC."""
    file = pathlib.Path(str(importlib.metadata.distribution("anthropic").locate_file("anthropic/tokenizer.json")))
    (directory / "tokenizer.json").write_bytes(file.read_bytes())
    _settings(directory, eos_token="<EOT>")


def _settings(directory: pathlib.Path, **settings: str) -> None:
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")


MAKERS: dict[str, Callable[[pathlib.Path], None]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "published": published,
}

_FOLDER = tempfile.TemporaryDirectory(prefix="ling3-tokenizers-")


@functools.cache
def directory(name: str) -> pathlib.Path:
    """The directory of one of `MAKERS`, which must not be changed."""
    made = pathlib.Path(_FOLDER.name) / name
    made.mkdir()
    MAKERS[name](made)
    return made


@functools.cache
def load(name: str) -> text_tokenizer.Tokenizer:
    """One of `MAKERS`, loaded."""
    return ling3.load_tokenizer(directory(name))


@functools.cache
def parts_of_characters(name: str) -> list[int]:
    """The ids of the tokens that are no text by themselves."""
    tokenizer = load(name)
    return [token for token in range(min(tokenizer.vocab_size, 2000)) if "\ufffd" in tokenizer.decode([token])]
