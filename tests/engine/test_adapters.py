"""Several adapters in one engine: the bits of answers, prefixes, snapshots and captures, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from adapted_engines import (
    ADAPTERS,
    PROMPTS,
    QUANTIZED,
    SIZES,
    adapters,
    answers,
    are_near,
    engine,
    keeps_its_bits,
    open_model,
    params,
    requests,
    with_adapter,
)
from exhaustive_cases import exhaustively
from native_kernels import installed, needs_compiler
from promised_requests import answer
from random_adapters import random_adapter
from tiny import TINY
from tiny_transformers import CASES

import ling3
from ling3.checkpoint.loading import dequantized
from ling3.engine import sampling
from ling3.engine.forward import Programs
from ling3.engine.speculator import Speculator


@functools.cache
def shared():
    return engine()


def always_guess(monkeypatch):
    """Guesses as many tokens as fit wherever there are any to guess."""
    monkeypatch.setattr(Speculator, "depth", lambda own, _, chances: own.sizes.each if chances else 0)
    monkeypatch.setattr(Speculator, "measured", True)
    monkeypatch.setattr(sampling, "MANY", 0)


def test_an_answer_has_the_bits_of_its_solo_run():
    keeps_its_bits("llama")


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", exhaustively(["tiny", *CASES, "flash"], but=["llama"]))
def test_in_every_family(name):
    """Also in an engine with that adapter alone; and up to rounding of a model with that adapter beside its weights."""
    asked, expected = keeps_its_bits(name)
    own = adapters(name)["b"]
    assert answers(engine(name, adapters={"other": own}), with_adapter("other", "b", asked)) == expected[2::3]
    adapted = ling3.Engine(ling3.with_adapter(open_model(name), own), None, **SIZES)
    are_near(answers(adapted, with_adapter(None, "b", asked)), expected[2::3])


@pytest.mark.optimized
@pytest.mark.parametrize("to", exhaustively(QUANTIZED))
def test_over_quantized_weights(to):
    """The bits of solo runs; up to rounding, those of b are those of the dequantized model with b merged into it."""
    asked, expected = keeps_its_bits(to)
    merged = ling3.merge_adapter(dequantized(open_model(to), jnp.float32), adapters(to)["b"])
    found = [each[0][:2] for each in expected[2::3]]
    scores = ling3.score(merged, [(prompt, own[0]) for (prompt, _), own in zip(asked[2::3], found, strict=True)])
    # Logits near 1 in float32, by products of another order.
    np.testing.assert_allclose([[x.logprob for x in own] for _, own in found], scores, atol=1e-4)


@needs_compiler
@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", exhaustively(["tiny", "llama", "qwen3-moe"], but=["llama"]))
def test_with_drafts(name, monkeypatch):
    """Guesses that are right, wrong and both, of sequences with different adapters in one pass."""
    always_guess(monkeypatch)
    sizes = {"decode_rows": 8, "num_pages": 24}
    asked = [(prompt, dataclasses.replace(own, n=1)) for prompt, own in requests()]
    with installed():
        expected = answers(engine(name, **sizes), asked)
        texts = [[*prompt, *each[0]] for (prompt, _), [each] in zip(asked, expected, strict=True)]

        def guess(tokens):
            after = next((text[len(tokens) :] for text in texts if text[: len(tokens)] == tokens), [])
            return [token if i < sum(tokens) % 4 else token ^ 1 for i, token in enumerate(after[:6])]

        guessing = engine(name, **sizes, speculation=guess)
        assert answers(guessing, asked) == expected
        assert guessing.stats().accepted_tokens > 0


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.optimized
def test_with_guesses_of_the_models_own_layer(monkeypatch):
    """The layer guesses from hidden states of the adapted model; right or wrong, no guess changes a bit."""
    always_guess(monkeypatch)
    model = ling3.init(dataclasses.replace(TINY, num_nextn_predict_layers=1), key=jax.random.key(3), mtp=True)
    own = {name: random_adapter(model, rank=rank, seed=rank) for name, rank in (("a", 3), ("b", 2))}
    sizes = {**SIZES, "decode_rows": 8, "num_pages": 24, "adapters": own}
    asked = [(prompt, dataclasses.replace(one, n=1)) for prompt, one in requests()]
    with installed():
        expected = answers(ling3.Engine(model, None, **sizes), asked)
        guessing = ling3.Engine(model, None, **sizes, speculation="mtp")
        assert answers(guessing, asked) == expected
        stats = guessing.stats()
        assert stats.drafted_tokens > 100 and 0 < stats.accepted_tokens < stats.drafted_tokens


def test_prefixes_are_not_shared_across_adapters():
    served, prompt = shared(), PROMPTS[1]
    served.forget_prefixes()
    for known in (0, 32):
        for adapter in ADAPTERS:
            [output] = served.generate([prompt], params(adapter, max_tokens=2))
            assert output.outputs[0].cached_tokens == known


def test_a_snapshot_is_for_its_adapter():
    served, prompt = shared(), PROMPTS[1]
    [[expected]] = answers(served, [(prompt, params("a"))])
    [output] = served.generate([prompt], params("a", max_tokens=10, keep=True))
    kept = output.outputs[0].snapshot
    [[rest]] = answers(served, [(kept, params("a", max_tokens=14))])
    assert (*output.outputs[0].token_ids, *rest[0]) == expected[0]
    assert (*output.outputs[0].logprobs, *rest[1]) == expected[1]
    for adapter in (None, "b"):
        with pytest.raises(ling3.ParameterError, match="snapshot of a request with an adapter that is not this one's"):
            served.submit(kept, params(adapter))
    [output] = served.generate([prompt], params(max_tokens=2, keep=True))
    with pytest.raises(ling3.ParameterError, match="snapshot of a request without an adapter: it holds for the same"):
        served.submit(output.outputs[0].snapshot, params("a"))


def test_a_capture_is_with_the_adapter():
    """The arrays are those of the model with the adapter, and the answer is that without a capture."""
    served, prompt = shared(), PROMPTS[0]
    [output] = served.generate([prompt], params("a", capture=ling3.Capture(residual=[0])))
    assert [[answer(output.outputs[0])]] == answers(served, [(prompt, params("a"))])
    tokens = jnp.asarray([[*prompt, *output.outputs[0].token_ids]], jnp.int32)
    seen = ling3.trace(ling3.with_adapter(open_model("llama"), adapters("llama")["a"]), tokens)
    # Residuals near 1 in float32, in calls of other lengths: 1e-4.
    np.testing.assert_allclose(output.outputs[0].captured.residual[0], seen.layers[0].residual[0], atol=1e-4)


def test_a_warm_up_compiles_the_programs_with_adapters():
    served = shared()
    served.warmup()
    before = served._loop.runner.programs
    answers(served, requests())
    assert served._loop.runner.programs == before


def test_unknown_adapters_are_refused():
    served = shared()
    assert served.adapters == ("a", "b")
    with pytest.raises(ling3.ParameterError, match="adapter is 'c', expected one of a, b"):
        served.submit([3], params("c"))
    with pytest.raises(ling3.ParameterError, match="adapter is 'a', and this engine has none: give it some"):
        engine(adapters=None).submit([3], params("a"))
    with pytest.raises(ling3.ParameterError, match="adapter is 3, expected the name of an adapter or None"):
        params(3)
    with pytest.raises(ling3.ParameterError, match=r"adapter is 'a', which ling3\.generate cannot do: use an Engine"):
        ling3.generate(open_model("llama"), [[3]], params("a", logprobs=None))
    assert not served.has_work


def test_what_cannot_be_served_is_refused(tmp_path):
    model, own = open_model("llama"), adapters("llama")["a"]
    with pytest.raises(ling3.AdapterError, match="adapter 'x': the adapter is for another model"):
        engine(adapters={"a": own, "x": random_adapter(open_model("qwen3"))})
    with pytest.raises(ling3.AdapterError, match="adapter 'a': the model has an adapter already"):
        ling3.Engine(ling3.with_adapter(model, own), None, **SIZES, adapters={"a": own})
    with pytest.raises(ValueError, match="adapters: the forward programs of this engine take none"):
        engine(programs=Programs(parts=Programs().parts - {"adapter"}))
    with pytest.raises(ValueError, match="adapters: the name '': expected a text that is not empty"):
        engine(adapters={"": own})
    with pytest.raises(TypeError, match="adapters"):
        engine(adapters={"a": 3})
    with pytest.raises(FileNotFoundError):
        engine(adapters={"a": tmp_path / "nothing"})


def test_an_adapter_may_be_a_path(tmp_path):
    ling3.save_adapter(adapters("llama")["a"], tmp_path / "a")
    asked = [(PROMPTS[0], params("a"))]
    assert answers(engine(adapters={**adapters("llama"), "a": tmp_path / "a"}), asked) == answers(shared(), asked)
