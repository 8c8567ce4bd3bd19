"""The sizes that programs are compiled for, and calls of fewer rows where these have the same bits."""

import dataclasses
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from family_laws import prompts
from native_kernels import installed, needs_compiler
from tiny import TINY, open_model

import ling3
from ling3.engine.loop import Loop
from ling3.engine.shapes import FINE_WIDTHS, rows_are_independent, settle
from ling3.execution import PLAIN, Execution
from ling3.families.llama import LlamaConfig

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
WIDTHS = {"token_paddings": (16,), "chunked_prefill_size": 16, "page_size": 16, "max_model_len": 64}


def llama(dtype=jnp.float32):
    return ling3.init(CONFIG, key=jax.random.key(0), dtype=dtype)


def settled(model, execution=PLAIN, **changes):
    settings, shapes = settle(dataclasses.replace(ling3.EngineSettings(), num_pages=4, **changes), model, execution)
    return settings.decode_rows, shapes.rows, shapes.buckets


def test_prefill_widths_reach_to_the_chunk():
    for chunk, widths in ((100, (16, 128)), (128, (16, 128)), (512, (16, 128, 512)), (700, (16, 128, 512, 700))):
        assert settled(llama(), chunked_prefill_size=chunk)[2] == widths
    assert settled(llama(), chunked_prefill_size=100, token_paddings=(7, 100, 200))[2] == (7, 100)


def test_rows_left_to_xla_come_in_calls_of_one_size():
    for model in (llama(), eqx.filter_eval_shape(llama)):  # shapes are enough
        assert not rows_are_independent(model, PLAIN)
    assert not rows_are_independent(llama(), Execution.default())  # too small for the kernels
    assert settled(llama())[:2] == (16, (16,))
    assert settled(llama(), batch_invariant=False, max_running_requests=50)[1] == (2, 8, 16, 24, 32, 48, 50)


@needs_compiler
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_on_the_kernels_answers_have_the_same_bits_in_calls_of_any_size(dtype):
    asked = prompts(*range(3, 16))
    params = ling3.SamplingParams(max_tokens=11, ignore_eos=True, logprobs=2, temperature=0.7, seed=1)
    with installed():
        model = llama(dtype)
        assert rows_are_independent(model, Execution.default())
        assert settled(model, Execution.default())[2] == FINE_WIDTHS
        engine = ling3.Engine(model, max_running_requests=13, num_pages=26, **WIDTHS)
        assert engine._loop.runner.shapes.rows == (2, 8, 13)
        together = engine.generate(asked, params)
        for some in ([3], [5, 0], [*range(5, 13)], [*range(1, 10)]):
            for which, output in zip(some, engine.generate([asked[i] for i in some], params), strict=True):
                assert (output.token_ids, output.logprobs) == (together[which].token_ids, together[which].logprobs)


@needs_compiler
def test_a_single_product_left_to_xla_makes_rows_depend():
    """KDA's and absorbed MLA's products are JAX's."""
    with installed():
        assert not rows_are_independent(open_model(TINY), Execution.default())
        assert not rows_are_independent(
            llama(), dataclasses.replace(Execution.default(), paged_attention=PLAIN.paged_attention)
        )


def steps(lefts, running=()):
    """The steps of a decode call of at most eight."""
    sequences = [SimpleNamespace(left=left, decoding=True) for left in lefts]
    loop = SimpleNamespace(decode_steps=8, scheduler=SimpleNamespace(running=[*sequences, *running]))
    return Loop._steps(loop, sequences)


def test_a_decode_call_ends_before_many_rows_are_idle():
    assert steps([20, 8]) == 8
    assert steps([3, 2]) == 2  # one of six row-steps would be idle
    assert steps([3] + [20] * 3) == 6  # 3 of 24, and of 28 it would be 4
    assert steps([1] + [20] * 7) == 8  # 7 of 64
    assert steps([1, 1]) == 1


def test_a_decode_call_is_short_while_prompts_wait():
    assert steps([20, 20], running=[SimpleNamespace(decoding=False)]) == 1
