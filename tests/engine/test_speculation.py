"""Speculation: answers keep their bits whatever is guessed, in every family that can go back behind a wrong guess."""

import contextlib
import dataclasses
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively
from native_kernels import installed, needs_compiler
from promised_requests import SETTINGS as CROWDED
from promised_requests import answer, requests
from promised_requests import answers as promised_answers
from tiny import FLASH, TINY, UNBOUNDED
from tiny import open_model as open_ling3
from tiny_transformers import CASES
from tiny_transformers import open_model as open_transformer

import ling3
from ling3.cache import Span
from ling3.engine import sampling
from ling3.engine.forward import Programs
from ling3.engine.settings import EngineSettings
from ling3.engine.shapes import DraftShapes, Shapes
from ling3.engine.speculation import Speculation, check_drafts, fitting, lookup
from ling3.engine.speculator import Speculator
from ling3.execution import PLAIN
from ling3.mesh import plan
from ling3.mtp import predicted

SIZES = {"max_running_requests": 4, "num_pages": 24, "page_size": 16, "chunked_prefill_size": 32, "max_model_len": 128}
SETTINGS = {**SIZES, "token_paddings": (16, 32), "decode_rows": 8, "decode_steps": 4}
LING3 = {"tiny": TINY, "flash": FLASH, "unbounded": UNBOUNDED}
TEXT = list(range(10, 30))
PROMPTS = [[3, *TEXT], [4, *TEXT, 40, *TEXT[:8]], [5, *TEXT[:3]]]
PARAMS = [
    ling3.SamplingParams(max_tokens=20, ignore_eos=True, logprobs=2, temperature=heat, seed=i)
    for i, heat in enumerate((0.0, 1.0, 0.7))
]


def whole_programs(test):
    """Marks a test of last bits as one of programs with all optimizations, which decide how XLA rounds."""
    return pytest.mark.slow(pytest.mark.optimized(test))


@pytest.fixture
def always(monkeypatch):
    """Guesses are checked whether that pays or not."""
    monkeypatch.setattr(Speculator, "depth", lambda own, _, chances: own.sizes.each if chances else 0)
    monkeypatch.setattr(Speculator, "measured", True)


def answers(model, **changes):
    engine = ling3.Engine(model, None, **{**SETTINGS, **changes})
    outputs = [output.outputs[0] for output in engine.generate(PROMPTS, PARAMS)]
    return [(own.token_ids, own.logprobs) for own in outputs], outputs


def knowing(found, wrong):
    """Guesses that are right but for the last `wrong` of each three."""
    whole = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, found, strict=True)]

    def guess(tokens):
        [after] = [each[len(tokens) :] for each in whole if each[: len(tokens)] == tokens]
        return [token if i % 4 < 3 - wrong or i % 4 == 3 else token + 1 for i, token in enumerate(after)]

    return guess


def bits_are_kept(model):
    expected, _ = answers(model)
    for wrong in range(4):
        got, outputs = answers(model, speculation=knowing(expected, wrong))
        assert got == expected
        accepted = sum(own.accepted_tokens for own in outputs)
        assert (accepted > 0) == (wrong < 3) and sum(own.drafted_tokens for own in outputs) > accepted * (wrong > 0)
    assert answers(model, speculation="lookup")[0] == expected


@whole_programs
@needs_compiler
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", exhaustively(LING3, but=["tiny"]))
def test_ling3_keeps_its_bits_on_the_kernels(name, monkeypatch):
    monkeypatch.setattr(sampling, "MANY", 0)
    with installed():
        bits_are_kept(open_ling3(LING3[name]))


def partly_right(known):
    """Guesses the tokens that follow in one of the known texts; as many as their sum says are right."""

    def guess(tokens):
        after = next((each[len(tokens) :][:9] for each in known if each[: len(tokens)] == tokens), [])
        return [token if i < sum(tokens) % 10 else token + 1 for i, token in enumerate(after)]

    return guess


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("always")
def test_in_company(monkeypatch):
    """All kinds of requests, with few pages, so that some are preempted, and prefixes that they share."""
    monkeypatch.setattr(sampling, "MANY", 0)
    with installed():
        model = open_ling3()
        plain = ling3.Engine(model, None, **CROWDED)
        expected = promised_answers(requests(), plain)
        known = [[*prompt, *own[0]] for (prompt, _), each in zip(requests(), expected, strict=True) for own in each]
        engine = ling3.Engine(model, None, **{**CROWDED, "num_pages": 20}, speculation=partly_right(known))
        for _ in range(2):
            assert promised_answers(requests(), engine) == expected
        assert engine.stats().preemptions > 0 and engine.stats().cached_tokens > 0


ROUNDS = 48
"""Of 24 requests each; those of nine models are 10,368."""


@whole_programs
@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", [*LING3, *CASES, "nano"])
def test_drawn_requests(name, monkeypatch):
    """Thousands of requests of every kind, in company, with preemption and known prefixes; guesses of every quality."""
    monkeypatch.setattr(sampling, "MANY", 0)
    with contextlib.nullcontext() if name in CASES else installed():
        model = ling3.load("nano", dtype=jnp.float32) if name == "nano" else None
        model = model or (open_transformer(name) if name in CASES else open_ling3(LING3[name]))
        known: list[list[int]] = []
        plain = ling3.Engine(model, None, **CROWDED)
        engine = ling3.Engine(model, None, **{**CROWDED, "num_pages": 20}, speculation=partly_right(known))
        for seed in range(ROUNDS):
            asked = requests(seed, min(96, model.config.vocab_size))
            expected = promised_answers(asked, plain)
            known[:] = [[*prompt, *own[0]] for (prompt, _), each in zip(asked, expected, strict=True) for own in each]
            assert promised_answers(asked, engine) == expected, f"round {seed}"
        assert engine.stats().preemptions > 0 and engine.stats().cached_tokens > 0
        assert engine.stats().accepted_tokens > ROUNDS * 24


def test_it_is_refused_where_bits_were_not_compared(monkeypatch):
    with pytest.raises(ValueError, match="batch_invariant is False, expected True with speculation"):
        EngineSettings(speculation="lookup", batch_invariant=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ValueError, match="speculation on gpu: only on a CPU is it known"):
        check_drafts(open_transformer("qwen3"), PLAIN, mtp=False)


def test_programs_without_drafts_are_refused():
    programs = Programs(parts=frozenset())
    with pytest.raises(ValueError, match="speculation: the forward programs of this engine take no drafts"):
        ling3.Engine(open_transformer("qwen3"), None, **SETTINGS, programs=programs, speculation="lookup")


@whole_programs
@pytest.mark.usefixtures("always")
def test_on_a_mesh():
    """Slots and heads are shared out to four devices, and each group of devices checks the guesses of its sequences."""
    model = open_transformer("qwen3")
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[:4])
    bits_are_kept(plan(model, mesh).model(model, jax.tree.leaves(model)))


def test_without_kdas_kernel_it_is_refused():
    """The last bits of its plain form depend on how XLA fuses it with the program around it."""
    with pytest.raises(ValueError, match=r"speculation: KDA keeps the bits of single steps only in its C\+\+ kernel"):
        ling3.Engine(open_ling3(), None, **SETTINGS, speculation="lookup")


@whole_programs
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", exhaustively(CASES, but=["mistral"]))
def test_transformers_keep_their_bits(name):
    bits_are_kept(open_transformer(name))


@pytest.mark.thorough
@pytest.mark.usefixtures("always")
def test_right_guesses_take_fewer_passes():
    """20 tokens: four in each of five passes, of which one call of at most 16 tokens makes four."""
    expected, _ = answers(open_transformer("qwen3"))
    engine = ling3.Engine(open_transformer("qwen3"), None, **SETTINGS, speculation=knowing(expected, 0))
    [output] = engine.generate(PROMPTS[:1], PARAMS[:1])
    assert (output.outputs[0].drafted_tokens, output.outputs[0].accepted_tokens) == (15, 15)
    assert engine.stats().decode_calls == 2


def test_lookup_finds_the_last_place():
    assert lookup([1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4])[:9] == [5, 6, 9, 1, 2, 3, 4, 5, 6]
    assert lookup([1, 2, 3, 4, 5, 1, 2, 3, 4, 6, 1, 2, 3, 4])[:6] == [6, 1, 2, 3, 4, 6]
    assert set(lookup([1, 1, 1, 1, 1, 1])) == {1}
    for tokens in ([], [1], [1, 2, 3, 4], [2, 3, 4, 5, 1, 3, 4, 5]):
        assert not lookup(tokens)
    draw = np.random.default_rng(0)
    for _ in range(200):
        tokens = draw.integers(0, 3, size=int(draw.integers(5, 60))).tolist()
        places = [i for i in range(len(tokens) - 4) if tokens[i : i + 4] == tokens[-4:]]
        again = [*tokens[places[-1] + 4 :]] if places else []
        assert list(lookup(tokens)) == [again[i % len(again)] for i in range(256 if places else 0)]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("guess", [lambda tokens: 1 / 0, lambda tokens: ["a"], lambda tokens: 7, lambda tokens: [1.5]])
def test_a_bad_guess_ends_its_request_alone(guess):
    def only_second(tokens):
        return guess(tokens) if tokens[0] == 4 else []

    expected, _ = answers(open_transformer("qwen3"))
    got, outputs = answers(open_transformer("qwen3"), speculation=only_second)
    assert [got[0], got[2]] == [expected[0], expected[2]]
    assert outputs[1].finish_reason == "error" and "speculation" in outputs[1].error


@pytest.mark.usefixtures("always")
def test_guesses_outside_the_vocabulary_are_wrong():
    expected, _ = answers(open_transformer("qwen3"))
    assert answers(open_transformer("qwen3"), speculation=lambda tokens: [10**12, -1, 3])[0] == expected


CALLS = Shapes(4, 24, 16, 8, (32,), (8,), drafts=DraftShapes(sequences=2, each=3, tokens=16, mtp=False))


def predicted_turns(right, count=300, running=1):
    """For each turn of guesses by the model, whether a pass checked some."""
    calls = dataclasses.replace(CALLS, drafts=dataclasses.replace(CALLS.drafts, mtp=True))
    speculator, found = Speculator(calls, alike=True), []
    speculations = [Speculation("mtp", 3, 15, 96) for _ in range(running)]
    for _ in range(count):
        checked = False
        if speculator.begin([]):
            for each in speculations:
                each.guess([0] * 50, 9)
            checked = speculator.choose(speculations)
        for each in speculations if checked else ():
            each.learn(3, right, int(right < 3), (0, ()))
        found.append(checked)
    return found


def test_a_layer_that_is_mostly_wrong_is_checked_ever_less():
    assert predicted_turns(3) == [True] * 300
    wrong = predicted_turns(0)
    assert all(wrong[:2]) and 1 <= sum(wrong[100:]) <= 8


def test_a_layer_that_does_not_pay_is_tried_again_once_in_many_turns():
    """In turns that begin while calls are in flight: the sequences wait for these only in a turn that tries."""
    calls = dataclasses.replace(CALLS, drafts=dataclasses.replace(CALLS.drafts, mtp=True))
    speculator, speculation, tried = Speculator(calls, alike=True), Speculation("mtp", 3, 15, 96), []
    running = [types.SimpleNamespace(speculation=speculation, decoding=True, left=9, synchronous=False, ahead=4)]
    for _ in range(20):
        speculation.learn(3, 0, 1, (0, ()))
    for turn in range(100):
        if speculator.begin(running):
            speculation.guess([0] * 50, 9)
            assert speculator.choose([speculation]) and speculation.depth > 0
            speculation.learn(3, 0, 1, (0, ()))
            tried.append(turn)
    assert tried == [32, 65, 98]


def test_passes_that_cannot_pay_are_not_made():
    """Eight sequences take four calls of passes, each at least as long as the one call of a step."""
    assert predicted_turns(3, running=2) == [True] * 300
    assert predicted_turns(3, running=8) == [False] * 300


def test_foreseen_tokens_are_compared_with_those_that_came():
    calls = []

    def guess(tokens):
        calls.append(len(tokens))
        return [7] * 6 if tokens[-1] == 7 else []

    speculation = Speculation(guess, 3, 15, 96)
    speculation.foresee([1, 7])
    assert speculation.foresees and speculation.chance == 0.8
    speculation.foresee([1, 7])  # no new tokens
    speculation.foresee([1, 7, 7, 7, 7, 7])
    assert calls == [2] and speculation.chance > 0.85
    speculation.foresee([1, 7, 7, 7, 7, 7, 7, 3, 3])
    assert calls == [2, 9] and not speculation.foresees and speculation.chance < 0.8
    assert (speculation.drafted, speculation.accepted) == (0, 0)


def test_sequences_that_could_guess_only_wrongly_never_wait():
    """Guesses are made while the device works, and as none of them was right, no call waits for them."""
    expected, _ = answers(open_transformer("qwen3"))
    whole = [[*prompt, *tokens] for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True)]

    def wrong(tokens):
        [after] = [each[len(tokens) :] for each in whole if each[: len(tokens)] == tokens]
        return [token ^ 1 for token in after]

    engine = ling3.Engine(open_transformer("qwen3"), None, **SETTINGS, speculation=wrong)
    [output] = engine.generate(PROMPTS[:1], PARAMS[:1])
    assert (output.outputs[0].drafted_tokens, output.outputs[0].accepted_tokens) == (0, 0)


def test_how_many_guesses_pay():
    """With measured times: a pass of four rows as long as one step, or longer."""
    for seconds, expected in ((1.0, 3), (1.6, 3), (5.0, 0)):
        speculator = Speculator(CALLS)
        speculator._steps[1].extend([1.0] * 3)
        speculator._passes[4, 1].extend([seconds] * 3)
        speculator._passes[4, 4].extend([4 * seconds] * 3)
        assert speculator.depth(1, [0.7]) == expected
        assert not speculator.depth(1, [])
        assert bool(speculator.depth(1, [0.01])) == (seconds == 1.0)
    speculator._passes[2, 1].extend([1.2] * 3)
    speculator._passes[2, 4].extend([4.8] * 3)
    assert speculator.depth(1, [0.7]) == 1


def test_before_passes_are_measured_they_count_as_steps_with_as_many_rows():
    speculator = Speculator(CALLS)
    assert speculator.depth(1, [1.0]) == 0  # not even steps were measured
    speculator._steps[1].extend([1.0] * 3)
    assert speculator.depth(1, [0.7]) == 3
    speculator._passes[4, 1].extend([7.6] * 3)  # 6.0 of them for the host
    assert speculator.depth(1, [0.7]) == 0
    assert speculator.depth(1, [1.0]) == 3


def test_the_hosts_part_counts_once_a_call():
    """Calls of one and of four passes that take 4 + 2 · passes: good guesses pay, of which many passes are made."""
    speculator = Speculator(CALLS)
    speculator._steps[1].extend([1.0] * 3)
    speculator._passes[4, 1].extend([6.0, 7.0, 9.0])
    speculator._passes[4, 4].extend([13.0, 12.0])
    assert speculator.depth(1, [0.7]) == 0
    assert speculator.depth(1, [0.99]) == 3


def test_rows_are_shared_out():
    assert [fitting(3, rows) for rows in (16, 8, 6, 2, 64)] == [3, 3, 2, 1, 3]
    with pytest.raises(ValueError, match="decode_rows 5: found no number of draft_tokens up to 3"):
        fitting(3, 5)


def test_what_is_no_speculation_is_refused():
    for value in ("mtp2", 3):
        with pytest.raises(ValueError, match="expected None, 'lookup', 'mtp' or a function of the tokens so far"):
            EngineSettings(speculation=value)


def predicting():
    """A random model with a multi-token-prediction layer."""
    return ling3.init(dataclasses.replace(TINY, num_nextn_predict_layers=1), key=jax.random.key(3), mtp=True)


@eqx.filter_jit
def by_whole_sequences(model, tokens, length):
    """The layer's three guesses after the first `length` tokens, each from its hidden states of all tokens so far."""
    span = Span.whole(1, tokens.shape[1] - 1)
    hidden, _ = model.model(tokens, (None,) * len(model.model.attentions), Span.whole(1, tokens.shape[1]))
    hidden, found = hidden[:, :-1], []
    for at in range(3):
        y, _ = predicted(model, model.mtp[0], hidden, None, dataclasses.replace(span, tokens=tokens[:, 1:]))
        newest = y[:, length + at - 2]
        found.append(model.logits(newest[:, None])[0, 0].argmax().astype(jnp.int32))
        tokens, hidden = tokens.at[:, length + at].set(found[-1]), hidden.at[:, length + at - 1].set(newest)
    return jnp.stack(found)


@whole_programs
@needs_compiler
@pytest.mark.usefixtures("always")
def test_the_models_own_layer_guesses(monkeypatch):
    """Its guesses are those from whole sequences, whatever calls brought the tokens; the bits are those without."""
    learned, learn = [], Speculation.learn

    def noted(self, *counts):
        learned.append(counts[-1])
        learn(self, *counts)

    monkeypatch.setattr(Speculation, "learn", noted)
    monkeypatch.setattr(sampling, "MANY", 0)
    with installed():
        model = predicting()
        expected, _ = answers(model)
        got, outputs = answers(model, speculation="mtp", decode_steps=2)
        assert got == expected
        assert sum(own.drafted_tokens for own in outputs) > 40
        whole = [[*prompt, *tokens, *[0] * 60][:60] for prompt, (tokens, _) in zip(PROMPTS, got, strict=True)]
        for length, guesses in learned:
            found = [
                by_whole_sequences(model, jnp.asarray([each], jnp.int32), np.int32(length)).tolist() for each in whole
            ]
            room = [max(0, len(prompt) + 20 - length) for prompt in PROMPTS]  # before the answer's end
            possible = [own[:fits] for own, fits in zip(found, room, strict=True) if fits]
            assert guesses == [-1] * 3 or any(guesses[: len(own)] == own for own in possible)


def test_without_the_layer_it_is_refused():
    with pytest.raises(ValueError, match="speculation is 'mtp', and the model has no multi-token-prediction layer"):
        ling3.Engine(open_transformer("qwen3"), None, **SETTINGS, speculation="mtp")


HIDDEN = 128
"""nano's hidden size."""
COUNTING = "Mia has 8 red eggs. Mia has 8 red eggs. Mia has 8"
KINDS = {
    "stop strings": {"stop": ["32 +", "never"], "min_tokens": 3},
    "a bias and penalties": {"logit_bias": {40: 1.5}, "frequency_penalty": 0.2, "repetition_penalty": 1.1},
    "a grammar": {"structured": ling3.Regex("[a-z0-9 ]{12}")},
    "scores": {"prompt_logprobs": 2, "logprobs": 2},
    "several answers": {"n": 3, "temperature": 1.0},
    "a snapshot": {"keep": True},
    "a capture": {"capture": ling3.Capture(residual=[1])},
    "an intervention": {"interventions": [ling3.Intervention.add(1, np.full(HIDDEN, 0.05, np.float32))]},
}


def whole(output):
    """All of a request's answers."""
    return [(each.text, *answer(each)) for each in output.outputs]


@whole_programs
@needs_compiler
@pytest.mark.usefixtures("always")
def test_beside_every_other_feature():
    """Each has the answer and the bits that it has without speculation, with all kinds served at once, and twice."""
    with installed():
        model, tokenizer = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")
        params = [ling3.SamplingParams(**{"max_tokens": 20, "seed": 5, "logprobs": 1} | own) for own in KINDS.values()]
        engines = [ling3.Engine(model, tokenizer, max_model_len=256)]
        plain = engines[0].generate([COUNTING] * len(params), params)
        known = [[*each.prompt_token_ids, *own.token_ids] for each in plain for own in each.outputs]
        engines.append(ling3.Engine(model, tokenizer, max_model_len=256, speculation=partly_right(known)))
        for _ in range(2):
            plain, guessed = (engine.generate([COUNTING] * len(params), params) for engine in engines)
            for name, one, other in zip(KINDS, plain, guessed, strict=True):
                assert whole(one) == whole(other), name
                assert one.prompt_logprobs == other.prompt_logprobs, name
        [kept, seen] = [list(KINDS).index(name) for name in ("a snapshot", "a capture")]
        snapshots = [outputs[kept].snapshot for outputs in (plain, guessed)]
        again = [whole(engine.generate([own])[0]) for engine, own in zip(engines, snapshots, strict=True)]
        assert again[0] == again[1]
        captured = [outputs[seen].outputs[0].captured for outputs in (plain, guessed)]
        assert jax.tree.all(jax.tree.map(np.array_equal, *(own.residual for own in captured)))
        assert engines[1].stats().accepted_tokens > 0
