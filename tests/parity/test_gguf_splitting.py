"""Vocabularies of GGUF files against `tiktoken`, with the expressions that Kimi and OpenAI have published."""

import random

import pytest
from tokenizer_cases import kimi_ranks

tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed (the extra parity)")

import tiktoken_ext.openai_public as published  # noqa: E402 - after the check for tiktoken
from test_tiktoken import PARTS, PIECES  # noqa: E402

import ling3  # noqa: E402
from ling3.checkpoint.gguf_vocabulary import tokenizer_files  # noqa: E402
from ling3.text.byte_alphabet import CHARACTERS  # noqa: E402

MORE = [
    "HTTPServer",
    "iPhone",
    "O'Neil's",
    "DON'T",
    "12345",
    "/*",
    "//\n",
    "かな",
    "世界，",
    "한국어",
    "नमस्ते",
    "Привет",
    "3.14",
]
ENDS = ("<s>", "</s>")


def merge_of(token, ranks):
    """The last two pieces that become `token`, as llama.cpp's converter finds them."""
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        found = {place: ranks.get(parts[place] + parts[place + 1]) for place in range(len(parts) - 1)}
        place = min((place for place, rank in found.items() if rank is not None), key=found.__getitem__)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    return parts


def written(token):
    return "".join(CHARACTERS[byte] for byte in token)


@pytest.fixture(scope="module", params=["kimi-k2", "gpt-4o", "gpt-2"])
def pair(request, tmp_path_factory):
    """ling3's tokenizer of a GGUF file's metadata, and tiktoken's of the same ranks."""
    pre, ranks, directory = request.param, kimi_ranks(), tmp_path_factory.mktemp("gguf")
    merges = [" ".join(map(written, merge_of(token, ranks))) for token in ranks if len(token) > 1]
    values = {
        **{"model": "gpt2", "pre": pre, "tokens": [*map(written, ranks), *ENDS], "merges": merges},
        **{"token_type": [1] * len(ranks) + [3, 3], "bos_token_id": len(ranks), "eos_token_id": len(ranks) + 1},
    }
    metadata = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    for name, content in tokenizer_files(metadata, "model.gguf").items():
        (directory / name).write_bytes(content)
    special = {end: len(ranks) + place for place, end in enumerate(ENDS)}
    theirs = tiktoken.Encoding("made up", pat_str=pieces(pre), mergeable_ranks=ranks, special_tokens=special)
    return ling3.load_tokenizer(directory), theirs


def pieces(pre):
    """The published expression. tiktoken's definitions are read without the vocabularies, which are on the network."""
    if pre == "kimi-k2":
        return PIECES
    with pytest.MonkeyPatch.context() as patched:
        for loader in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
            patched.setattr(published, loader, lambda *_, **__: {})
        return {"gpt-4o": published.o200k_base, "gpt-2": published.gpt2}[pre]()["pat_str"]


def test_ids(pair):
    ours, theirs = pair
    draw, parts = random.Random(0), [part for part in PARTS if not part.startswith(("[", "<"))] + MORE
    for _ in range(1_000):
        text = "".join(draw.choices(parts, k=draw.randrange(40)))
        if draw.random() < 0.2:
            text += "".join(chr(draw.randrange(0x20, 0xD7FF)) for _ in range(20))
        assert ours.encode(text) == theirs.encode(text), text


def test_every_character(pair):
    """Each character beside letters, so that a piece that ends elsewhere shows."""
    ours, theirs = pair
    for start in range(0, 0x110000, 64):
        text = "".join(f"a{chr(code)}b " for code in range(start, start + 64) if not 0xD800 <= code < 0xE000)
        assert ours.encode(text) == theirs.encode(text), hex(start)
