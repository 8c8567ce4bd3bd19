"""The tokenizers that every law of texts is tested on, as checkpoint directories by name.

A file that tests a further one adds its maker to `MAKERS` before the tests are collected, as `make real` does.
"""

import base64
import functools
import importlib.metadata
import json
import pathlib
import tempfile
from collections.abc import Callable, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import ling3
from ling3.text import tokenizer as text_tokenizer
from ling3.text.byte_alphabet import BYTES
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


def tiktoken(directory: pathlib.Path) -> None:
    """Kimi's kind: the ranks of byte-level pieces, without a tokenizer.json."""
    ranks = kimi_ranks()
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (directory / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    code = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    names = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 5: "<|tool_call_begin|>", 100: "[PAD]"}
    added = {str(len(ranks) + place): {"content": name, "special": "tool" not in name} for place, name in names.items()}
    _settings(directory, auto_map=code, added_tokens_decoder=added, bos_token="[BOS]", eos_token="[EOS]")
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_linear", "vocab_size": KIMI_ROWS}))


KIMI_ROWS = 512


@functools.cache
def kimi_ranks() -> dict[bytes, int]:
    """A small vocabulary of ranks, of which each token merges two before it."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = [
        *CORPUS,
        "aaaaaaaa aaa",
        "abababab",
        "你好你好 世界世界",
        "We'll don't I'M",
        "     \n\n\n",
        "12345678",
    ]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(texts * 3, trainer)
    vocabulary = trained.get_vocab()
    return {
        b"".join(BYTES[character] for character in token): vocabulary[token]
        for token in sorted(vocabulary, key=vocabulary.__getitem__)
    }


def _settings(directory: pathlib.Path, **settings: object) -> None:
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")


MAKERS: dict[str, Callable[[pathlib.Path], None]] = {
    "byte-level": byte_level,
    "sentencepiece": sentencepiece,
    "published": published,
    "tiktoken": tiktoken,
}
FAST = ("byte-level", "sentencepiece", "published")
"""Those with a tokenizer.json, which transformers reads too."""

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
def lost_bytes(name: str) -> set[int]:
    """The bytes that its vocabulary has no token for: SmolLM2's lacks a few that text hardly ever has."""
    tokenizer = load(name)
    found = (tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
    return set(range(256)) - {each[0] for each in found if len(each) == 1}


@functools.cache
def parts_of_characters(name: str) -> list[int]:
    """The ids of the tokens that are no text by themselves."""
    tokenizer = load(name)
    return [token for token in range(min(tokenizer.vocab_size, 2000)) if "\ufffd" in tokenizer.decode([token])]


def after(tokenizer: text_tokenizer.Tokenizer, prompt: Sequence[int], ids: Sequence[int], skip: bool = True) -> str:
    """What is decoded of `ids` after a prompt, with a character that the prompt only began, if they complete it."""
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode([*prompt, *ids], skip)
    while not whole.startswith(before):
        assert before.endswith("\ufffd")
        before = before[:-1]
    return whole[len(before) :]
