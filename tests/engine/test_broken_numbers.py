"""Faults of a model's numbers and of the device: a clear error, and nothing lost for the others."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
import small_engine
from exhaustive_cases import thoroughly
from small_engine import LONG, SHORT, Fault, answers, engine, idle, model, reciter, tokenizer

from ling3 import SamplingParams

# An id whose embedding is NaN in `poisoned`.
POISON = 390
PROMPTS = small_engine.PROMPTS[:4]


# NaN


@pytest.fixture(scope="module")
def poisoned():
    """An engine whose model is well but for one embedding, and for what follows it."""
    served = eqx.tree_at(
        lambda m: m.model.word_embeddings.weight, model(), replace_fn=lambda w: w.at[POISON].set(jnp.nan)
    )
    return engine(served)


@pytest.mark.parametrize("place", [0, 31, 32, 44])
def test_nan_ends_its_request_and_no_other(poisoned, alone, place):
    sick = list(range(20, 65))
    sick[place] = POISON
    prompts = [PROMPTS[0], sick, *PROMPTS[1:], sick[: place + 1], PROMPTS[0]]
    outputs = poisoned.generate(prompts, SHORT)
    assert [output.finish_reason for output in outputs] == ["length", "error", *["length"] * 3, "error", "length"]
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.finish_reason == "error":
            assert "its logits were NaN" in output.error
            assert (output.token_ids, output.text, output.logprobs) == ((), "", ())
            assert output.timings.first_token is None
        else:
            assert answers([output]) == [alone(prompt)]
    assert idle(poisoned)


def test_what_nan_left_is_scrubbed(poisoned):
    poisoned.generate([[POISON] * 40] * 6, SHORT)
    assert idle(poisoned)
    leaves = [x for x in jax.tree.leaves(poisoned._loop.runner.pool.layers) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert len(leaves) > 4
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves)


def test_nan_amid_an_answer_keeps_what_came_before(shared):
    """A token that the model itself chooses, with a NaN for its embedding: the seventh of the answer."""
    script = tokenizer().encode("abcdefghijklm")
    sick = reciter(script)
    sick = eqx.tree_at(
        lambda m: m.model.word_embeddings.weight, sick, replace_fn=lambda w: w.at[script[7]].set(jnp.nan)
    )
    well, ill = engine(reciter(script)), engine(sick)
    params = SamplingParams(max_tokens=12, logprobs=0)
    (whole,) = well.generate("a", params)
    assert whole.text == "bcdefghijklm"
    deltas = list(ill.stream("a", params))
    output = deltas[-1].output
    assert (output.text, output.finish_reason, output.token_ids) == ("bcdefgh", "error", whole.token_ids[:7])
    assert output.logprobs == whole.logprobs[:7]
    assert "".join(delta.text for delta in deltas) == "bcdefgh"
    assert idle(ill)


def test_nan_that_nobody_saw_harms_no_one(poisoned, alone):
    """Aborted between two chunks of its prompt, a request leaves NaN in pages that the next ones get."""
    for _ in range(2):
        rids = [poisoned.submit([POISON] * 200, SHORT) for _ in range(2)]
        poisoned.step()
        assert 0 < poisoned._loop.requests[rids[0]].sequences[0].prefilled < 200
        for rid in rids:
            assert poisoned.abort(rid)
        prompts = [list(range(10 + i, 150 + i)) for i in range(5)]
        outputs = poisoned.generate(prompts, SHORT)
        assert answers(outputs) == [alone(prompt) for prompt in prompts]
    assert {delta.finish_reason for delta in poisoned.step()} == {"abort"}
    assert idle(poisoned)


# The device


@pytest.mark.parametrize("where", thoroughly(["extend", "decode", "swap_in", "swap_out"], but=["decode"]))
def test_a_fault_of_the_device_ends_all_and_the_engine_begins_anew(busy, alone, monkeypatch, where):
    prompts = [[i] * 50 for i in range(40, 45)]
    expected = [alone(prompt, LONG) for prompt in prompts]

    def broken(*_):
        """The pool was given to the program, and has gone with it."""
        for leaf in jax.tree.leaves(busy._loop.runner.pool):
            leaf.delete()
        raise Fault("out of memory")

    seen = []
    rids = [busy.submit(prompt, LONG) for prompt in prompts]
    rids.append(busy.submit(prompts[0], LONG, on_delta=seen.append))
    stream = busy.stream(prompts[0], LONG)
    deltas = [delta for _ in range(6) for delta in busy.step()]
    with monkeypatch.context() as patch:
        patch.setattr(busy._loop.runner, where, broken)
        with pytest.raises(Fault, match="out of memory"):
            while busy.has_work:
                deltas += busy.step()
        deltas += busy.step()
    with pytest.raises(Fault):
        list(stream)
    ends = {delta.request_id: delta.output for delta in [*deltas, *seen] if delta.output}
    assert sorted(ends) == sorted(rids)
    before = [output for output in ends.values() if output.finish_reason == "length"]
    assert len(before) < 4
    assert all(answers([output])[0] in expected for output in before)
    for output in ends.values():
        assert output in before or "the engine failed: Fault('out of memory')" in output.error
    assert idle(busy)
    assert answers(busy.generate(prompts, LONG)) == expected
