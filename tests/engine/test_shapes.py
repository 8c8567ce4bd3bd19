"""The sizes that programs are compiled for, and how long a decode call is."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from native_kernels import needs_compiler

import ling3
from ling3.engine.dispatch import Dispatcher
from ling3.engine.shapes import FINE_WIDTHS, WIDTHS, settle
from ling3.execution import PLAIN, Execution
from ling3.families.llama import LlamaConfig
from ling3.ops import products_cpu

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


@needs_compiler
def test_large_models_are_padded_to_finer_widths(monkeypatch):
    assert settled(llama(), Execution.default())[2] == WIDTHS
    monkeypatch.setitem(products_cpu.LEAST, "dense", 0)
    assert settled(llama(), Execution.default())[1:] == ((16,), FINE_WIDTHS)
    assert settled(llama(), PLAIN)[2] == WIDTHS


def steps(lefts, running=()):
    """The steps of a decode call of at most eight."""
    sequences = [SimpleNamespace(left=left, decoding=True, constrained=False) for left in lefts]
    dispatcher = Dispatcher(None, SimpleNamespace(running=[*sequences, *running]), 16, 8, None)
    return dispatcher._steps(sequences)


def test_a_decode_call_ends_before_many_rows_are_idle():
    assert steps([20, 8]) == 8
    assert steps([3, 2]) == 2  # one of six row-steps would be idle
    assert steps([3] + [20] * 3) == 6  # 3 of 24, and of 28 it would be 4
    assert steps([1] + [20] * 7) == 8  # 7 of 64
    assert steps([1, 1]) == 1


def test_a_decode_call_is_short_while_prompts_wait():
    assert steps([20, 20], running=[SimpleNamespace(decoding=False)]) == 1


def test_a_decode_call_is_shorter_beside_a_grammar():
    assert steps([20, 20], running=[SimpleNamespace(decoding=True, constrained=True)]) == 4
