"""A weight matrix is one type: another way to store it fits without a change to any layer, to `load` or to `save`."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float, Int8
from tiny import FLASH, TINY, open_model

import ling3
from ling3 import families
from ling3.cache import Span
from ling3.checkpoint import weight_names
from ling3.checkpoint.names import structure
from ling3.families import ling3 as family
from ling3.layers.linear import Linear, Matrix
from ling3.leaves import array_leaves

TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 96, size=(2, 21)), jnp.int32)


class Scaled(Matrix):
    """W = weight_scale · weight, of integers and a scale for each row: how quantized checkpoints store matrices."""

    weight: Int8[Array, "*stack rows columns"]
    weight_scale: Float[Array, "*stack rows"]
    axes: tuple[str, ...] = eqx.field(static=True)
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def of(matrix):
        scale = jnp.max(jnp.abs(matrix.dense()), axis=-1) / 127
        return Scaled(
            weight=jnp.round(matrix.dense() / scale[..., None]).astype(jnp.int8), weight_scale=scale, axes=matrix.axes
        )

    @property
    def shape(self):
        return self.weight.shape

    @property
    def dtype(self):
        return self.weight_scale.dtype

    @property
    def operand(self):
        return self.dense()

    def dense(self):
        return self.weight.astype(self.dtype) * self.weight_scale[..., None]

    def product(self, x, execution):
        return Linear(weight=self.dense()).product(x, execution)

    def row(self, index, execution):
        return self.weight[index].astype(self.dtype) * self.weight_scale[index][..., None]


def is_matrix(node):
    return isinstance(node, Matrix)


def each(function, model):
    return jax.tree.map(lambda node: function(node) if is_matrix(node) else node, model, is_leaf=is_matrix)


@pytest.fixture
def quantized(monkeypatch):
    """Ling-3 as a family whose matrices are all `Scaled`."""

    def init(config, *, key, dtype):
        return each(Scaled.of, family.init(config, key=key, dtype=dtype))

    monkeypatch.setattr(families, "_FAMILIES", [dataclasses.replace(family.FAMILY, init=init)])
    return ling3.init(TINY, key=jax.random.key(1))


@pytest.mark.slow
def test_another_kind_computes_as_its_dense_numbers_do(quantized):
    dense = each(lambda matrix: Linear(weight=matrix.dense(), axes=matrix.axes), quantized)
    assert not [matrix for matrix in jax.tree.leaves(quantized, is_leaf=is_matrix) if isinstance(matrix, Linear)]
    np.testing.assert_allclose(quantized(TOKENS), dense(TOKENS), atol=1e-5)
    (prompt,) = TOKENS[:1].tolist()
    small = {"num_pages": 8, "page_size": 16, "max_model_len": 64, "chunked_prefill_size": 32, "token_paddings": (32,)}
    engine = ling3.Engine(quantized, max_running_requests=2, **small)
    (output,) = engine.generate([prompt], ling3.SamplingParams(max_tokens=6))
    assert [list(output.token_ids)] == ling3.generate(quantized, [prompt], max_tokens=6)


@pytest.mark.slow
def test_another_kind_is_saved_and_loaded_as_it_is(quantized, tmp_path):
    ling3.save(quantized, tmp_path / "x")
    for dtype in (None, jnp.float32):
        loaded = ling3.load(tmp_path / "x", dtype)
        assert jax.tree.structure(loaded) == jax.tree.structure(quantized)
        for found, array in zip(jax.tree.leaves(loaded), jax.tree.leaves(quantized), strict=True):
            assert found.dtype == array.dtype and jnp.array_equal(found, array)
    names = {weight.name: weight.shape for weight in weight_names(TINY)}
    assert names["model.layers.1.mlp.experts.7.up_proj.weight_scale"] == (16,)
    assert names["lm_head.weight"] == (96, 32) and names["lm_head.weight_scale"] == (96,)


def test_integers_are_not_taken_for_floats(quantized, tmp_path):
    cast = eqx.tree_at(lambda m: m.lm_head.weight, quantized, replace_fn=lambda w: w.astype(jnp.float32))
    with pytest.raises(ling3.CheckpointError, match=r"lm_head.weight: found float32\[96, 32\].* of int8"):
        ling3.save(cast, tmp_path / "x")
    ling3.save(quantized, tmp_path / "x")
    families._FAMILIES[:] = [family.FAMILY]
    with pytest.raises(
        ling3.CheckpointError, match=r"word_embeddings.weight, in .*: found I8; expected F32, BF16, F16"
    ):
        ling3.load(tmp_path / "x")


@pytest.mark.parametrize("config", [TINY, FLASH])
def test_every_array_has_its_axes(config):
    """Axes of one name have one size, but for those whose size is the part's own, and heads for their factors."""
    sizes = {}
    for leaf in array_leaves(structure(config)):
        assert len(leaf.axes) == leaf.value.ndim, leaf.path
        for axis, size in zip(leaf.axes, leaf.value.shape, strict=True):
            sizes.setdefault(axis, set()).add(size)
    assert sizes["vocab"] == {config.vocab_size} and sizes["hidden"] == {config.hidden_size}
    assert sizes["experts"] == {config.num_experts}
    assert not [size for size in sizes["heads"] if size % config.num_attention_heads]
    assert sizes["intermediate"] == {config.intermediate_size, config.moe_intermediate_size}


def test_every_module_knows_its_name():
    for leaf in array_leaves(open_model(TINY)):
        if hasattr(leaf.module, "name"):
            assert leaf.module.name == leaf.path.split(".")[-2], leaf.path


def test_a_profile_reads_like_the_tree():
    watched = jax.jit(lambda model, tokens: model.watched(tokens, Span.whole(*tokens.shape)))
    text = watched.lower(open_model(TINY), TOKENS).as_text(debug_info=True)
    for path in (
        "word_embeddings",
        "layers.0/input_layernorm",
        "layers.0/attention/q_proj",
        "layers.0/attention/q_conv1d",
        "layers.0/attention/o_norm",
        "layers.0/mlp/gate_proj",
        "layers.2/attention/kv_a_proj_with_mqa",
        "layers.2/mlp/gate",
        "layers.2/mlp/experts",
        "layers.2/mlp/shared_experts/down_proj",
        "norm",
        "lm_head",
    ):
        assert f"{path}/" in text, path


@pytest.mark.slow
def test_the_accumulation_dtype_is_an_argument():
    """Sums in float64 are those of float64; nothing else of a float32 model changes its dtype."""
    with pytest.raises(ValueError, match="accumulation is 'bfloat16', expected 'float32' or 'float64'"):
        ling3.Execution(accumulation="bfloat16")
    with pytest.raises(ValueError, match="set jax_enable_x64 first"):
        ling3.Execution(accumulation="float64")
    draw = np.random.default_rng(0)
    x, weight = draw.standard_normal((5, 512)), draw.standard_normal((7, 512))
    with jax.enable_x64(True):
        matrix, rows = Linear(weight=jnp.asarray(weight, jnp.float32)), jnp.asarray(x, jnp.float32)
        exact = np.asarray(rows, np.float64) @ np.asarray(matrix.weight, np.float64).T
        y = matrix(rows, ling3.Execution(accumulation="float64"), jnp.float64)
        np.testing.assert_allclose(y, exact, rtol=1e-12, atol=1e-12)
        assert math.fsum(np.abs(np.asarray(matrix(rows, dtype=jnp.float64)) - exact).ravel()) > 1e-6
        model = open_model(TINY)
        wide = model(TOKENS, dataclasses.replace(ling3.Execution.default(), accumulation="float64"))
        np.testing.assert_allclose(wide, model(TOKENS), atol=2e-5)
        assert wide.dtype == jnp.float32
