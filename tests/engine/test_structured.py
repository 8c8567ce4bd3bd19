"""Structured output: what a grammar allows, in any company, and what it does not change for others."""

import asyncio
import collections
import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import (
    ALIGNED,
    CONFIG,
    ENDS,
    PAGES,
    PROMPTS,
    aligned_model,
    answer,
    crowd,
    engine,
    idle,
    model,
    tokenizer,
    without,
)

import ling3
from ling3.engine.forward import decode
from ling3.engine.grammars import LIMITS, Grammars
from ling3.engine.masks import bits, masked, masks_of_steps
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.structured import read, written
from ling3.serve import BESIDE

pytestmark = pytest.mark.thorough

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
KINDS = {
    "schema": ling3.JSONSchema(SCHEMA),
    "compact": ling3.JSONSchema(json.dumps(SCHEMA), compact=True),
    "regex": ling3.Regex("(ab|cd){2,4}[0-9]{3}"),
    "choice": ling3.Choice(["yes", "no", "perhaps", 'a "quoted\\\n" é😀']),
    "grammar": ling3.Grammar('start: "<" item ("," item)* ">"\nitem: /[a-c]{1,3}/ | "(" item ")"'),
    "parts": ling3.Grammar(
        'start: "x=" @x ";" @y',
        {
            "x": ling3.JSONSchema({"type": "integer", "minimum": 0, "maximum": 99}),
            "y": ling3.Grammar('start: "y=" @z', [("z", ling3.Choice(["a", "b"]))]),
        },
    ),
}


def holds(kind, text):
    """True if a text is one of a kind."""
    if kind in ("schema", "compact"):
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"] and 0 <= value["age"] <= 99 and len(value["name"]) <= 6
        assert set(value["tags"]) <= {"red", "green"} and len(value["tags"]) <= 2
        return kind == "schema" or text == json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if kind == "regex":
        return re.fullmatch(KINDS[kind].pattern, text) is not None
    if kind == "choice":
        return text in KINDS[kind].strings
    if kind == "parts":
        return re.fullmatch("x=[0-9]{1,2};y=[ab]", text) is not None
    return re.fullmatch(r"<[a-c(),]+>", text) is not None and text.count("(") == text.count(")")


def params(kind, **values):
    values = {"max_tokens": 120, "logprobs": 1, **values}
    return SamplingParams(structured=KINDS.get(kind, kind), **values)


def told(output):
    return [answer(completion) for completion in output.outputs]


MODELS = {"ragged": model, "aligned": aligned_model}
VOCABS = {"ragged": CONFIG.vocab_size, "aligned": ALIGNED.vocab_size}


@pytest.fixture(scope="module", params=MODELS)
def each(request):
    """An engine of either model: with a vocabulary of 400 tokens, and of 384, which is a multiple of 128."""
    return engine(MODELS[request.param]())


@pytest.fixture
def either(each):
    yield each
    assert idle(each)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_what_was_asked_for(either, kind):
    """Of a random model, greedy and drawn."""
    if kind == "grammar":  # nothing else ends it
        bias = dict.fromkeys(tokenizer().encode(">,"), 5.0)
        some = [params(kind, temperature=t, seed=i, logit_bias=bias) for i, t in enumerate([0.0, 1.0])]
    else:
        some = [params(kind, temperature=t, seed=i) for i, t in enumerate([0.0, 1.0, 1.5])]
    for output in either.generate([PROMPTS[0]] * len(some), some):
        assert (output.error, output.finish_reason) == (None, "stop")
        assert holds(kind, output.text), output.text
        assert tokenizer().decode([t for t in output.token_ids if t not in ENDS]) == output.text


def test_every_string_of_a_choice_can_come(either):
    """Of 64 draws with seeds of their own: without seeds one run in twenty would miss a string."""
    some = [params("choice", temperature=30.0, seed=i) for i in range(64)]
    found = collections.Counter(output.text for output in either.generate([[7 + i] for i in range(64)], some))
    assert set(found) == set(KINDS["choice"].strings)


# What a schema's strings and blanks are.


def rejected(structured, *texts):
    """Those of the texts that a grammar does not allow as a whole, byte by byte."""
    grammars, found = Grammars(tokenizer(), CONFIG.vocab_size, ENDS), []
    for text in texts:
        constraint = grammars.constraint(structured, ENDS)
        for byte in text if isinstance(text, bytes) else text.encode():
            token = tokenizer().backend.token_to_id(BYTES[byte])
            if constraint.forced:
                allowed = token == constraint.forced[0]
            else:
                allowed = bool(constraint.mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))
            if not allowed:
                break
            constraint.advance(token)
        else:
            if constraint.whole or constraint.mask[0] & 1:
                continue
        found.append(text)
    return found


def _bytes():
    """The tokenizer's character for each byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return {**{b: chr(b) for b in kept}, **{b: chr(256 + i) for i, b in enumerate(others)}}


BYTES = _bytes()


def test_json_has_no_white_space_that_goes_on_for_ever():
    free = ling3.JSONSchema({"type": "object", "additionalProperties": {"type": "integer"}})
    assert rejected(free, '{"a": 1, "b":2}', "{}", '{"a":1,"b": 2}') == []
    bad = ['{"a":  1}', '{ "a":1}', '{"a":1 }', '{"a":1,\n"b":2}', '{"a":1} ', ' {"a":1}', '{"a":\t1}']
    assert rejected(free, *bad) == bad
    tight = ling3.JSONSchema(free.schema, compact=True)
    assert rejected(tight, '{"a":1,"b":2}', '{"a": 1}', '{"a":1, "b":2}') == ['{"a": 1}', '{"a":1, "b":2}']


@pytest.mark.parametrize("structured", [ling3.JSONSchema({"type": "object"}), ling3.JSONObject()])
def test_json_strings_have_no_control_characters_and_no_halves(structured):
    good = ['{"a":"é😀\\n\\"\\\\"}', '{"\\t":[null,true,-1.5e3,{}]}']
    bad = [
        '{"a":"\n"}',
        '{"a":"\x00"}',
        '{"a":"\x7f"}',
        '{"a":"\\ud83d"}',
        '{"a":"\\uDE00x"}',
        b'{"a":"\xc3"}',
        b'{"a":"\xf0\x9f\x98"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\xff"}',
        "[]",
        '"a"',
    ]
    assert rejected(structured, *good, *bad) == bad


@pytest.mark.parametrize("vocab", VOCABS.values())
def test_special_tokens_are_no_text(vocab):
    """Also where the grammar allows any text: none of them is in a mask, but the ends where it may end."""
    constraint = Grammars(tokenizer(), vocab, ENDS).constraint(ling3.Regex(r"(?s:.*)"), ENDS)
    assert constraint.mask.shape == (-(-vocab // 32),)
    special = {i for i, token in tokenizer().backend.get_added_tokens_decoder().items() if token.special}
    allowed = np.flatnonzero(np.asarray(bits(jnp.asarray(constraint.mask)[None], vocab))[0])
    assert special and set(allowed) & special == set(ENDS) & special
    assert set(ENDS) <= set(allowed) < set(range(tokenizer().vocab_size)) | set(ENDS)


# The promise.

COMPANY = [
    (PROMPTS[0], params("schema")),
    (PROMPTS[1], SamplingParams(max_tokens=40, ignore_eos=True, logprobs=1)),
    (PROMPTS[1], params("compact", temperature=1.2, seed=3, n=2)),
    (PROMPTS[3], SamplingParams(max_tokens=40, temperature=1.0, seed=9, ignore_eos=True, logprobs=1)),
    (PROMPTS[2], params("regex", repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=5)),
    ([*PROMPTS[1][:33], 9], params("choice", temperature=2.0, seed=4, top_k=3)),
    (PROMPTS[4], params("regex", stop="c", temperature=1.0, seed=1)),
    (PROMPTS[3], params("grammar", max_tokens=30, temperature=0.7, top_p=0.9, seed=2)),
    (PROMPTS[5], params(ling3.JSONObject(), max_tokens=25)),
]


@pytest.fixture(scope="module")
def alone(each):
    """Each answer of an engine that serves nothing else and knows no prefix."""
    lonely = engine(each._loop.runner.model, prefix_cache=False)
    return [told(lonely.generate([prompt], own)[0]) for prompt, own in COMPANY]


def asked(served, some=COMPANY):
    return [told(output) for output in served.generate([p for p, _ in some], [own for _, own in some])]


def test_different_grammars_in_one_batch_and_rows_without(either, alone):
    assert asked(either) == alone
    assert asked(either) == alone  # the prompts' prefixes are known now
    assert either.stats().cached_tokens > 0
    assert [
        told(output) for output in either.generate([p for p, _ in COMPANY[::-1]], [own for _, own in COMPANY[::-1]])
    ] == alone[::-1]


def test_preemption_changes_nothing(each, alone):
    """Pages for two long sequences; a sequence with a grammar is swapped out and goes on where it was."""
    crowded = engine(each._loop.runner.model)
    crowd(crowded, pages=12)
    long = [(prompt, ling3.SamplingParams(max_tokens=100, ignore_eos=True)) for prompt in PROMPTS[:2]]
    swapped, swap_out = [], crowded._loop.runner.swap_out

    def noted(sequence):
        swapped.append(sequence.constraint is not None and len(sequence.token_ids) > 0)
        return swap_out(sequence)

    crowded._loop.runner.swap_out = noted
    assert asked(crowded, [*long, *COMPANY])[2:] == alone
    assert any(swapped)


@pytest.mark.parametrize("changes", [{"overlap": False}, {"decode_steps": 1}])
def test_how_steps_are_dealt_changes_nothing(each, alone, changes):
    """Forced tokens one by one give the same bits as several in a call."""
    assert asked(engine(each._loop.runner.model, **changes)) == alone


def test_forced_tokens_are_several_of_a_call(either):
    before = either.stats()
    (output,) = either.generate([PROMPTS[0]], params("compact"))
    calls = either.stats().decode_calls - before.decode_calls
    assert len(output.token_ids) > 25 and calls <= len(output.token_ids) // 2
    assert all(own.logprob <= 0 and len(own.top) == 1 for own in output.logprobs)


def test_others_go_on_beside_a_grammar(served, monkeypatch):
    """They are in no call with masks, their calls have several steps, and none waits for the host."""
    seen, runner = [], served._loop.runner
    decode_them = runner.decode

    def noted(batch, rows, sequences):
        masked = {sequence.constraint is not None for sequence in sequences}
        assert masked == {batch.masks is not None}
        seen.append((*masked, batch.lengths.max(), sequences[0].ahead))
        return decode_them(batch, rows, sequences)

    monkeypatch.setattr(runner, "decode", noted)
    served.generate(PROMPTS[:2], [params("schema"), SamplingParams(max_tokens=60, ignore_eos=True)])
    free, constrained = ([call for call in seen if call[0] is masked] for masked in (False, True))
    assert max(steps for _, steps, _ in free) == BESIDE
    assert any(ahead > 0 for *_, ahead in free) and constrained and not any(ahead for *_, ahead in constrained)


# Ends.


def test_the_models_ends_end_it_where_the_grammar_may_end(either):
    open_ended = ling3.Regex("a{3,200}")
    for end in ENDS:
        (output,) = either.generate([PROMPTS[0]], params(open_ended, logit_bias={end: 1e6}))
        assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == ("aaa", "stop", end)
        assert output.token_ids[-1] == end
        (output,) = either.generate([PROMPTS[0]], params(open_ended, logit_bias={end: 1e6}, min_tokens=7))
        assert (len(output.token_ids), output.token_ids[-1]) == (8, end)
        own = params(open_ended, logit_bias={end: 1e6}, max_tokens=12, ignore_eos=True)
        (output,) = either.generate([PROMPTS[0]], own)
        assert (output.text, output.finish_reason) == ("a" * 12, "length")
    own = params(open_ended, logit_bias={350: 1e6}, stop_token_ids=[350], ignore_eos=True)
    (output,) = either.generate([PROMPTS[0]], own)
    assert (output.text, output.outputs[0].stop_reason) == ("aaa", 350)


def test_a_text_ends_where_nothing_can_follow(either):
    for values in ({}, {"ignore_eos": True}, {"min_tokens": 50}, {"max_tokens": 3}):
        (output,) = either.generate([PROMPTS[0]], params(ling3.Regex("abc"), **values))
        assert (output.text, output.finish_reason) == ("abc", "stop")
        assert output.outputs[0].stop_reason is None and len(output.token_ids) == 3


def test_stop_strings_and_lengths(either):
    (output,) = either.generate([PROMPTS[0]], params(ling3.Regex("a{50}b"), stop="aaaa", min_tokens=9))
    assert (output.text, output.outputs[0].stop_reason, len(output.token_ids)) == ("a" * 5, "aaaa", 9)
    (output,) = either.generate([PROMPTS[0]], params(ling3.Regex("a{50}b"), max_tokens=10))
    assert (output.text, output.finish_reason) == ("a" * 10, "length")


def test_several_completions_have_their_own_places(either):
    (output,) = either.generate([PROMPTS[0]], params("compact", temperature=3.0, seed=5, n=6))
    texts = [completion.text for completion in output.outputs]
    assert all(holds("compact", text) for text in texts) and len(set(texts)) > 3


# Errors are the request's.


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        (ling3.Regex("a("), "the Regex does not compile: .*unclosed group"),
        (ling3.Regex("(?=a)b"), "the Regex does not compile: .*look-around"),
        (ling3.Regex("()"), "the Regex allows no text but the empty one"),
        (ling3.Regex(r"[^\s\S]"), "the Regex cannot be used: no token can follow"),
        (ling3.Grammar("start: foo"), 'the Grammar does not compile: .*unknown name: "foo"'),
        (ling3.Grammar("begin: /a/"), "no start rule"),
        (ling3.Grammar('start: "a" start'), "the Grammar cannot be used: .*Too many items"),
        (ling3.Grammar("start: @a", {"b": ling3.Regex("b")}), "the Grammar does not compile: .*unknown grammar"),
        (
            ling3.Grammar("start: @a", {"a": ling3.Grammar("start: @a", {"a": ling3.Regex("a")})}),
            "the Grammar does not compile: several parts have the name a",
        ),
        (ling3.JSONSchema({"type": "foo"}), "the JSONSchema does not compile: Invalid type: foo"),
        (ling3.JSONSchema({"not": {"type": "string"}}), r"Unimplemented keys: \[\"not\"\]"),
        (ling3.JSONSchema({"$ref": "http://elsewhere/schema"}), "does not compile: .*elsewhere"),
    ],
)
def test_a_grammar_that_is_none_is_refused(served, structured, message):
    with pytest.raises(ValueError, match=f"structured: .*{message}"):
        served.submit(PROMPTS[0], params(structured))


@pytest.mark.parametrize(
    "structured",
    [
        ling3.Regex("(a{0,1000}b{0,1000}){0,1000}c" * 20),
        ling3.Regex("(.*a.*b.*c){900}"),
        ling3.JSONSchema(
            {
                "anyOf": [
                    {"properties": {f"{i}.{j}": {"type": "string"} for j in range(9)}, "required": [f"{i}.0"]}
                    for i in range(300)
                ]
            }
        ),
        ling3.Grammar(
            "start: "
            + " | ".join(f"x{i}" for i in range(3000))
            + "".join(f'\nx{i}: "{i}" start | ' for i in range(3000))
        ),
    ],
)
def test_a_hostile_grammar_costs_no_more_than_its_limits(served, structured):
    """It fails, or it runs: in either case others get their answers."""
    (plain,) = served.generate([PROMPTS[1]], SamplingParams(max_tokens=20, ignore_eos=True))
    try:
        outputs = served.generate(
            [PROMPTS[0], PROMPTS[1]],
            [params(structured, max_tokens=12), SamplingParams(max_tokens=20, ignore_eos=True)],
        )
    except ValueError as error:
        assert re.match("structured: the .* (cannot be used|does not compile): ", str(error)) and len(str(error)) < 700
        return
    assert outputs[0].finish_reason in ("length", "stop", "error") and told(outputs[1]) == told(plain)


def test_others_go_on_beside_a_grammar_that_crashes_the_compiler(either, alone):
    """It is refused where it is submitted, and no bit of a request under way changes."""
    number, ends = either.submit(*COMPANY[1]), []
    either.step()
    chained = "".join(f'\nT{i}: "x" T{i + 1}' for i in range(3000))
    with pytest.raises(ValueError, match="structured: the Grammar cannot be used: it is nested too deeply"):
        either.submit(PROMPTS[0], params(ling3.Grammar(f'start: T0{chained}\nT3000: "a"')))
    while either.has_work:
        ends += [delta.output for delta in either.step() if delta.output is not None]
    assert [output.request_id for output in ends] == [number] and told(ends[0]) == alone[1]


def test_a_grammar_that_takes_long_holds_no_event_loop(served):
    """`astream` has it compiled in another thread."""
    heavy = ling3.Grammar("start: T\nT: /.*a/" + "".join(f" & /.*b{i}.*/" for i in range(300)))
    beats = 0

    async def beat():
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    async def ask():
        pulse = asyncio.create_task(beat())
        try:
            with pytest.raises(ValueError, match="structured: the Grammar cannot be used: it takes more than"):
                await anext(served.astream(PROMPTS[0], params(heavy)))
        finally:
            pulse.cancel()

    asyncio.run(ask())
    assert beats > 5


def test_the_limits_are_llguidances(monkeypatch, served):
    """A grammar that runs in them fails in smaller ones: at the submission, or in the middle, for itself alone."""
    (plain,) = served.generate([PROMPTS[1]], SamplingParams(max_tokens=20, ignore_eos=True))
    nested = ling3.Grammar('start: s\ns: s s | "a" | "b"')
    assert served.generate([PROMPTS[0]], params(nested, max_tokens=20))[0].error is None
    monkeypatch.setitem(LIMITS, "step_max_items", 60)
    low = engine()
    failed, beside = low.generate(
        PROMPTS[:2], [params(nested, max_tokens=60, ignore_eos=True), SamplingParams(max_tokens=20, ignore_eos=True)]
    )
    assert failed.finish_reason == "error" and 0 < len(failed.token_ids) < 60
    assert re.match(r"the grammar failed after \d+ tokens of the output: .*Too many items", failed.error)
    assert told(beside) == told(plain) and idle(low)


def test_a_grammar_that_leaves_no_token_ends_in_error(served):
    """Where every end is struck out, and where a forced token is one."""
    ends = tokenizer().encode("b")
    with pytest.raises(ValueError, match=r"after 1 tokens of .* leaves no token .* min_tokens is 4"):
        served.submit(PROMPTS[0], params(ling3.Regex("abc?d?e?f?"), stop_token_ids=ends, min_tokens=4))
    late = params(ling3.Regex("[xy]bc?d?e?f?"), stop_token_ids=ends, min_tokens=4)
    (output,) = served.generate([PROMPTS[0]], late)
    assert output.finish_reason == "error" and output.text in ("x", "y")
    assert (
        output.error
        == "after 1 tokens of the output the grammar leaves no token that is not an end, and min_tokens is 4"
    )


class Broken:
    """A matcher of llguidance's of which one method raises."""

    def __init__(self, matcher, method, error):
        self.matcher, self.method, self.error = matcher, method, error

    def deep_copy(self):
        return Broken(self.matcher.deep_copy(), self.method, self.error)

    def __getattr__(self, name):
        if name == self.method:
            raise self.error
        return getattr(self.matcher, name)


class Panic(BaseException):
    """As Rust's panics come to Python: no Exception."""


@pytest.mark.parametrize("error", [RuntimeError("broken"), Panic("broken")], ids=["error", "panic"])
@pytest.mark.parametrize(
    "method", ["compute_bitmask", "consume_token", "consume_tokens", "compute_ff_tokens", "is_accepting"]
)
def test_a_fault_in_one_grammar_ends_its_request_alone(either, alone, monkeypatch, method, error):
    """In its mask, in what is forced, and where a token goes in: all others have the same bits."""
    grammars = either._intake._grammars
    compiled = type(grammars).constraint

    def breaking(structured, ends):
        constraint = compiled(grammars, structured, ends)
        if structured == KINDS["parts"]:
            constraint._matcher = Broken(constraint._matcher, method, error)
        return constraint

    monkeypatch.setattr(grammars, "constraint", breaking)
    company = [COMPANY[1], (PROMPTS[0], params("parts")), COMPANY[2], COMPANY[4]]
    outputs = either.generate([prompt for prompt, _ in company], [own for _, own in company])
    failed = outputs.pop(1)
    assert failed.finish_reason == "error" and failed.text.startswith("x=")
    assert re.fullmatch(r"the grammar failed after \d+ tokens of the output: \w+\('broken'\)", failed.error)
    assert [told(output) for output in outputs] == [alone[1], alone[2], alone[4]]


def test_a_mask_too_narrow_is_its_requests_fault(either, monkeypatch):
    """It is found before the device gets it with those of other requests."""
    (plain,) = either.generate([PROMPTS[1]], SamplingParams(max_tokens=20, ignore_eos=True))
    grammars = either._intake._grammars
    constraint = grammars.constraint(KINDS["regex"], ENDS)
    constraint._ends = np.zeros(99, np.uint32)
    monkeypatch.setattr(grammars, "constraint", lambda structured, ends: constraint)
    failed, beside = either.generate(PROMPTS[:2], [params("regex"), SamplingParams(max_tokens=20, ignore_eos=True)])
    assert re.match(r"the grammar failed .*'a mask of 1[23] words, expected 99", failed.error)
    assert told(beside) == told(plain)


def test_a_fault_amid_the_tokens_of_a_row_is_its_own(either, alone, monkeypatch):
    """In its text, for instance, whose decoder is then not asked again."""
    made, requests = [], either._intake.requests

    def noted(*args):
        made.extend(requests(*args))

        def fails(tokens):
            raise RuntimeError("broken")

        monkeypatch.setattr(made[0].sequences[0].decoder, "feed", fails)
        return made

    monkeypatch.setattr(either._intake, "requests", noted)
    failed, *others = asked(either, [(PROMPTS[0], SamplingParams(max_tokens=9)), *COMPANY[1:3]])
    assert made[0].output().error == "its tokens could not be read: RuntimeError('broken')"
    assert failed[0][3] == "error" and others == alone[1:3]


def test_an_engine_without_a_tokenizer_or_masks_refuses_it():
    with pytest.raises(ValueError, match="structured: a grammar needs a tokenizer"):
        engine(text=False).submit(PROMPTS[0], params("regex"))
    with pytest.raises(ValueError, match="structured is not None, and the forward passes of this engine"):
        without("masks").submit(PROMPTS[0], params("regex"))


def test_without_llguidance_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"structured: llguidance is missing: pip install 'ling3\[structured\]'"):
        engine().submit(PROMPTS[0], params("regex"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ling3.JSONSchema("{"), "the JSON schema is '{', expected JSON"),
        (lambda: ling3.JSONSchema([1]), r"the JSON schema is \[1\], expected an object"),
        (lambda: ling3.JSONSchema({"a": {1, 2}}), "expected JSON"),
        (lambda: ling3.JSONSchema({"a": float("nan")}), "expected JSON"),
        (lambda: ling3.JSONSchema("[" * 10**5), "more than 64 levels"),
        (lambda: ling3.JSONSchema('{"a":' * 100 + "1" + "}" * 100), "more than 64 levels"),
        (lambda: ling3.JSONSchema({}, compact=1), "compact is 1, expected True or False"),
        (lambda: ling3.JSONObject(compact=None), "compact is None"),
        (lambda: ling3.Regex(""), "the regex is '', expected a text that is not empty"),
        (lambda: ling3.Regex(b"a"), "the regex is b'a'"),
        (lambda: ling3.Regex("a\ud800"), "lone surrogate at position 1"),
        (lambda: ling3.Grammar("x" * 2**19), "the grammar has 524288 characters, expected at most 262144"),
        (lambda: ling3.Grammar("start: @A", {"A": ling3.Regex("a")}), "the grammar has a part 'A', expected a name"),
        (lambda: ling3.Grammar("start: @a", {"a": "b"}), "the grammar's part a is 'b', expected a JSONSchema, a"),
        (lambda: ling3.Choice([]), r"the choice is \[\], expected a list of strings"),
        (lambda: ling3.Choice("ab"), "the choice is 'ab'"),
        (lambda: ling3.Choice(["a", ""]), "the choice is"),
        (lambda: ling3.Choice(["a"] * 5000), "the choice has 5000 strings, expected at most 4096"),
        (
            lambda: SamplingParams(structured={"type": "object"}),
            "structured is .*, expected a JSONSchema, a JSONObject",
        ),
        (lambda: SamplingParams(structured=ling3.JSONObject), "structured is"),
        (
            lambda: SamplingParams(structured=ling3.JSONObject(), max_tokens=0, prompt_logprobs=0),
            "structured is a JSONObject, which needs max_tokens >= 1",
        ),
    ],
)
def test_senseless_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schema_is_the_callers_to_change():
    mine = {"type": "object", "properties": {"a": {"type": "string"}}}
    kept = ling3.JSONSchema(mine)
    mine["properties"]["a"]["type"] = "foo"
    assert json.loads(kept.schema)["properties"]["a"] == {"type": "string"}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_reads_the_same(kind):
    """As the first process of several tells it to the others."""
    assert read(json.loads(json.dumps(written(KINDS[kind])))) == KINDS[kind]
    assert read(written(None)) is None


# Masks.


def test_masks_have_a_bit_for_each_token():
    draw = np.random.default_rng(0)
    allowed = draw.integers(0, 2**32, (3, 4), dtype=np.uint32)
    expected = np.array([[allowed[b, t // 32] >> np.uint32(t % 32) & 1 for t in range(100)] for b in range(3)])
    np.testing.assert_array_equal(np.asarray(bits(jnp.asarray(allowed), 100)), expected.astype(bool))
    logits = jnp.asarray(draw.normal(size=(3, 100)), jnp.float32)
    np.testing.assert_array_equal(masked(logits, jnp.asarray(allowed)), np.where(expected, logits, -np.inf))


def test_a_forced_token_is_the_only_one_of_its_step():
    forced, allowed = jnp.asarray([[-1, -1, -1], [64, 99, -1]], jnp.int32), jnp.full((2, 4), 7, jnp.uint32)
    masks = masks_of_steps(forced, allowed, jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (len(forced), 3)))
    steps = [np.asarray(bits(masks[:, i], 100)) for i in range(3)]
    mask = [0, 1, 2, 32, 33, 34, 64, 65, 66, 96, 97, 98]
    assert [[np.flatnonzero(row).tolist() for row in step] for step in steps] == [
        [mask, [64]],
        [mask, [99]],
        [mask] * 2,
    ]


@pytest.mark.slow
def test_warm_it_compiles_nothing():
    cold = engine(num_pages=PAGES + 3)  # shapes that no other test has
    cold.warmup()
    programs, decodes = cold._loop.runner.programs, decode._cache_size()
    cold.warmup(also=("structured",))
    assert decode._cache_size() == decodes + 1 and cold._loop.runner.programs == programs + 1
    cold.generate(PROMPTS[:2], [params("schema"), SamplingParams(max_tokens=5)])
    assert cold._loop.runner.programs == programs + 1
