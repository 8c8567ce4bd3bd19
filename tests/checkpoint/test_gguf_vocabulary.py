"""The tokenizer in a GGUF file's metadata: small vocabularies, and every error."""

import json

import pytest
from tokenizer_cases import CORPUS, directory, load

import ling3
from ling3.checkpoint.gguf_splitting import SPLITTINGS
from ling3.checkpoint.gguf_vocabulary import tokenizer_files
from ling3.checkpoint.safetensors_file import CheckpointError
from ling3.text.byte_alphabet import BYTES, CHARACTERS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
MERGES = ("h e", "l l", "he ll", "Ġ hell")
SPECIAL = {"<s>": CONTROL, "</s>": CONTROL, "<end>": CONTROL, "<think>": USER_DEFINED, "[PAD264]": UNUSED}
PIECES = ("▁", "h", "e", "l", "o", "▁h", "ll", "▁he", "▁hell", "▁hello")
"""Each longer one is made of two before it."""


def keys(**values):
    return {f"tokenizer.ggml.{name}": value for name, value in values.items()}


def byte_level(**values):
    """A byte-level vocabulary: all bytes, four merges, and special tokens."""
    tokens = [*CHARACTERS, *(merge.replace(" ", "") for merge in MERGES), *SPECIAL]
    types = [NORMAL] * (len(tokens) - len(SPECIAL)) + [*SPECIAL.values()]
    fields = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": types, "merges": list(MERGES)}
    return keys(**fields | {"bos_token_id": 260, "eos_token_id": 261, "eot_token_id": 262} | values)


def sentencepiece(**values):
    """SentencePiece's kind of vocabulary: three special tokens, all bytes, and pieces with scores."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *names, *PIECES]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)]
    scores = [0.0] * 259 + [-float(place) for place in range(len(PIECES))]
    fields = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return keys(**fields | {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | values)


def without(metadata, name):
    return {key: value for key, value in metadata.items() if key != f"tokenizer.ggml.{name}"}


@pytest.fixture
def opened(tmp_path):
    """Loads the tokenizer of some metadata from the written files."""

    def open_tokenizer(metadata):
        for name, content in tokenizer_files(metadata, "model.gguf").items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(content)
        return ling3.load_tokenizer(tmp_path)

    return open_tokenizer


@pytest.mark.parametrize("metadata", [{}, keys(model="none"), keys(model="no_vocab"), {"general.name": "x"}])
def test_a_file_without_a_tokenizer_gives_no_files(metadata):
    assert tokenizer_files(metadata, "model.gguf") == {}


def test_byte_level_ids_follow_the_merges_and_decode_to_the_text(opened):
    tokenizer = opened(byte_level())
    assert tokenizer.encode("hell") == [258] and tokenizer.encode("a hello") == [97, 259, 111]
    for text in ("é 你好 😀\n\t x", "", "\x00\x7f", " a  b "):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 264


def test_added_tokens_are_found_in_a_text_and_only_control_tokens_are_hidden(opened):
    tokenizer = opened(byte_level())
    assert tokenizer.encode("<s>he<think></s>") == [260, 256, 263, 261]
    assert tokenizer.decode([260, 256, 263, 261]) == "he<think>"
    assert tokenizer.decode([260, 256, 263, 261], skip_special_tokens=False) == "<s>he<think></s>"


def test_an_unused_token_keeps_its_id_and_no_text_gives_it(opened):
    metadata = byte_level(pre="llama-bpe", add_bos_token=False)
    metadata["tokenizer.ggml.tokens"][260:] = ["[PAD]", "unused", "<s>", "</s>", "q"]
    metadata["tokenizer.ggml.token_type"][260:] = [UNUSED, UNUSED, CONTROL, CONTROL, UNUSED]
    metadata["tokenizer.ggml.tokens"][CHARACTERS.index("q")] = "[PAD]"
    metadata["tokenizer.ggml.token_type"][CHARACTERS.index("q")] = UNUSED
    tokenizer = opened(metadata | keys(bos_token_id=262, eos_token_id=263, eot_token_id=263))
    assert not {260, 261, 264} & set(tokenizer.encode("[PAD] unused q[PAD]unused"))
    assert tokenizer.encode("<s>he</s>") == [262, 256, 263]
    assert tokenizer.decode([260, 261, 264, 256]) == "he" and tokenizer.token_bytes(261) == b""


def test_an_unused_token_that_an_id_names_is_a_control_token(opened):
    tokenizer = opened(byte_level(padding_token_id=264))
    assert tokenizer.pad_token_id == 264 and tokenizer.encode("[PAD264]") == [264]


def test_an_ordinary_piece_does_not_become_special_as_padding(opened):
    tokenizer = opened(byte_level(padding_token_id=256, unknown_token_id=256))
    assert tokenizer.encode("hell") == [258] and tokenizer.pad_token_id == 256
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}


def test_all_ends_of_a_generation_are_taken(opened):
    assert opened(byte_level(eom_token_id=260)).eos_token_ids == (260, 261, 262)


def test_a_file_without_named_tokens_has_no_generation_config():
    metadata = byte_level()
    for name in ("bos_token_id", "eos_token_id", "eot_token_id"):
        metadata = without(metadata, name)
    assert set(tokenizer_files(metadata, "model.gguf")) == {"tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("qwen2", [258]), ("llama-bpe", [260, 258]), ("llama3", [260, 258]), ("tekken", [260, 258]), ("smollm", [258])],
)
def test_the_name_of_the_splitting_says_whether_a_text_has_a_beginning(opened, pre, expected):
    assert opened(byte_level(pre=pre)).encode("hell") == expected
    assert opened(byte_level(pre=pre, add_bos_token=False)).encode("hell") == [258]
    assert opened(byte_level(pre=pre, add_bos_token=True, add_eos_token=True)).encode("hell") == [260, 258, 261]
    assert opened(byte_level(pre=pre)).encode("hell", add_special_tokens=False) == [258]


def test_llama_bpe_takes_a_piece_that_is_a_token_in_spite_of_the_merges(opened):
    """With the merge `e l` first, `hell` is not reached by merges, but it is a token."""
    metadata = byte_level(add_bos_token=False)
    metadata["tokenizer.ggml.tokens"].append("el")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    metadata["tokenizer.ggml.merges"].insert(0, "e l")
    assert opened(metadata).encode("hell") != [258]
    assert opened(metadata | keys(pre="llama-bpe")).encode("hell") == [258]


TEXTS = ("I'm IT'S 12345", "a  b\n\n\n c \n", "x=(1)_é,b.", "नमस्ते HelloWorld 你好")
SPACES = ["a", " ", " b", "\n\n\n", " c", " \n"]
DIGITS = ["1", "2", "3", "4", "5"]
CODE = ["x", "=(", "1", ")_", "é", ",b", "."]
SIGNS = ["x", "=(", "1", ")_", "é", ",", "b", "."]
MARKS = ["नमस", "्त", "े", " HelloWorld", " 你好"]
SIGN_MARKS = ["नमस", "्", "त", "े", " HelloWorld", " 你好"]
PARTS = {
    "llama-bpe": (["I", "'m", " IT", "'S", " ", "123", "45"], SPACES, CODE, MARKS),
    "qwen2": (["I", "'m", " IT", "'S", " ", *DIGITS], SPACES, CODE, MARKS),
    "qwen35": (["I", "'m", " IT", "'S", " ", *DIGITS], SPACES, CODE, ["नमस्ते", " HelloWorld", " 你好"]),
    "smollm": (["I", "'m", " IT", "'", "S", " ", *DIGITS], SPACES, SIGNS, SIGN_MARKS),
    "gpt-2": (["I", "'m", " IT", "'", "S", " 12345"], SPACES, SIGNS, SIGN_MARKS),
    "bailingmoe2": (["I", "'m", " IT", "'S", " ", *DIGITS], SPACES, CODE, MARKS),
    "tekken": (["I", "'m", " IT", "'S", " ", *DIGITS], SPACES, CODE, ["नमस्ते", " Hello", "World", " 你好"]),
    "gpt-4o": (["I'm", " IT'S", " ", "123", "45"], SPACES, CODE, ["नमस्ते", " Hello", "World", " 你好"]),
    "kimi-k2": (["I'm", " IT'S", " ", "123", "45"], SPACES, CODE, ["नमस्ते", " Hello", "World", " ", "你好"]),
    "seed-coder": (["I", "'m", " IT", "'S", " ", *DIGITS], SPACES, CODE, MARKS),
    "ufakzeka": (["I", "'m", " IT", "'S", " ", *DIGITS], SPACES, CODE, MARKS),
    "minicpm5": (["I", "'m", " IT", "'S", " ", "123", "45"], SPACES, CODE, MARKS),
    "viking": (
        ["I'm", " IT'S", " ", *DIGITS],
        SPACES,
        ["x=", "(", "1", ")", "_é", ",", "b", "."],
        ["नमस्ते", " HelloWorld", " 你好"],
    ),
    "default": (["I", "'", "m", " IT", "'", "S", " ", "123", "45"], SPACES, SIGNS, SIGN_MARKS),
    "falcon": (["I", "'", "m", " IT", "'", "S", " ", "123", "45"], SPACES, SIGNS, SIGN_MARKS),
    "deepseek-v3": (
        ["I", "'m", " IT", "'S", " ", "123", "45"],
        SPACES,
        CODE,
        ["नमस्ते", " HelloWorld", " ", "你好"],
    ),
    "deepseek-llm": (
        ["I", "'", "m", " IT", "'", "S", " ", "12345"],
        ["a", " ", " b", "\n", "\n", "\n", " c", " ", "\n"],
        ["x", "=(", "1", ")_", "é", ",", "b", "."],
        ["नमस्ते", " HelloWorld", " ", "你好"],
    ),
    "deepseek-coder": (
        ["I", "'", "m", " IT", "'", "S", " ", *DIGITS],
        ["a", " ", " b", "\n", "\n", "\n", " c", " ", "\n"],
        ["x", "=", "(", "1", ")_", "é", ",", "b", "."],
        ["नमस", "्", "त", "े", " HelloWorld", " ", "你好"],
    ),
}


@pytest.mark.parametrize("pre", PARTS)
def test_texts_are_split_as_the_name_says(opened, pre):
    pre_tokenizer = opened(byte_level(pre=pre)).backend.pre_tokenizer
    for text, parts in zip(TEXTS, PARTS[pre], strict=True):
        found = [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]
        assert [b"".join(BYTES[character] for character in piece).decode() for piece in found] == parts


def test_every_name_of_a_splitting_gives_a_tokenizer(opened):
    for pre in SPLITTINGS:
        tokenizer = opened(byte_level(pre=pre))
        ids = tokenizer.encode("I'm 12 é\n x", add_special_tokens=False)
        assert tokenizer.decode(ids) == "I'm 12 é\n x"


@pytest.mark.parametrize(
    ("pre", "same"), [("qwen2", True), ("qwen35", True), ("command-r", True), ("llama-bpe", False)]
)
def test_a_decomposed_letter_is_composed_where_the_published_tokenizer_does_it(opened, pre, same):
    tokenizer = opened(byte_level(pre=pre))
    assert (tokenizer.encode("e\u0301") == tokenizer.encode("é")) is same


def test_sentencepiece_merges_the_pair_of_the_best_score_first(opened):
    tokenizer = opened(sentencepiece())
    assert tokenizer.encode("hello") == [1, 268] and tokenizer.encode("hell", add_special_tokens=False) == [267]
    assert tokenizer.encode("ohello", add_special_tokens=False) == [259, 263, 260, 261, 265, 263]
    # With a better score than `ll`, `lo` takes the second `l` first.
    metadata = sentencepiece()
    for name, value in (("tokens", "lo"), ("token_type", NORMAL), ("scores", -5.5)):
        metadata[f"tokenizer.ggml.{name}"].append(value)
    assert opened(metadata).encode("hello", add_special_tokens=False) == [266, 262, 269]


def test_merges_in_the_file_are_used_in_place_of_scores(opened):
    merges = ["h e", "▁ h", "l l"]
    metadata = without(sentencepiece(merges=merges), "scores")
    metadata["tokenizer.ggml.tokens"].append("he")
    metadata["tokenizer.ggml.token_type"].append(NORMAL)
    assert opened(metadata).encode("hell", add_special_tokens=False) == [259, 269, 265]


def test_text_without_a_piece_becomes_bytes(opened):
    tokenizer = opened(sentencepiece())
    assert tokenizer.encode("hé", add_special_tokens=False) == [264, 3 + 0xC3, 3 + 0xA9]
    for text in ("hello é 你好\n\t x", " a  b ", "😀"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3" and tokenizer.token_bytes(267) == b" hell"


def test_special_tokens_of_sentencepiece_are_found_in_a_text(opened):
    assert opened(sentencepiece()).encode("<s>hello</s>", add_special_tokens=False) == [1, 268, 2]


def test_a_space_is_put_before_a_text_unless_the_file_says_no(opened):
    tokenizer = opened(sentencepiece(add_space_prefix=False))
    assert tokenizer.encode("hello", add_special_tokens=False) == [260, 261, 265, 263]
    assert tokenizer.encode(" hello", add_special_tokens=False) == [268]
    assert tokenizer.decode([268]) == " hello" and opened(sentencepiece()).decode([268]) == "hello"


def test_a_sentencepiece_text_begins_with_bos_unless_the_file_says_no(opened):
    assert opened(sentencepiece(add_bos_token=False)).encode("hello") == [268]
    assert opened(sentencepiece(add_eos_token=True)).encode("hello") == [1, 268, 2]


def test_the_unknown_token_is_found_by_its_type(opened):
    tokenizer = opened(without(sentencepiece(), "unknown_token_id"))
    assert json.loads(tokenizer.backend.to_str())["model"]["unk_token"] == "<unk>"


def test_chat_templates_are_written_by_name(opened):
    templates = {
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "tools: {{ messages[0].content }}",
        "tokenizer.chat_templates": ["tool_use"],
    }
    tokenizer = opened(byte_level() | templates)
    question = [{"role": "user", "content": "hé"}]
    assert set(tokenizer.chat_templates) == {"default", "tool_use"}
    assert tokenizer.apply_chat_template(question, tokenize=False) == "<s>hé"
    assert tokenizer.apply_chat_template(question, tokenize=False, tools=[{}]) == "tools: hé"


@pytest.mark.parametrize(
    ("metadata", "key", "found"),
    [
        (keys(model="bert"), "model", "found 'bert'; expected gpt2 or llama"),
        (keys(model=3), "model", "found 3; expected a string"),
        (byte_level(pre="unheard-of"), "pre", "found 'unheard-of'"),
        (without(byte_level(), "pre"), "pre", "found none"),
        (byte_level(pre=["qwen2"]), "pre", "expected a string"),
        (without(byte_level(), "tokens"), "tokens", "found no tokens"),
        (byte_level(tokens=[]), "tokens", "found no tokens"),
        (byte_level(tokens="abc"), "tokens", "found 'abc'; expected a list of strings"),
        (byte_level(tokens=["a", 3]), "tokens", "found 3 at 1; expected a list of strings"),
        (keys(model="gpt2", pre="qwen2", tokens=["a", "b", "a"], token_type=[1] * 3), "tokens", "'a' at 0 and at 2"),
        (keys(model="gpt2", pre="qwen2", tokens=["a", ""], token_type=[1] * 2), "tokens", "an empty token at 1"),
        (keys(model="gpt2", pre="qwen2", tokens=["\ud800"], token_type=[1]), "tokens", "'\\ud800' at 0"),
        (without(byte_level(), "token_type"), "token_type", "found none; expected 265 numbers"),
        (byte_level(token_type=[1, 1]), "token_type", "found 2 numbers; expected 265 numbers"),
        (byte_level(token_type=[1.0] * 265), "token_type", "found 1.0 at 0"),
        (byte_level(token_type=[7] * 265), "token_type", "found 7 at 0; expected types from 1 to 6"),
        (byte_level(token_type=[0] * 265), "token_type", "found 0 at 0"),
        (without(byte_level(), "merges"), "merges", "found none"),
        (byte_level(merges=["h e", "hello"]), "merges", "found 'hello' at 1; expected two tokens"),
        (byte_level(merges=["h e l"]), "merges", "found 'h e l' at 0"),
        (byte_level(merges=[" h"]), "merges", "found ' h' at 0"),
        (byte_level(merges=["xy e"]), "merges", "no token 'xy'"),
        (byte_level(merges=["e xy"]), "merges", "no token 'xy'"),
        (byte_level(merges=["x y"]), "merges", "no token 'xy'"),
        (byte_level(merges=[["h", "e"]]), "merges", "expected a list of strings"),
        (byte_level(bos_token_id=265), "bos_token_id", "found 265; expected an id below 265"),
        (byte_level(eot_token_id=-1), "eot_token_id", "found -1"),
        (byte_level(padding_token_id="0"), "padding_token_id", "found '0'"),
        (byte_level(eos_token_id=True), "eos_token_id", "found True"),
        (byte_level(add_bos_token=1), "add_bos_token", "found 1; expected true or false"),
        (byte_level(add_eos_token="no"), "add_eos_token", "found 'no'"),
        (without(byte_level(pre="llama-bpe"), "bos_token_id"), "bos_token_id", "found none"),
        (without(byte_level(add_eos_token=True), "eos_token_id"), "eos_token_id", "found none"),
        (without(sentencepiece(), "bos_token_id"), "bos_token_id", "found none"),
        (without(sentencepiece(), "scores"), "scores", "found none; expected 269 numbers"),
        (sentencepiece(scores=[0.0]), "scores", "found 1 numbers"),
        (sentencepiece(scores=["0"] * 269), "scores", "found '0' at 0"),
        (sentencepiece(scores=[float("nan")] * 269), "scores", "found nan; expected finite numbers"),
        (sentencepiece(add_space_prefix="no"), "add_space_prefix", "found 'no'"),
    ],
)
def test_an_error_names_the_file_the_key_and_what_to_do(metadata, key, found):
    with pytest.raises(CheckpointError) as raised:
        tokenizer_files(metadata, "model.gguf")
    message = str(raised.value)
    assert message.startswith(f"model.gguf: tokenizer.ggml.{key}: found ") and found in message
    assert any(advice in message for advice in ("convert the model again", "write the right", "use the original"))


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ({"tokenizer.chat_template": 3}, "tokenizer.chat_template: found 3; expected a string"),
        ({"tokenizer.chat_template": "\ud800"}, "lone surrogate"),
        ({"tokenizer.chat_template.x": ["a"]}, "tokenizer.chat_template.x: found ['a']"),
        ({"tokenizer.chat_template.../../x": "a"}, "a template named '../../x'"),
        ({"tokenizer.chat_template.": "a"}, "a template named ''"),
        ({"tokenizer.chat_template.default": "a", "tokenizer.chat_template": "b"}, "a template named 'default'"),
    ],
)
def test_an_error_names_the_chat_template(template, found):
    with pytest.raises(CheckpointError, match=r"^model\.gguf: tokenizer\.chat_template") as raised:
        tokenizer_files(byte_level() | template, "model.gguf")
    assert found in str(raised.value)


def test_the_unknown_splitting_is_refused_with_the_known_ones():
    with pytest.raises(CheckpointError, match="bailingmoe2") as raised:
        tokenizer_files(byte_level(pre="unheard-of"), "model.gguf")
    assert "llama-bpe" in str(raised.value) and max(SPLITTINGS) in str(raised.value)


def as_metadata(name, **values):
    """The vocabulary of one of the tokenizers in `tokenizer_cases`, as a GGUF file has it."""
    file = json.loads((directory(name) / "tokenizer.json").read_bytes())
    settings = json.loads((directory(name) / "tokenizer_config.json").read_bytes())
    ids = file["model"]["vocab"] | {token["content"]: token["id"] for token in file["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    added = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in file["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in file["model"]["merges"]]
    named = {
        f"{kind}_token_id": ids[settings[f"{kind}_token"]] for kind in ("bos", "eos") if f"{kind}_token" in settings
    }
    types = [added.get(place, NORMAL) for place in range(len(tokens))]
    return keys(**{"tokens": tokens, "token_type": types, "merges": merges} | named | values)


ROUND_TEXTS = (*CORPUS, "  it's 12345\n\n\tdef f(x): return x<EOT> é", "<s>the</s> cat 世界")


def test_a_published_vocabulary_comes_back(opened):
    """Claude 2's tokenizer has a normalizer that GGUF has no name for, which these texts do not need."""
    tokenizer, original = opened(as_metadata("published", model="gpt2", pre="gpt-2")), load("published")
    for text in ROUND_TEXTS:
        assert tokenizer.encode(text) == original.encode(text)
    assert tokenizer.eos_token_ids == original.eos_token_ids


def test_a_sentencepiece_vocabulary_comes_back(opened):
    """Its pieces are in the order of its merges, so that their places are their scores."""
    metadata, original = as_metadata("sentencepiece", model="llama"), load("sentencepiece")
    count = len(metadata["tokenizer.ggml.tokens"])
    scored = without(metadata, "merges") | keys(scores=[-float(place) for place in range(count)])
    for tokenizer in (opened(metadata), opened(scored)):
        for text in ROUND_TEXTS:
            assert tokenizer.encode(text) == original.encode(text), text
        assert tokenizer.special_tokens == {name: original.special_tokens[name] for name in ("bos_token", "eos_token")}
