"""What a step may touch: the pools are updated in place, and nothing of their size is copied or gathered."""

import jax
import jax.numpy as jnp
import pytest
from tiny import TINY, open_model

import ling3
from ling3.pool import decode, prefill

SETTINGS = {"page_size": 16, "chunked_prefill_size": 16, "token_paddings": (16,), "decode_rows": 4}


def compiled(program, **changes):
    """The program's memory: bytes of the pool, of what is updated in place, and of temporaries."""
    runner = ling3.Engine(open_model(TINY), None, **{**SETTINGS, **changes})._loop.runner
    if program is decode:
        lowered = decode.lower(runner.model, runner._rows([], 4), jnp.asarray(4, jnp.int32), runner.pool)
    else:
        tokens, lengths, end = jnp.zeros((1, 16), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(1, bool)
        lowered = prefill.lower(runner.model, runner._rows([], 1), tokens, lengths, end, runner.pool)
    memory = lowered.compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.pool))
    return size, memory.alias_size_in_bytes, memory.temp_size_in_bytes


@pytest.mark.parametrize("program", [decode, prefill], ids=["decode", "prefill"])
def test_a_step_touches_what_is_in_use_alone(program):
    """A pool of forty times the slots and pages: in place too, and not a byte more of temporaries per page or slot."""
    small, alias, temporary = compiled(program, max_running_requests=5, num_pages=100, max_model_len=512)
    assert alias == small
    large, alias, more = compiled(program, max_running_requests=200, num_pages=4000, max_model_len=512)
    assert alias == large > 30 * small
    assert more - temporary < 0.001 * (large - small)
