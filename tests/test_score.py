"""Scores of known answers: the engine's log-probabilities bit for bit, and the gradient of the training forward."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively
from native_kernels import installed, needs_compiler
from promised_requests import SETTINGS, requests
from tiny import FLASH, TINY, UNBOUNDED
from tiny import open_model as open_ling3
from tiny_transformers import CASES
from tiny_transformers import open_model as open_transformer

import ling3
from ling3.engine import sampling
from ling3.engine.forward import decode, extend
from ling3.engine.runner import Runner
from ling3.execution import Execution

pytestmark = pytest.mark.thorough

LING3 = {"tiny": TINY, "flash": FLASH, "unbounded": UNBOUNDED}
FEW_PAGES = {**SETTINGS, "num_pages": 20}
"""The engine preempts some requests; `score` takes as many pages as it needs."""
SEQUENCES = [([3, 5, 8, 13, 21, 34, 55, 5, 9], [*range(7, 24)]), ([4], [6]), ([*range(2, 42)], [9, 8, 7, 6, 5])]
ROUNDING = 1e-5
"""Most that a log-probability of `score` may differ from the training forward's: 2.4e-6 on the tiny models in
float32, where the two take their sums in other orders."""


def whole_programs(test):
    """Marks a test of last bits as one of programs with all optimizations, which decide how XLA rounds."""
    return pytest.mark.slow(pytest.mark.optimized(test))


def has_the_engines_bits(model, **changes):
    """All kinds of sampling, in company, with preemption, known prefixes and several answers of a prompt; twice."""
    settings = {**FEW_PAGES, **changes}
    engine, asked = ling3.Engine(model, None, **settings), requests(vocab=64)
    params = [dataclasses.replace(own, logprobs=0) for _, own in asked]
    for _ in range(2):
        outputs = engine.generate([prompt for prompt, _ in asked], params)
    pairs = [(output.prompt_token_ids, answer) for output in outputs for answer in output.outputs]
    values = np.asarray(ling3.score(model, [(prompt, answer.token_ids) for prompt, answer in pairs], **settings))
    assert values.shape == (len(pairs), max(len(answer.token_ids) for _, answer in pairs))
    for row, (_, answer) in zip(values, pairs, strict=True):
        reported = np.asarray([each.logprob for each in answer.logprobs], np.float32)
        np.testing.assert_array_equal(row[: len(reported)], reported)
        assert not row[len(reported) :].any()
    return engine


@pytest.mark.parametrize("name", ["qwen3", pytest.param("tiny", marks=pytest.mark.slow)])
def test_the_engines_bits(name):
    """In passes, and for KDA without its kernel step by step."""
    engine = has_the_engines_bits(open_ling3() if name == "tiny" else open_transformer(name))
    assert engine.stats().preemptions > 0 and engine.stats().cached_tokens > 0


@whole_programs
@pytest.mark.parametrize("name", exhaustively(["tiny", *CASES], but=["qwen3-moe"]))
def test_whole_programs_have_the_engines_bits(name, monkeypatch):
    monkeypatch.setattr(sampling, "MANY", 0)
    has_the_engines_bits(open_ling3() if name == "tiny" else open_transformer(name))


@whole_programs
@needs_compiler
@pytest.mark.parametrize("name", exhaustively([*LING3, "nano", "qwen3-moe"], but=["tiny"]))
def test_kernels_have_the_engines_bits(name, monkeypatch):
    """nano is in bfloat16, and decodes 16 rows as it does by default."""
    monkeypatch.setattr(sampling, "MANY", 0)
    with installed():
        if name == "nano":
            engine = has_the_engines_bits(ling3.load("nano"), decode_rows=16)
        else:
            engine = has_the_engines_bits(open_ling3(LING3[name]) if name in LING3 else open_transformer(name))
        assert engine.stats().preemptions > 0 and engine.stats().cached_tokens > 0


@whole_programs
@needs_compiler
@pytest.mark.parametrize("cache_dtype", exhaustively(["auto", "bfloat16"], but=["auto"]))
def test_bfloat16_has_the_engines_bits(cache_dtype):
    with installed():
        has_the_engines_bits(open_ling3(dtype=jnp.bfloat16), cache_dtype=cache_dtype)


def test_steps_have_the_bits_of_passes(monkeypatch):
    """As where passes are refused. Five rows cannot be shared out to a token and its drafts, and take steps too."""
    model = open_transformer("qwen3")
    passes, five = (np.asarray(ling3.score(model, SEQUENCES, **{**SETTINGS, "decode_rows": rows})) for rows in (4, 5))
    execution = Execution.default()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    np.testing.assert_array_equal(ling3.score(model, SEQUENCES, **SETTINGS, execution=execution), passes)
    np.testing.assert_allclose(five, passes, atol=ROUNDING)  # last bits may depend on decode_rows


def test_a_prompt_of_several_answers_is_prefilled_once(monkeypatch):
    """With the bits of each answer alone, also where the answers of a prompt take several calls."""
    model, prompts = open_transformer("qwen3"), ([3, 5, 8, 13, 21], [4], [*range(2, 42)])
    sequences = [(prompt, [*range(7 + i, 9 + i + len(prompt) % 3)]) for i in range(6) for prompt in prompts]
    alone = [ling3.score(model, [one], **SETTINGS)[0] for one in sequences]
    calls, extend = [], Runner.extend
    monkeypatch.setattr(Runner, "extend", lambda *args: calls.append(args) or extend(*args))
    together = ling3.score(model, sequences, **SETTINGS)
    for row, expected in zip(together, alone, strict=True):
        np.testing.assert_array_equal(row[: len(expected)], expected)
    assert len(calls) == 1 + 2  # the second prompt has but one token, and the last two chunks


def test_nothing_is_compiled_twice():
    model = open_transformer("qwen3")
    ling3.score(model, SEQUENCES, **SETTINGS)
    before = extend._cache_size(), decode._cache_size()
    ling3.score(model, [([*range(2, 40)], [5, 6]), ([3, 4], [*range(3, 23)])], **SETTINGS)
    assert (extend._cache_size(), decode._cache_size()) == before


def by_training_forward(model, sequences):
    """The log-probabilities by `model(tokens)`."""
    rows = [[*prompt, *answer] for prompt, answer in sequences]
    width, longest = max(map(len, rows)), max(len(answer) for _, answer in sequences)
    logprobs = jax.nn.log_softmax(model(jnp.asarray([row + [0] * (width - len(row)) for row in rows], jnp.int32)))
    own = [
        jnp.pad(each[np.arange(len(prompt) - 1, len(row) - 1), np.asarray(answer)], (0, longest - len(answer)))
        for each, row, (prompt, answer) in zip(logprobs, rows, sequences, strict=True)
    ]
    return jnp.stack(own)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3-moe", "tiny"])
def test_the_gradient_is_that_of_the_training_forward(name):
    model = open_ling3() if name == "tiny" else open_transformer(name)
    shares = jnp.asarray(np.random.default_rng(0).normal(size=(3, 17)), jnp.float32)

    def loss(model, logprobs):
        return jnp.sum(shares * jnp.exp(logprobs(model, SEQUENCES)))

    def scored(model, sequences):
        return ling3.score(model, sequences, **SETTINGS)

    values = scored(model, SEQUENCES), by_training_forward(model, SEQUENCES)
    np.testing.assert_allclose(*values, atol=ROUNDING)
    value, gradient = eqx.filter_value_and_grad(loss)(model, scored)
    same, expected = eqx.filter_jit(eqx.filter_value_and_grad(loss))(model, by_training_forward)
    np.testing.assert_allclose(value, same, rtol=1e-5)
    assert jax.tree.structure(gradient) == jax.tree.structure(expected)
    for own, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5 * max(1.0, float(jnp.abs(other).max())))


def test_a_gradient_in_bfloat16():
    """It has the weights' dtype, whose rounding, 2⁻⁸, adds up over a few products."""
    model = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), open_transformer("qwen3"))
    gradient = eqx.filter_grad(lambda model: jnp.sum(ling3.score(model, SEQUENCES, **SETTINGS)))(model)
    expected = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.sum(by_training_forward(model, SEQUENCES))))(model)
    for own, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        assert own.dtype == jnp.bfloat16
        wide = np.asarray(other, np.float32)
        np.testing.assert_allclose(np.asarray(own, np.float32), wide, atol=2**-6 * np.abs(wide).max())


def test_the_gradient_foretells_a_small_step():
    """Along the gradient g, the scores' sum changes by |g|² times the step, up to the second order."""
    model = open_transformer("llama")

    def total(model):
        return jnp.sum(ling3.score(model, SEQUENCES, **SETTINGS))

    before, gradient = eqx.filter_value_and_grad(total)(model)
    square = sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradient))
    sides = [
        float(total(eqx.apply_updates(model, jax.tree.map(lambda g, step=step: step * g, gradient))))
        for step in (1e-4, -1e-4)
    ]
    assert (sides[0] - sides[1]) / 2e-4 == pytest.approx(square, rel=1e-2)
    assert sides[1] < before < sides[0]


BAD = {
    "sequences is empty": [],
    "sequence 0 is 7, expected a pair of the token ids of a prompt and of an answer": [7],
    r"sequence 1 is \(\[3\], \[4\], \[5\]\), expected a pair": [([3], [4]), ([3], [4], [5])],
    "sequence 0, its prompt is empty, expected at least one token id": [([], [3])],
    "sequence 0, its answer is empty, expected at least one token id": [([3], [])],
    r"sequence 0, its prompt, token 1 is 64, expected an id in \[0, 64\)": [([3, 64], [3])],
    r"sequence 1, its answer, token 0 is -1, expected an id in \[0, 64\)": [([3], [3]), ([3], [-1])],
    "sequence 0 has 257 tokens, prompt and answer together, but there is room for 256": [([3] * 200, [4] * 57)],
}


@pytest.mark.parametrize("message", BAD)
def test_bad_sequences_are_refused(message):
    with pytest.raises(ling3.ParameterError, match=message):
        ling3.score(open_transformer("qwen3"), BAD[message])


def test_what_cannot_have_the_bits_is_refused():
    model = open_transformer("qwen3")
    with pytest.raises(ling3.ParameterError, match="batch_invariant is False, expected True"):
        ling3.score(model, SEQUENCES, batch_invariant=False)
    with pytest.raises(TypeError, match="no engine setting is called rows"):
        ling3.score(model, SEQUENCES, rows=4)
    with pytest.raises(TypeError, match=r"called inside jax\.jit or another transformation"):
        eqx.filter_jit(lambda model: ling3.score(model, SEQUENCES))(model)
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"the model is on a mesh, and ling3\.score runs on one device"):
        ling3.score(ling3.mesh.place(model, mesh), SEQUENCES)


@pytest.mark.parametrize("rows", [4, 5])
def test_broken_weights_are_named(rows):
    """NaN in the last norm breaks every sequence, in passes and in steps."""
    model = open_transformer("llama")
    broken = eqx.tree_at(lambda m: m.model.norm.weight, model, replace_fn=lambda x: x * jnp.nan)
    with pytest.raises(FloatingPointError, match="the logits of sequence 0, 1, 2 are NaN"):
        ling3.score(broken, SEQUENCES, **{**SETTINGS, "decode_rows": rows})
