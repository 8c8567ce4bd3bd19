"""What files say cannot write to a terminal, nor fill it."""

import json

import numpy as np
import pytest
import safetensors.numpy
from published_configs import TINY

from ling3.checkpoint import CheckpointError, load
from ling3.checkpoint.shards import INDEX, complaint, open_all
from ling3.cli import main
from ling3.families.ling3_config import ConfigError, Ling3Config
from ling3.runtime.quoting import MOST_LINES, message, printable, shown
from ling3.text.chat_template import ChatTemplate, ChatTemplateError
from ling3.text.tokenizer import TokenizerError, load_tokenizer

ILL = "\x1b[31mred\r\n\0\x9b\u202ecba\ud800\u2028"
WELL = r"\x1b[31mred\r\n\x00\x9b\u202ecba\ud800\u2028"


def refusal(kind, call):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def is_plain(text):
    return all(c.isprintable() or c == "\n" for c in text) and len(text.split("\n")) <= MOST_LINES


def test_what_does_not_print_is_escaped():
    assert printable(ILL) == WELL
    assert shown(ILL) == f"'{WELL}'"
    assert message(f"a: {ILL}\nb").split("\n") == ["a: " + r"\x1b[31mred\r", WELL[15:], "b"]
    assert printable("Käse 你好 😀") == "Käse 你好 😀"


def test_what_is_long_is_cut():
    assert len(shown(ILL * 1000)) == 80 and len(printable(ILL * 1000, 100)) == 100
    lines = message("\n".join(map(str, range(1000)))).split("\n")
    assert len(lines) == MOST_LINES and lines[-2:] == ["22", "  ... and 977 more"]
    nested = []
    for _ in range(10_000):
        nested = [nested]
    assert shown(nested) == "a list" and shown([10**5000]) == "a list"


def test_many_problems_of_many_kinds_fit_on_a_screen():
    text = complaint("here", [(f"kind {kind}", [f"{ILL}{i}" for i in range(100)]) for kind in range(5)])
    assert is_plain(text) and text.count("and 98 more") == 5
    text = complaint("here", [("one", [str(i) for i in range(13)]), ("other", ["x"])])
    assert "and 1 more" in text and text.endswith("other:\n    x")


def test_a_config():
    text = refusal(ConfigError, lambda: Ling3Config.from_dict({**TINY, "hidden_size": ILL, f"rope_{ILL}": 1}))
    assert is_plain(text) and text.count(WELL) == 2
    many = refusal(ConfigError, lambda: Ling3Config.from_dict({**TINY, **{f"rope_{i}": 1 for i in range(1000)}}))
    assert is_plain(many) and "1000 problems" in many and "and 978 more" in many


def test_a_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"type": ILL}}))
    assert is_plain(refusal(TokenizerError, lambda: load_tokenizer(tmp_path)))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}, "normalizer": ILL}))
    assert WELL in refusal(TokenizerError, lambda: load_tokenizer(tmp_path))


@pytest.mark.parametrize("source", ["{{ raise_exception(a) }}", "{{ a.b.c }}", "{% " + ILL, "{{ [][a] + 1 }}"])
def test_a_chat_template(source):
    messages = [{"role": "user", "content": "x"}]
    assert is_plain(refusal(ChatTemplateError, lambda: ChatTemplate(source, ILL).render(messages, a=ILL * 30)))


def test_a_checkpoint(tmp_path):
    """The names of its tensors, and of the files in its index."""
    safetensors.numpy.save_file({"a\x1b[2J\nb": np.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert r"a\x1b[2J\nb, in model.safetensors" in refusal(CheckpointError, lambda: load(tmp_path))
    for name in (ILL, ILL[:-2] + ".safetensors"):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {ILL: name}}))
        text = refusal(CheckpointError, lambda: open_all(tmp_path))
        assert is_plain(text) and f"{WELL}: '" in text


def test_the_command_line(tmp_path, capsys):
    """Whatever error it is that quotes something."""
    assert main(["inspect", str(tmp_path / "\x1b[2J")]) == 2
    assert is_plain(capsys.readouterr().err)
