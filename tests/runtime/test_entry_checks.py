"""What is checked at the public entry points: token ids outside of compiled programs, and forked processes."""

import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from tiny import TINY, open_model

import ling3

IDS = jnp.asarray([[3, 4, 5], [95, 0, 6]], jnp.int32)
ENTRIES = {
    "model": lambda m, ids: m(ids),
    "step": lambda m, ids: m.step(ids, m.init_cache(2, 8))[0],
    "trace": lambda m, ids: ling3.trace(m, ids).logits,
}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.parametrize("kind", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
@pytest.mark.parametrize(("wrong", "place"), [(-1, (0, 2)), (96, (1, 0)), (2**31 - 1, (0, 0))])
def test_an_id_without_a_row_is_refused(entry, kind, wrong, place):
    ids = kind(IDS.at[place].set(wrong))
    with pytest.raises(ValueError, match=rf"tokens\[{place[0]}, {place[1]}\] is {wrong}, expected an id in \[0, 96\)$"):
        entry(open_model(TINY), ids)


@pytest.mark.slow
def test_ids_under_tracing_are_not_checked():
    model, wrong = open_model(TINY), IDS.at[0, 0].set(-1)
    for entry in ENTRIES.values():
        assert jax.eval_shape(entry, model, wrong).shape == (2, 3, 96)
    assert jax.eval_shape(jax.vmap(model), wrong[:, None]).shape == (2, 1, 3, 96)
    cache = model.init_cache(2, 8)
    assert eqx.filter_eval_shape(eqx.filter_jit(model.step), wrong, cache)[0].shape == (2, 3, 96)
    loss = eqx.filter_grad(lambda m, ids: jnp.mean(m(ids)))
    assert jax.tree.structure(eqx.filter_eval_shape(loss, model, wrong)) == jax.tree.structure(model)


def test_the_means_of_gates_are_not_taken_over_what_is_no_id():
    with pytest.raises(ValueError, match=r"tokens\[0, 0\] is -1"):
        ling3.ablate.mean_output_gate(open_model(TINY), IDS.at[0, 0].set(-1))


@pytest.mark.slow
def test_padding_may_be_anything():
    model, lengths = open_model(TINY), jnp.asarray([2, 0], jnp.int32)
    padded = jnp.asarray([[3, 4, -100], [-100, 1000, -1]], jnp.int32)
    logits, _ = model.step(padded, model.init_cache(2, 8), lengths, last=True)
    expected, _ = model.step(IDS, model.init_cache(2, 8), lengths=lengths, last=True)
    np.testing.assert_array_equal(logits[0], expected[0])
    with pytest.raises(ValueError, match=r"tokens\[0, 2\] is -100"):
        model.step(padded, model.init_cache(2, 8), jnp.asarray([3, 0], jnp.int32))


def test_ids_that_are_still_being_computed_are_checked_too():
    model = open_model(TINY)
    slow = jax.jit(lambda x: jnp.linalg.matrix_power(x, 300)[:1, :3].astype(jnp.int32) - 1)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"tokens\[0, 0\] is -1"):
            model(slow(jnp.zeros((400, 400))))


def test_a_wrong_type_is_told_as_such():
    model = open_model(TINY)
    for call in (
        lambda: model(IDS.astype(jnp.float32) - 5),
        lambda: ling3.trace(model, IDS[0] - 5),
        lambda: ling3.trace(5, IDS - 5),
        lambda: model.step(IDS - 5, model.init_cache(2, 8), jnp.zeros(3, jnp.int32)),
    ):
        with pytest.raises(jaxtyping.TypeCheckError):
            call()


FORKS = """
import os, warnings
import jax, jax.numpy as jnp
import ling3

warnings.simplefilter("ignore")  # JAX's own, of the deadlock
config = ling3.Ling3Config(
    vocab_size=96, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, head_dim=8,
    q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, num_experts=16,
    max_position_embeddings=256, eos_token_id=(2,), pad_token_id=0,
)


def made():
    model = ling3.init(config, key=jax.random.key(0))
    return model, ling3.Engine(model, max_running_requests=1, num_pages=20, page_size=16)


def child(calls):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for call in calls:
        try:
            call()
            os._exit(2)
        except RuntimeError as error:
            if "multiprocessing.get_context('spawn')" not in str(error):
                os._exit(3)
    os._exit(0)


def grandchild():
    if child([lambda: model(ids)]) == 0:
        raise RuntimeError("multiprocessing.get_context('spawn')")


def fresh():
    model, engine = made()
    assert model(jnp.ones((1, 2), jnp.int32)).shape == (1, 2, 96) and engine.submit([3]) == 0
    os._exit(7)


assert child([fresh]) == 7  # before JAX is used
model, engine = made()
ids, cache = jnp.ones((1, 2), jnp.int32), model.init_cache(1, 8)
calls = [
    lambda: model(ids), lambda: model.step(ids, cache), lambda: model.init_cache(1, 8), lambda: ling3.trace(model, ids),
    lambda: ling3.generate(model, [[3]]), lambda: ling3.load("nano"), lambda: ling3.Engine(model),
    lambda: engine.generate([[3]]), lambda: engine.submit([3]), lambda: engine.stream([3]), engine.step, engine.stats,
    lambda: engine.abort(0), engine.warmup, lambda: engine.has_work, grandchild,
]
assert child(calls) == 0
print("done")
"""


@pytest.mark.slow
def test_a_forked_child_is_told_to_be_spawned():
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n") and done.stderr == ""
