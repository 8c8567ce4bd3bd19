"""What a step may touch: the pools are updated in place, and nothing of their size is copied or gathered."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively
from tiny import TINY, open_model

import ling3
from ling3.cache import KDAState
from ling3.engine.forward import Batch, decode, extend
from ling3.engine.pool import Rows, swap_in

SETTINGS = {"page_size": 16, "chunked_prefill_size": 16, "token_paddings": (16,), "decode_rows": 4}


def compiled(program, **changes):
    """The program's memory: bytes of the pool, of what is updated in place, and of temporaries."""
    runner = ling3.Engine(open_model(TINY), None, **{**SETTINGS, **changes})._loop.runner
    rows, seq = (4, 0) if program is decode else (1, 16)
    lowered = program.lower(*runner._empty_batch(rows, seq), runner.pool, runner.execution)
    memory = lowered.compile().memory_analysis()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.pool))
    return size, memory.alias_size_in_bytes, memory.temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("program", [decode, *exhaustively([extend])], ids=["decode", "extend"])
def test_a_step_touches_what_is_in_use_alone(program):
    """A pool of forty times the slots and pages: in place too, and not a byte more of temporaries per page or slot."""
    small, alias, temporary = compiled(program, max_running_requests=5, num_pages=100, max_model_len=512)
    assert alias == small
    large, alias, more = compiled(program, max_running_requests=200, num_pages=4000, max_model_len=512)
    assert alias == large > 30 * small
    assert more - temporary < 0.001 * (large - small)


def moved(rows):
    """Of decode calls with so many rows for seven slots: whether all of the pool is aliased, and what moves a state."""
    runner = ling3.Engine(
        open_model(TINY), None, **{**SETTINGS, "decode_rows": rows}, max_running_requests=7, num_pages=50
    )._loop.runner
    program = decode.lower(*runner._empty_batch(rows, 0), runner.pool, runner.execution).compile()
    states = [layer.recurrent for layer in runner.pool.layers if isinstance(layer, KDAState)]
    (shape,) = {",".join(map(str, state.shape)) for state in states}
    text = program.as_text()
    assert f"f32[{shape}]" in text
    aliased = text.splitlines()[0].count("-alias)")
    return aliased == len(jax.tree.leaves(runner.pool)), re.findall(
        rf"= f32\[{shape}\]\S* (copy|gather|scatter|dynamic-slice|dynamic-update-slice)\(", text
    )


@pytest.mark.slow
@pytest.mark.optimized
def test_a_row_for_every_slot_moves_no_state():
    """Where fewer rows than slots are decoded, states are taken out and put back."""
    assert moved(7) == (True, [])
    aliased, operations = moved(4)
    assert aliased and "scatter" in operations


@pytest.mark.slow
@pytest.mark.optimized
def test_both_layouts_decode_the_same_bits_and_leave_the_others_alone():
    """Slots 1 and 3 decode; slot 0 runs but is in no row, slot 2 is empty."""
    runner = ling3.Engine(open_model(TINY), None, **SETTINGS, max_running_requests=4, num_pages=8)._loop.runner
    columns = runner.shapes.columns

    def prepared():
        runner.reset()
        pages = np.full((4, columns), 8, np.int32)
        for slot in (0, 1, 3):
            pages[slot, :2] = 2 * slot, 2 * slot + 1
            tokens = jnp.asarray(np.arange(16)[None] + slot + 3, jnp.int32)
            row = Rows(jnp.asarray([slot], jnp.int32), jnp.asarray(pages[slot : slot + 1]))
            contents = dataclasses.replace(runner._empty_contents(), until=jnp.asarray(40, jnp.int32))
            pool = swap_in(jnp.asarray(slot, jnp.int32), contents, runner.pool)
            batch = Batch(row, tokens, jnp.asarray([9], jnp.int32))
            _, runner.pool = extend(runner.model, batch, pool, runner.execution)
        return pages, jax.tree.map(np.asarray, runner.pool)

    def steps(rows):
        return Batch(rows, jnp.zeros((4, 0), jnp.int32), jnp.full(4, 4, jnp.int32))

    pages, before = prepared()
    own = [4, 1, 4, 3]
    in_place = Rows(jnp.asarray(own, jnp.int32), jnp.asarray(np.where(np.equal(own, 4)[:, None], 8, pages)), True)
    choice, pool = decode(runner.model, steps(in_place), runner.pool, runner.execution)
    tokens, after = np.asarray(choice.token), jax.tree.map(np.asarray, pool)
    prepared()
    some = Rows(jnp.asarray([3, 1, 4, 4], jnp.int32), jnp.asarray(pages[[3, 1, 2, 2]]))
    choice, pool = decode(runner.model, steps(some), runner.pool, runner.execution)
    assert tokens[[3, 1]].tolist() == np.asarray(choice.token)[:2].tolist() and tokens.max() >= 0
    assert (tokens[[0, 2]] == -1).all()
    jax.tree.map(np.testing.assert_array_equal, after, jax.tree.map(np.asarray, pool))
    assert after.length[0] == before.length[0] == 9 and not after.done[0] and after.done[2]
    np.testing.assert_array_equal(after.layers[0].recurrent[[0, 2]], before.layers[0].recurrent[[0, 2]])
