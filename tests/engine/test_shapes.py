"""The sizes that programs are compiled for, and how long a decode call is."""

import dataclasses

import jax
import jax.numpy as jnp
from scripted_runner import scripted

import ling3
from ling3.engine.plans import StepPlan, common_steps
from ling3.engine.shapes import FINE_WIDTHS, WIDTHS, settle
from ling3.execution import PLAIN, Execution
from ling3.families.llama import LlamaConfig
from ling3.serve import BESIDE

CONFIG = LlamaConfig.from_dict(
    {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 1024,
    }
)


def llama():
    return ling3.init(CONFIG, key=jax.random.key(0), dtype=jnp.float32)


def settled(model, execution=PLAIN, **changes):
    settings, shapes = settle(dataclasses.replace(ling3.EngineSettings(), num_pages=4, **changes), model, execution)
    return settings.decode_rows, shapes.rows, shapes.buckets


def test_prefill_widths_reach_to_the_chunk():
    for chunk, widths in ((100, (16, 128)), (128, (16, 128)), (512, (16, 128, 512)), (700, (16, 128, 512, 700))):
        assert settled(llama(), chunked_prefill_size=chunk)[2] == widths
    assert settled(llama(), chunked_prefill_size=100, token_paddings=(7, 100, 200))[2] == (7, 100)


def test_decode_calls_have_one_size_unless_bits_may_differ():
    assert settled(llama())[:2] == (16, (16,))
    assert settled(llama(), batch_invariant=False, max_running_requests=50)[1] == (2, 8, 16, 24, 32, 48, 50)


def test_large_models_are_padded_to_finer_widths():
    assert settled(llama(), Execution.default())[2] == WIDTHS
    execution = dataclasses.replace(Execution.default(), narrow_from=0)
    assert settled(llama(), execution)[1:] == ((16,), FINE_WIDTHS)
    assert settled(llama(), PLAIN)[2] == WIDTHS


def steps(*lefts):
    """The steps of a decode call of at most eight."""
    return common_steps([StepPlan(min(left, 8)) for left in lefts], 8)


def test_a_decode_call_ends_before_many_rows_are_idle():
    assert steps(20, 8) == 8
    assert steps(3, 2) == 2  # one of six row-steps would be idle
    assert steps(3, *[20] * 3) == 6  # 3 of 24, and of 28 it would be 4
    assert steps(1, *[20] * 7) == 8  # 7 of 64
    assert steps(1, 1) == 1


def calls(*requests, **changes):
    """The calls for requests that come at once, and the most steps of each."""
    served = scripted(decode_steps=8, **changes)
    served.generate([[7] * tokens for tokens, _ in requests], [params for _, params in requests])
    return [(program, max(tokens)) for program, tokens in served._loop.runner.calls]


PLAIN_ANSWER = ling3.SamplingParams(max_tokens=40, ignore_eos=True)


def test_a_first_token_waits_for_no_other():
    assert calls((20, PLAIN_ANSWER))[:4] == [("extend", 19), ("decode", 1), ("decode", 7), ("decode", 8)]


def test_a_decode_call_is_short_while_prompts_wait():
    """One step for each chunk of the second prompt, and then as many as there can be."""
    found = calls((1, PLAIN_ANSWER), (97, PLAIN_ANSWER))
    assert found[:6] == [("extend", 32), ("decode", 1)] * 2 + [("extend", 32), ("decode", 1)]
    assert found[6:8] == [("decode", 7), ("decode", 8)]


def test_a_decode_call_is_shorter_beside_a_grammar():
    grammar = ling3.SamplingParams(max_tokens=30, structured=ling3.Regex("[a-z]{25}"))
    found = calls((1, PLAIN_ANSWER), (1, grammar))
    assert {steps for _, steps in found[3:20]} == {1, BESIDE}
