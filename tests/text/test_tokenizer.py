import json
import pickle

import pytest
import tokenizers

from ling3.text import tokenizer_file
from ling3.text.byte_fallback import TokenBytes
from ling3.text.chat_template import ChatTemplateError
from ling3.text.tokenizer import TokenizerError, load_tokenizer
from ling3.train.tokenizer import train_tokenizer, write_tokenizer

HELLO = [{"role": "user", "content": "hello"}]
BACKEND = train_tokenizer(["hello 你好"] * 3, 400)


@pytest.fixture
def directory(tmp_path):
    write_tokenizer(BACKEND, tmp_path, 512)
    return tmp_path


def write(directory, name, **changes):
    """Changes fields of a JSON file; None takes a field away."""
    path = directory / name
    fields = json.loads(path.read_text()) if path.exists() else {}
    fields = {key: value for key, value in {**fields, **changes}.items() if value is not None}
    path.write_text(json.dumps(fields))


@pytest.mark.parametrize("text", ["", "hello 你好", "  two\n\nlines ", "\U0001f600\x00\x7f", "e\u0301"])
def test_any_text_comes_back(directory, text):
    tokenizer = load_tokenizer(directory)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_tokens_are_one_id_and_hidden_on_request(directory):
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("<role>hello<|role_end|>")
    assert tokenizer.backend.token_to_id("<role>") == ids[0]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<role>hello<|role_end|>"


def test_the_chat_template_is_encoded_with_nothing_added(directory):
    write(directory, "tokenizer_config.json", bos_token="<|endoftext|>", add_bos_token=True)
    tokenizer = load_tokenizer(directory)
    text = tokenizer.apply_chat_template(HELLO, tokenize=False)
    ids = tokenizer.apply_chat_template(HELLO)
    assert ids == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert text.endswith("<role>HUMAN</role>hello<|role_end|><role>ASSISTANT</role>\n<think></think>")
    assert tokenizer.apply_chat_template(HELLO, tokenize=False, enable_thinking=True).endswith("<think>")
    assert not tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=False).endswith("</think>")


def test_encode_adds_what_the_post_processor_says(directory):
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    plain = backend.encode("hello").ids
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    # A text is neither cut nor filled up, whatever the file says.
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    assert load_tokenizer(directory).encode("hello") == [0, *plain]
    assert load_tokenizer(directory).encode("hello", add_special_tokens=False) == plain


@pytest.mark.parametrize("flag", ["add_bos_token", "add_eos_token"])
@pytest.mark.parametrize("value", [True, False, None])
def test_the_settings_do_not_replace_the_post_processor(directory, flag, value):
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    backend.save(str(directory / "tokenizer.json"))
    before = load_tokenizer(directory).encode("hello")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings |= {"bos_token": "<|endoftext|>", flag: value}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    assert load_tokenizer(directory).encode("hello") == before and before[0] == 0


def test_a_generation_ends_by_any_of_three_files(directory):
    write(directory, "config.json", eos_token_id=7, pad_token_id=9)
    write(directory, "generation_config.json", eos_token_id=[8, 7], pad_token_id=None)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_token_ids == (1, 7, 8)
    assert tokenizer.pad_token_id == 0
    write(directory, "tokenizer_config.json", pad_token=None, eos_token={"content": "</think>", "lstrip": False})
    tokenizer = load_tokenizer(directory)
    assert tokenizer.eos_token_ids == (5, 7, 8)
    assert tokenizer.pad_token_id == 9
    for name in ("tokenizer_config.json", "generation_config.json", "config.json"):
        (directory / name).unlink()
    tokenizer = load_tokenizer(directory)
    assert (tokenizer.eos_token_ids, tokenizer.pad_token_id, tokenizer.chat_template) == ((), None, None)


def test_a_pad_token_id_of_minus_one_is_none(directory):
    write(directory, "config.json", pad_token_id=-1)
    write(directory, "generation_config.json", pad_token_id=-1)
    write(directory, "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(directory).pad_token_id is None


def test_a_named_token_is_special_even_if_the_file_forgot(directory):
    write(directory, "tokenizer_config.json", eos_token="hello")
    tokenizer = load_tokenizer(directory)
    (end,) = tokenizer.encode("hello")
    assert end in tokenizer.eos_token_ids
    assert tokenizer.decode([end]) == ""


def test_the_template_s_places(directory):
    write(directory, "chat_template.json", chat_template="json")
    write(directory, "tokenizer_config.json", chat_template=None)
    assert load_tokenizer(directory).apply_chat_template(HELLO, tokenize=False) == "json"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default{{ eos_token }}"}]
    write(directory, "tokenizer_config.json", chat_template=named)
    assert load_tokenizer(directory).apply_chat_template(HELLO, tokenize=False) == "default<|role_end|>"
    (directory / "chat_template.jinja").write_text("jinja")
    assert load_tokenizer(directory).apply_chat_template(HELLO, tokenize=False) == "jinja"


def test_the_template_for_tools(directory):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    write(directory, "tokenizer_config.json", chat_template=named)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.apply_chat_template(HELLO, tokenize=False, tools=[{}]) == "tools"
    assert tokenizer.apply_chat_template(HELLO, tokenize=False) == tokenizer.chat_template.source == "default"
    more = directory / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("file's")
    tokenizer = load_tokenizer(directory)
    assert tokenizer.apply_chat_template(HELLO, tokenize=False, tools=[{}]) == "file's"
    with pytest.raises(ValueError, match="the chat templates are tool_use, and none is the default one"):
        tokenizer.apply_chat_template(HELLO)


def test_tokens_of_the_settings(directory):
    size = BACKEND.get_vocab_size()
    added = {str(size): {"content": "<x>", "special": True}, str(size + 1): {"content": "<y>", "lstrip": True}}
    write(directory, "tokenizer_config.json", added_tokens_decoder=added, additional_special_tokens=["<z>"])
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("<x>hello <y><z>")
    assert (ids[0], ids[-2:]) == (size, [size + 1, size + 2])
    assert tokenizer.decode(ids) == "hello<y>", "the blank before it is a part of <y>, and the others are special"


def test_a_pad_token_without_a_row_is_a_name(directory):
    """Of the model's embedding: nothing here pads."""
    size = BACKEND.get_vocab_size()
    write(directory, "tokenizer_config.json", pad_token="[PAD]")
    write(directory, "config.json", vocab_size=size)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.special_tokens["pad_token"] == "[PAD]" and tokenizer.vocab_size == size
    tokenizer.check_fits(size)
    write(directory, "config.json", vocab_size=size + 1)
    assert load_tokenizer(directory).encode("[PAD]") == [size]
    # The same, where it is in the vocabulary's file.
    load_tokenizer(directory).backend.save(str(directory / "tokenizer.json"))
    write(directory, "config.json", vocab_size=size)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.vocab_size == size and size not in tokenizer.encode("[PAD]")
    tokenizer.check_fits(size)


def test_without_a_template(directory):
    write(directory, "tokenizer_config.json", chat_template=None)
    with pytest.raises(ValueError, match="has no chat template"):
        load_tokenizer(directory).apply_chat_template(HELLO)


def test_fits(directory):
    write(directory, "config.json", eos_token_id=500)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.vocab_size == BACKEND.get_vocab_size()
    tokenizer.check_fits(501)
    with pytest.raises(TokenizerError, match="go up to 500, but the model's embedding has 500 rows"):
        tokenizer.check_fits(500)


@pytest.mark.parametrize("pad", [-1, 100_000])
def test_padding_may_be_outside_of_the_vocabulary(directory, pad):
    """Nothing is padded here: -1 is none, and an id without a token needs no row."""
    write(directory, "config.json", pad_token_id=pad)
    write(directory, "generation_config.json", pad_token_id=None)
    write(directory, "tokenizer_config.json", pad_token=None)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.pad_token_id == (None if pad < 0 else pad)
    tokenizer.check_fits(tokenizer.vocab_size)


def test_stream(directory):
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("hello 你好")
    decoder = tokenizer.stream(ids[:1])
    assert decoder.feed(ids[1:]) + decoder.flush() == tokenizer.decode(ids)[len(tokenizer.decode(ids[:1])) :]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json: not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}}', "not a tokenizer"),
        ("tokenizer.json", "\ud800", "tokenizer.json: not a tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json: no valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: a list, where an object"),
        ("tokenizer_config.json", '{"eos_token": 3}', "tokenizer_config.json: eos_token is 3"),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', "eos_token is '<none>', which is no token"),
        ("tokenizer_config.json", '{"pad_token": {"content": ""}}', "pad_token is {'content': ''}"),
        ("tokenizer_config.json", '{"additional_special_tokens": [3]}', "a special token is 3"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "added_tokens_decoder is .* tokens by id"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"-1": "<x>"}}', "added_tokens_decoder is"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"3": {"content": "x", "special": 1}}}', "are true"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"3": {"content": "<x>"}}}', "'<x>' the id 3, .* 362"),
        ("special_tokens_map.json", "[]", "special_tokens_map.json: a list, where an object"),
        ("added_tokens.json", '{"<x>": "3"}', "added_tokens.json: '<x>' is '3', where an id"),
        ("added_tokens.json", '{"<x>": 7000}', "gives '<x>' the id 7000, .* it is 362"),
        ("tokenizer_config.json", '{"a": 1, "a": 2}', "the same key twice"),
        ("tokenizer_config.json", '{"chat_template": 1}', "chat_template is 1, where a string or a list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "chat_template is .* a list of {'name'"),
        ("tokenizer_config.json", '{"chat_template": []}', "chat_template: 0 templates"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "tokenizer_config.json: chat_template, line 1"),
        ("chat_template.jinja", "{{", "chat_template.jinja, line 1"),
        ("chat_template.jinja", "\ud800", "chat_template.jinja: not UTF-8"),
        ("chat_template.json", "[1]", "chat_template.json: a list"),
        ("generation_config.json", '{"eos_token_id": "2"}', "generation_config.json: eos_token_id is '2'"),
        ("generation_config.json", '{"eos_token_id": [1, -2]}', "eos_token_id is"),
        ("config.json", '{"pad_token_id": true}', "config.json: pad_token_id is True"),
    ],
)  # fmt: skip
def test_damaged_files(directory, name, content, message):
    if name == "chat_template.json":
        write(directory, "tokenizer_config.json", chat_template=None)
    (directory / name).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises((TokenizerError, ChatTemplateError), match=message):
        load_tokenizer(directory)


def test_without_a_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json is missing"):
        load_tokenizer(tmp_path)


def test_text_that_is_no_unicode(directory):
    with pytest.raises(ValueError, match=r"lone surrogate, '\\ud800', at position 1"):
        load_tokenizer(directory).encode("a\ud800")


def step(kind, **fields):
    return {"type": kind, **fields}


def replace(old, new, kind="String"):
    return step("Replace", pattern={kind: old}, content=new)


def split(pattern):
    return step("Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)


def sequence(part, steps):
    return {part: step("Sequence", **{tokenizer_file.PARTS[part]: steps})}


WORDS = {"type": "WordLevel", "vocab": {"hello": 0}, "unk_token": "<unknown>"}
STRIP = step("Strip", content=BACKEND.id_to_token(50), start=0, stop=9)
BACKTRACKING = split(r"(?:a|a)*(?:\d|cz)")


@pytest.mark.parametrize(
    ("changes", "call", "message"),
    [
        ({"model": WORDS}, lambda t: t.encode("you"), r"fails on this text \(WordLevel error: Missing"),
        ({"pre_tokenizer": BACKTRACKING}, lambda t: t.encode("a" * 60 + "c1"), "fails on this text .*retry-limit"),
        ({"pre_tokenizer": step("FixedLength", length=0)}, lambda t: t.apply_chat_template(HELLO), "fails on this"),
        ({"decoder": replace("h", "x", "Regex")}, lambda t: t.decode(t.encode("hello")), None),
        ({"decoder": STRIP}, lambda t: t.decode([50]), "fails on these ids"),
        ({"decoder": STRIP}, lambda t: t.stream([50]), "fails on these ids"),
    ],
)
def test_what_the_library_cannot_do_names_the_file(directory, changes, call, message):
    """Neither a bare Exception nor Rust's panic, which is no Exception."""
    write(directory, "tokenizer.json", **changes)
    tokenizer = load_tokenizer(directory)
    if message is None:
        assert call(tokenizer)
        return
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json: the tokenizer {message}"):
        call(tokenizer)


def test_a_stream_that_failed_can_still_be_ended(directory):
    write(directory, "tokenizer.json", decoder=STRIP)
    decoder = load_tokenizer(directory).stream()
    with pytest.raises(TokenizerError, match="fails on these ids"):
        decoder.feed([50])
    assert decoder.flush() == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (sequence("normalizer", [replace("a", "aa")] * 40), "42 steps in all"),
        (sequence("normalizer", [replace("a", "aa")] * 20), "normalizer and pre_tokenizer: .* 1,048,576 times longer"),
        (sequence("normalizer", [sequence("normalizer", [replace("a", "a" * 20)])["normalizer"]] * 2), "400 times"),
        (sequence("normalizer", [replace("", "a")] * 9), "512 times"),
        (sequence("normalizer", [replace("x*", "a", "Regex")] * 9), "512 times"),
        (sequence("pre_tokenizer", [step("ByteLevel")] * 9), "512 times"),
        (sequence("decoder", [replace("a", "aa")] * 9), "decoder: .* 512 times"),
        ({"normalizer": step("Precompiled", precompiled_charsmap="AAAAAAA" + "x" * 4001)}, "times longer"),
        ({"normalizer": {"pattern": {"String": "a"}, "content": "aa"}}, "expected an object with a type"),
        ({"normalizer": ["Replace", {"String": "a"}, "aa"]}, "normalizer: .* expected an object with a type"),
        ({"normalizer": step("Sequence", normalizers=3)}, "expected the list of a sequence's steps"),
        ({"normalizer": step("Replace", pattern="a")}, "expected a pattern and a content"),
        ({"normalizer": step("Prepend", prepend="a" * 20_000)}, "a string of 20,000 characters"),
        ({"model": {**WORDS, "vocab": {"a" * 20_000: 0}}}, "a string of 20,000 characters"),
        ({"model": {**WORDS, "max_input_chars_per_word": 10**9}}, "max_input_chars_per_word: found 1000000000"),
        ({"model": 3}, "expected an object with a model"),
    ],
)  # fmt: skip
def test_a_tokenizer_out_of_bounds_is_refused_before_it_runs(directory, changes, message):
    # This token would be normalized when the file is loaded.
    added = {"id": 390, "content": "aaaaa", "normalized": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
    write(directory, "tokenizer.json", **{"pre_tokenizer": None, "added_tokens": [{**added, **flags}], **changes})
    with pytest.raises(TokenizerError, match=rf"tokenizer\.json: not a tokenizer that ling3 can read: .*{message}"):
        load_tokenizer(directory)


def test_a_huge_file_is_not_read(directory):
    with (directory / "tokenizer.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(TokenizerError, match="1,073,741,824 bytes"):
        load_tokenizer(directory)


def test_the_repr_is_short(directory):
    text = f"<Tokenizer of {directory}: {BACKEND.get_vocab_size()} tokens, a chat template>"
    assert repr(load_tokenizer(directory)) == text
    write(directory, "tokenizer_config.json", chat_template=None)
    assert repr(load_tokenizer(directory)).endswith("no chat template>")


def test_a_tokenizer_pickles(directory):
    tokenizer = load_tokenizer(directory)
    (directory / "tokenizer.json").unlink()
    again = pickle.loads(pickle.dumps(tokenizer))
    assert repr(again) == repr(tokenizer) and again.eos_token_ids == tokenizer.eos_token_ids
    ids = again.apply_chat_template(HELLO)
    assert ids == tokenizer.apply_chat_template(HELLO) and again.decode(ids) == tokenizer.decode(ids)


def test_a_tokens_bytes_are_its_own():
    """Joined, they are those of the text, also where a character has several tokens."""
    nano = load_tokenizer("nano")
    for text in ("aé😀b<|role_end|>", "\n\t  ñ", bytes(range(1, 128)).decode()):
        assert b"".join(map(nano.token_bytes, nano.encode(text, add_special_tokens=False))).decode() == text
    assert nano.token_bytes(nano.vocab_size + 5) == b""
    every = {nano.token_bytes(token) for token in range(nano.vocab_size)}
    assert all(bytes([byte]) in every for byte in range(256))


def test_bytes_of_a_vocabulary_with_blanks_and_fallback():
    vocabulary = {"<unk>": 0, "▁the": 1, "<0xC3>": 2, "<0xA9>": 3, "é": 4}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    replace = tokenizers.decoders.Replace("▁", " ")
    backend.decoder = tokenizers.decoders.Sequence([replace, tokenizers.decoders.ByteFallback()])
    own = TokenBytes(backend)
    assert [own[token] for token in (1, 2, 3, 4)] == [b" the", b"\xc3", b"\xa9", "é".encode()]
    backend.decoder = None
    assert TokenBytes(backend)[1] == "▁the".encode()
