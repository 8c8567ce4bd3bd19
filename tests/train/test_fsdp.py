"""Training over fake devices: the numbers are one device's, and each device has its part of everything."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_transformers
from exhaustive_cases import exhaustively
from jax.sharding import PartitionSpec
from tiny import TINY, open_model

import ling3
from ling3.mesh import MeshError, place, placement
from ling3.train import Batch, Fsdp, Optimization, balanced, loop, next_token_loss, train
from ling3.train.loop import loss_and_gradient

DEVICES = 4
WITHIN = 1e-5
"""How far a loss, or a number of an array, may be from one device's, in shares of the (array's) largest."""


def mesh(data=DEVICES, tensor=1, names=("data", "tensor")):
    return jax.make_mesh((data, tensor), names, devices=jax.devices()[: data * tensor])


@functools.cache
def model(name):
    if name == "ling3":
        return open_model(dataclasses.replace(TINY, num_hidden_layers=2, layer_group_size=2))
    return tiny_transformers.open_model(name)


def batches(name, rows=8):
    rng = np.random.default_rng(0)
    while True:
        tokens = rng.integers(3, model(name).config.vocab_size, (rows, 20))
        yield Batch(jnp.asarray(tokens, jnp.int32), jnp.asarray(rng.integers(0, 2, (rows, 20)), jnp.float32))


def is_near(found, expected):
    return np.abs(np.asarray(found) - np.asarray(expected)).max() <= WITHIN * np.abs(expected).max()


def lie_by_the_rule(fsdp, tree):
    """True if each array's devices have the part of it that the rule says."""
    arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    return all(x.sharding.is_equivalent_to(fsdp.sharding(x.shape), x.ndim) for x in arrays)


def share_of_a_device(tree):
    """Bytes of its arrays on the fullest device, in shares of all bytes."""
    arrays = jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    parts = [(shard.device, shard.data.nbytes) for x in arrays for shard in x.addressable_shards]
    fullest = max(sum(size for at, size in parts if at == device) for device in jax.devices())
    return fullest / sum(x.nbytes for x in arrays)


gradient_of = eqx.filter_jit(loss_and_gradient)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data", "tensor"),
    [("ling3", 4, 1), ("qwen3", 2, 2), *exhaustively([("qwen3-moe", 4, 1)])],
)
def test_loss_and_gradients_are_those_of_one_device(name, data, tensor):
    fsdp, whole, batch = Fsdp(mesh(data, tensor)), balanced(model(name)), next(batches(name))
    expected, gradient = gradient_of(whole, batch)
    loss, own = gradient_of(fsdp.place(whole), fsdp.rows(batch), fsdp)
    assert is_near(loss, expected)
    for found, one in zip(jax.tree.leaves(own), jax.tree.leaves(gradient), strict=True):
        assert is_near(found, one)
    assert lie_by_the_rule(fsdp, own)


def trained(monkeypatch, name, method, dtype, mesh):
    """The model, the optimizer's state, and the loss and imbalance of each step."""
    points, states, updated = [], [], loop._updated
    monkeypatch.setattr(loop, "_updated", lambda *given: states.append(after := updated(*given)) or after)
    optimization = Optimization(3, method=method, learning_rate=1e-3, warmup=0)
    start = jax.tree.map(lambda x: x.astype(dtype), model(name))
    result = train(start, batches(name), optimization, every=1, report=lambda p, _: points.append(p), mesh=mesh)
    monkeypatch.undo()
    return result, states[-1].state, np.asarray([(point.loss, point.imbalance) for point in points])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "method", "dtype"),
    [
        ("qwen3", "adamw", "float32"),
        # In float64, since Muon turns the rounding of gradients into directions: what is small in them gets as large.
        pytest.param("ling3", "muon", "float64", marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_one_device(monkeypatch, name, method, dtype):
    with jax.enable_x64(dtype == "float64"):
        expected, _, one = trained(monkeypatch, name, method, dtype, None)
        found, state, own = trained(monkeypatch, name, method, dtype, mesh())
        assert np.abs(own - one).max() <= WITHIN * np.abs(one).max()
        assert np.unique(one[:, 0]).size == 3
        for after, whole in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert is_near(after, whole)
    assert jax.tree.structure(found) == jax.tree.structure(model(name))
    assert lie_by_the_rule(Fsdp(mesh()), (found, state))
    # Vectors of fewer numbers than there are devices are whole on each.
    assert 1 / DEVICES <= share_of_a_device((found, state)) < 1.03 / DEVICES


def test_an_array_is_cut_along_its_largest_axis_that_divides():
    fsdp = Fsdp(mesh())
    shapes = {(8, 12): (None, "data"), (8, 8): ("data",), (8, 13): ("data",), (4, 6, 16): (None, None, "data")}
    for shape, spec in (shapes | {(3, 5): (), (): (), (2,): ()}).items():
        assert fsdp.spec(shape) == PartitionSpec(*spec)


@pytest.mark.thorough
def test_a_model_that_lies_so_is_saved_like_any_other(tmp_path):
    fsdp, whole = Fsdp(mesh()), model("ling3")
    ling3.save(whole, tmp_path / "one")
    ling3.save(fsdp.place(whole), tmp_path / "mesh")
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "mesh").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "mesh" / name).read_bytes()


def test_training_goes_on_from_a_copy():
    fsdp = Fsdp(mesh())
    first = fsdp.place(model("qwen3"))
    again = fsdp.place(first)
    jax.tree.map(lambda x: x.delete(), again)
    assert np.isfinite(np.asarray(first.model.norm.weight)).all()


def test_what_cannot_be_divided_says_why():
    optimization = Optimization(1, warmup=0)
    with pytest.raises(ValueError, match=r"the batch has 6 rows, which the 4 devices along 'data' .* a multiple of 4"):
        train(model("qwen3"), batches("qwen3", 6), optimization, mesh=mesh())
    with pytest.raises(MeshError, match=r"the mesh has the axes x, tensor; training cuts along 'data'"):
        train(model("qwen3"), batches("qwen3"), optimization, mesh=mesh(names=("x", "tensor")))


@pytest.mark.parametrize("way", [lambda f: f, eqx.filter_jit])
def test_a_model_placed_for_inference_has_no_gradients(way):
    placed, batch = place(model("qwen3"), mesh(1, 2)), next(batches("qwen3"))
    with pytest.raises(NotImplementedError, match=r"no gradients.*ling3\.train\.train\(model, \.\.\., mesh=mesh\)"):
        way(eqx.filter_grad(next_token_loss))(placed, batch)
    with pytest.raises(NotImplementedError, match="no gradients"):
        way(lambda m: eqx.filter_jvp(lambda m: next_token_loss(m, batch), (m,), (m,)))(placed)


def test_what_refuses_gradients_leaves_the_program_as_it_is(monkeypatch):
    placed = place(model("qwen3"), mesh(1, 2))

    def program():
        def forward(arrays, tokens):
            part, where = eqx.combine(arrays, statics), (PartitionSpec(),)
            return placed.placement.run(lambda part, x: part(x), (tokens,), where, PartitionSpec(), part)

        arrays, statics = eqx.partition(placed.part, eqx.is_array)
        return jax.jit(forward).lower(arrays, jnp.ones((1, 8), jnp.int32)).as_text()

    guarded = program()
    monkeypatch.setattr(placement, "_without_derivative", lambda arrays: arrays)
    assert program() == guarded
