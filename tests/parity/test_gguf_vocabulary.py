"""The tokenizer in a GGUF file as transformers reads it: the same ids and names, where transformers knows the kind."""

import json

import pytest
from tokenizer_cases import CORPUS, directory

gguf = pytest.importorskip("gguf", reason="these tests need the package `gguf`: `make real` installs it")

from transformers import AutoTokenizer  # noqa: E402 - after the check for gguf

import ling3  # noqa: E402
from ling3.checkpoint.gguf_vocabulary import tokenizer_files  # noqa: E402

NORMAL, CONTROL = 1, 3
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
    path, ours = (tmp_path_factory.mktemp(name) for name in ("gguf", "ling3"))
    path /= "model.gguf"
    write(path, request.param)
    metadata = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    for name, content in tokenizer_files(metadata, path.name).items():
        (ours / name).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    return request.param, ling3.load_tokenizer(ours), theirs


def write(path, pre):
    """A file without weights that has the vocabulary of nano's kind, and another splitting."""
    file = json.loads((directory("byte-level") / "tokenizer.json").read_bytes())
    added = {token["content"]: token["id"] for token in file["added_tokens"]}
    vocabulary = file["model"]["vocab"] | added
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in added else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in file["model"]["merges"]])
    writer.add_bos_token_id(vocabulary["<role>"])
    writer.add_eos_token_id(vocabulary["<|role_end|>"])
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


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
