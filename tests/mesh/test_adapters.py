"""Adapters of a model on a mesh: what each device has of them, what they compute, and the bits of an engine."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_models
from adapted_engines import adapters, answers, are_near, engine, keeps_its_bits, open_model, requests
from exhaustive_cases import EXHAUSTIVE, exhaustively
from meshes import TOKENS, mesh, model, tolerance
from random_adapters import random_adapter

import ling3
from ling3.adapters.adapter import adaptable
from ling3.leaves import array_leaves
from ling3.mesh import Rules, place

SUMS, SAME_BITS, BOTH = Rules(sums=True), Rules(same_bits=True), Rules(experts=("data", "tensor"))


def are_same(found, expected, tolerance=0.0):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for leaf, own, other in zip(array_leaves(expected), jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert own.sharding == other.sharding, leaf.path
        np.testing.assert_allclose(np.asarray(own), np.asarray(other), rtol=0, atol=tolerance, err_msg=leaf.path)


@pytest.mark.parametrize("rules", [Rules(), SUMS, SAME_BITS], ids=["gathered", "sums", "same bits"])
@pytest.mark.parametrize("name", ["tiny", pytest.param("grouped", marks=pytest.mark.thorough)])
def test_it_is_placed_after_its_model_or_with_it(name, rules, tmp_path):
    """And so is a merged one: in the order of one device, but that products of fewer columns may be rounded otherwise.

    Weights near 0.1 have a unit of 7e-9 in their last place.
    """
    one, sharded = model(name), place(model(name), mesh(4), rules)
    adapter = random_adapter(one)
    are_same(ling3.with_adapter(sharded, adapter), place(ling3.with_adapter(one, adapter), mesh(4), rules))
    merged = place(ling3.merge_adapter(one, adapter), mesh(4), rules)
    are_same(ling3.merge_adapter(sharded, adapter), merged, 6e-8 if rules == SUMS else 0.0)
    ling3.save_adapter(adapter, tmp_path / "lora")
    assert jax.tree.leaves(ling3.load_adapter(sharded, tmp_path / "lora"))
    new = (ling3.new_adapter(own, rank=2, key=jax.random.key(0)) for own in (sharded, one))
    assert jax.tree.structure(next(new)) == jax.tree.structure(next(new))
    assert [own.matrix.shape for own in adaptable(sharded)] == [own.matrix.shape for own in adaptable(one)]


def test_a_device_has_the_rows_and_columns_of_its_matrix():
    """Of B the rows for its outputs, of A the columns for its inputs; its heads' neighbours have the same ones."""
    for name, rules in (("tiny", Rules()), ("grouped", SUMS)):
        whole = ling3.with_adapter(model(name), random_adapter(model(name)))
        sharded, cut = ling3.with_adapter(place(model(name), mesh(4), rules), random_adapter(model(name))), set()
        there = {leaf.path: leaf.value.sharding.shard_shape(leaf.value.shape) for leaf in array_leaves(sharded)}
        for leaf in array_leaves(whole):
            if leaf.field == "lora_B":
                base = there[leaf.path.replace("lora_B", "base.weight")]
                assert (there[leaf.path][0], there[leaf.path.replace("lora_B", "lora_A")][1]) == base, leaf.path
                cut |= {axis for axis in (0, 1) if base[axis] != leaf.module.shape[axis]}
        assert cut == ({0, 1} if rules == SUMS else {0})


def forward(model):
    """Logits after a prefill, and after a decode step."""
    tokens = jnp.asarray(TOKENS[:, :20], jnp.int32)
    prefilled, cache = model.step(tokens[:, :19], model.init_cache(2, 64))
    return [np.asarray(logits) for logits in (prefilled, model.step(tokens[:, 19:], cache)[0])]


@functools.cache
def expected(name):
    return forward(ling3.with_adapter(model(name), random_adapter(model(name))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor", "data", "rules"),
    [
        ("tiny", 2, 1, SUMS),
        ("grouped", 4, 1, SUMS),
        *(pytest.param("tiny", 4, 1, rules, marks=EXHAUSTIVE) for rules in (Rules(), SUMS, SAME_BITS)),
        pytest.param("grouped", 4, 1, Rules(), marks=EXHAUSTIVE),
        pytest.param("flash", 2, 2, BOTH, marks=EXHAUSTIVE),
    ],
)
def test_logits_are_those_of_one_device(name, tensor, data, rules):
    """As near as those of the base: an adapter's products are short sums of its size."""
    sharded = ling3.with_adapter(place(model(name), mesh(tensor, data), rules), random_adapter(model(name)))
    for found, own in zip(forward(sharded), expected(name), strict=True):
        assert np.abs(found - own).max() <= tolerance(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tensor", "data", "rules"),
    [
        ("llama", 2, 2, Rules()),
        ("tiny", 2, 1, Rules()),
        ("tiny", 2, 2, BOTH),
        *(pytest.param("tiny", 2, 1, rules, marks=EXHAUSTIVE) for rules in (SUMS, SAME_BITS)),
        pytest.param("llama", 1, 2, Rules(), marks=EXHAUSTIVE),
        pytest.param("llama", 4, 1, SUMS, marks=EXHAUSTIVE),
    ],
)
def test_an_answer_has_the_bits_of_its_solo_run(name, tensor, data, rules):
    """In company with two adapters and none; without an adapter those of an engine that has none, on the same mesh.

    The pages of a group of devices are too few for its requests, some of which are preempted.
    """
    sizes = {"decode_rows": 4 // data, "num_pages": 12 if data == 1 else 14}
    asked, found = keeps_its_bits(name, model=place(open_model(name), mesh(tensor, data), rules), **sizes)
    are_near(found, answers(engine(name), asked))


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("tensor", exhaustively([2, 4], but=[4]))
def test_bits_do_not_depend_on_the_number_of_devices_where_asked(tensor):
    own = {"a": random_adapter(model("tiny"), rank=3), "b": random_adapter(model("tiny"), seed=2, but=["kv_b_proj"])}
    sharded = (place(model("tiny"), mesh(count), SAME_BITS) for count in (1, tensor))
    one, many = (answers(engine("tiny", model=each, adapters=own), requests()) for each in sharded)
    assert one == many


@pytest.mark.thorough
def test_what_is_refused():
    own, adapter = place(open_model("llama"), mesh(2)), adapters("llama")["a"]
    with pytest.raises(ling3.AdapterError, match="the model has an adapter already"):
        ling3.with_adapter(ling3.with_adapter(own, adapter), adapter)
    with pytest.raises(ling3.AdapterError, match="the model lies on a mesh, and the adapter's arrays are traced"):
        jax.grad(lambda adapter: ling3.with_adapter(own, adapter))(adapter)
    with pytest.raises(ling3.AdapterError, match="adapter 'x': the adapter is for another model"):
        engine(model=own, adapters={"x": random_adapter(open_model("qwen3"))})
    with pytest.raises(ling3.CheckpointError, match=r"lora_A is of an adapter"):
        ling3.save(ling3.with_adapter(own, adapter), "nowhere")
    quantized = quantized_models.model("int4")
    with pytest.raises(ling3.AdapterError, match="cannot be merged into quantized matrices"):
        ling3.merge_adapter(place(quantized, mesh(1)), random_adapter(quantized))
