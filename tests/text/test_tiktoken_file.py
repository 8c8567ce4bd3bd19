"""`tiktoken.model`; that its ids are tiktoken's is tested in tests/parity/test_tiktoken.py."""

import base64
import json
import shutil

import pytest
from tokenizer_cases import directory as made
from tokenizer_cases import kimi_ranks

from ling3.text.tokenizer import TokenizerError, load_tokenizer


@pytest.fixture
def directory(tmp_path):
    shutil.copytree(made("tiktoken"), tmp_path, dirs_exist_ok=True)
    return tmp_path


def write(directory, **changes):
    path = directory / "tokenizer_config.json"
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in fields.items() if value is not None}))


def test_pieces(directory):
    """Chinese characters apart from other letters, clitics with their words, three digits, white space."""
    tokenizer = load_tokenizer(directory)
    pieces = tokenizer.backend.pre_tokenizer.pre_tokenize_str("We'll中文English 12345  a\n\n")
    places = [place for _, place in pieces]
    text = "We'll中文English 12345  a\n\n"
    assert [text[begin:end] for begin, end in places] == [
        "We'll", "中文", "English", " ", "123", "45", " ", " a", "\n\n",
    ]  # fmt: skip


def test_a_tokenizer_json_goes_first(directory):
    shutil.copy(made("byte-level") / "tokenizer.json", directory)
    write(directory, added_tokens_decoder=None, bos_token=None, eos_token="<|role_end|>")
    assert load_tokenizer(directory).encode("<role>") == [2]


def test_code_of_another_tokenizer_is_not_guessed(directory):
    write(directory, auto_map={"AutoTokenizer": ["tokenization_other.OtherTokenizer", None]})
    with pytest.raises(TokenizerError, match=r"tiktoken.model: the pieces .*tokenization_other.* tokenizer.json"):
        load_tokenizer(directory)
    write(directory, auto_map=None)
    assert load_tokenizer(directory).encode("a")  # config.json says that the model is of the family
    (directory / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match="the pieces of this tokenizer are in code"):
        load_tokenizer(directory)


def test_nothing_beside_the_files_is_run(directory):
    (directory / "tokenization_kimi.py").write_text("raise SystemExit('run')")
    assert load_tokenizer(directory).encode("a")


A, LONG = base64.b64encode(b"a").decode(), base64.b64encode(b"a" * 600).decode()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("YQ", "line LINES: .*YQ.*, where a token in Base64 and its rank"),
        ("Y RANK", "line LINES: .* in Base64"),
        ("eHh4 3e3", "line LINES: .* its rank"),
        (f"{A} RANK", "the ranks of its LINES lines are not 0 and up"),
        ("eHh4 400", "the ranks of its LINES lines"),
        ("eHh4 -1", "the ranks of its LINES lines"),
        (f"{LONG} RANK", "line LINES: 600 bytes, where 1 to 512"),
        ("", "line LINES"),
    ],
)
def test_damaged_lines(directory, line, message):
    rank = len(kimi_ranks())
    with (directory / "tiktoken.model").open("a") as file:
        file.write(line.replace("RANK", str(rank)) + "\n")
    message = message.replace("LINES", str(rank + 1))
    with pytest.raises(TokenizerError, match=rf"tiktoken\.model.*{message}"):
        load_tokenizer(directory)


def test_a_byte_without_a_token(directory):
    lines = (directory / "tiktoken.model").read_bytes().splitlines()
    kept = [line for line in lines if line.split()[0] != base64.b64encode(b"z")]
    ranked = [line.split()[0] + b" %d" % rank for rank, line in enumerate(kept)]
    (directory / "tiktoken.model").write_bytes(b"\n".join(ranked))
    with pytest.raises(TokenizerError, match="no token is the byte 122"):
        load_tokenizer(directory)


def test_a_special_token_that_the_vocabulary_has(directory):
    rank = len(kimi_ranks())
    write(directory, added_tokens_decoder={str(rank): {"content": "a"}, str(rank + 1): {"content": "[EOS]"}})
    with pytest.raises(TokenizerError, match=f"the special token 'a', id {rank}, is another token too"):
        load_tokenizer(directory)


def test_grammars_read_it(directory):
    guidance = pytest.importorskip("llguidance")
    tokenizer = load_tokenizer(directory)
    found = guidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=512, eos_token=[*tokenizer.eos_token_ids])
    assert found.tokenize_str("the cat 你好") == tokenizer.encode("the cat 你好")
