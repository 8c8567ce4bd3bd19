"""The tokenizer in a GGUF file as transformers reads it: the same ids and names, where transformers knows the kind."""

import json

import pytest
from tokenizer_cases import CORPUS, directory

gguf = pytest.importorskip("gguf", reason="these tests need the package `gguf`: `make real` installs it")

from transformers import AutoTokenizer  # noqa: E402 - after the check for gguf

import ling3  # noqa: E402
from ling3.checkpoint.gguf_vocabulary import tokenizer_files  # noqa: E402

NORMAL, UNKNOWN, CONTROL, BYTE = 1, 2, 3, 6
TEXTS = (
    *CORPUS,
    "I'm IT'S  12345\n\n\tdef f(x): return x_1",
    "naïve e\u0301 Ünïcödé 你好，世界 😀 नमस्ते HelloWorld",
    "a<role>b <|role_end|>",
    "",
)
# transformers has no expression for the names `smollm`, `bailingmoe2` and `default`, and splits them as GPT-2's.
NAMES = ("gpt-2", "llama-bpe", "qwen35", "qwen2", "tekken", "deepseek-r1-qwen")
COMPOSING = ("qwen2", "qwen35")
"""The names whose published tokenizers normalize texts to NFC, which transformers leaves out for GGUF files."""


@pytest.fixture(scope="module", params=NAMES)
def pair(request, tmp_path_factory):
    """The name of the splitting, ling3's tokenizer of a file, and transformers'."""
    return request.param, *both(byte_level_writer(request.param), tmp_path_factory)


def both(write, tmp_path_factory):
    """ling3's tokenizer of a file without weights, and transformers'; `write` returns the writer with its metadata."""
    path, ours = (tmp_path_factory.mktemp(name) for name in ("gguf", "ling3"))
    path /= "model.gguf"
    writer = write(path)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    for name, content in tokenizer_files(metadata, path.name).items():
        (ours / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return ling3.load_tokenizer(ours), theirs


def vocabulary_of(name):
    """The `tokenizer.json` of one of the cases, its ids by token, and the tokens in the order of their ids."""
    file = json.loads((directory(name) / "tokenizer.json").read_bytes())
    ids = file["model"]["vocab"] | {token["content"]: token["id"] for token in file["added_tokens"]}
    return file, ids, sorted(ids, key=ids.__getitem__)


def byte_level_writer(pre):
    """Writes the vocabulary of nano's kind with another splitting."""

    def write(path):
        file, ids, tokens = vocabulary_of("byte-level")
        added = {token["content"] for token in file["added_tokens"]}
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([CONTROL if token in added else NORMAL for token in tokens])
        writer.add_token_merges([" ".join(merge) for merge in file["model"]["merges"]])
        writer.add_bos_token_id(ids["<role>"])
        writer.add_eos_token_id(ids["<|role_end|>"])
        writer.add_add_bos_token(False)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
        return writer

    return write


def sentencepiece_writer(path):
    """Writes a vocabulary with scores. As Phi-3's, transformers keeps all spaces at the beginning of its texts."""
    _, _, tokens = vocabulary_of("sentencepiece")
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 259)]
    writer = gguf.GGUFWriter(path, "phi3")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([-float(place) for place in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return writer


def test_sentencepiece_ids_are_those_of_transformers(tmp_path_factory):
    ours, theirs = both(sentencepiece_writer, tmp_path_factory)
    for text in (*TEXTS, "  two spaces", "<s>the</s> cat"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
    assert ours.encode("the cat") == theirs.encode("the cat") and ours.encode("the")[0] == 1


def test_ids_are_those_of_transformers(pair):
    pre, ours, theirs = pair
    for text in TEXTS:
        same = ours.encode(text) == theirs.encode(text)
        assert same or (pre in COMPOSING and "\u0301" in text), (pre, text)


def test_pieces_are_those_of_transformers(pair):
    _, ours, theirs = pair
    for text in TEXTS:
        backends = ours.backend, theirs.backend_tokenizer
        mine, other = (backend.pre_tokenizer.pre_tokenize_str(text) for backend in backends)
        assert mine == other, text


def test_named_tokens_and_chat_template_are_those_of_transformers(pair):
    _, ours, theirs = pair
    question = [{"role": "user", "content": "naïve"}]
    assert ours.special_tokens["bos_token"] == theirs.bos_token
    assert ours.special_tokens["eos_token"] == theirs.eos_token and ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.apply_chat_template(question, tokenize=False) == theirs.apply_chat_template(question, tokenize=False)
    added = {token.content for token in theirs.added_tokens_decoder.values()}
    assert {token.content for token in ours.backend.get_added_tokens_decoder().values()} <= added
