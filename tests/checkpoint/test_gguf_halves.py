"""The two halves of MLA's `kv_b_proj` in GGUF files: in their stored blocks, in memory and on a mesh."""

import dataclasses

import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_matrices import drawn
from random_adapters import random_adapter
from random_checkpoint import TINY_LIKE

import ling3
from ling3.checkpoint import CheckpointError
from ling3.formats import KeyValueHalves
from ling3.formats.gguf_blocks import BLOCKS
from ling3.interpret import inspect
from ling3.layers.linear import Linear

SIZES = {"kv_lora_rank": 32, "qk_nope_head_dim": 64, "v_head_dim": 16, "num_attention_heads": 4}
ONE_LAYER = {"num_hidden_layers": 1, "layer_group_size": 1, "first_k_dense_replace": 1}
CONFIG = dataclasses.replace(TINY_LIKE, **SIZES, **ONE_LAYER)
NAMES = "blk.0.attn_k_b.weight", "blk.0.attn_v_b.weight"
TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, CONFIG.vocab_size, (2, 9)), jnp.int32)


def halves(keys="Q5_0", values="Q8_0"):
    """Random halves of one layer in these block types."""
    return drawn(keys, 32, 64 // BLOCKS[keys].columns, 4), drawn(values, 16, 32 // BLOCKS[values].columns, 4, seed=1)


def stored(half):
    return half.block, np.asarray(half.weight), half.shape


def joined(own):
    keys, values = (np.asarray(half.decoded()) for half in own)
    return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, 32)


def written(path, **tensors):
    """A file of the model, with these tensors in place of its own."""
    model = ling3.init(CONFIG, key=jax.random.key(0))
    own = {**gguf_files.tensors_of(model), **tensors}
    kept = {name: tensor for name, tensor in own.items() if tensor is not None}
    return gguf_files.write(path / "model.gguf", gguf_files.metadata_of(CONFIG, "bailingmoe3"), kept)


@pytest.fixture
def file(tmp_path):
    return written(tmp_path, **dict(zip(NAMES, map(stored, halves()), strict=True)))


def test_they_are_the_files_bytes(file):
    keys, values = halves()
    found = ling3.load(file).model.layers[0].attention.kv_b_proj
    assert isinstance(found, KeyValueHalves) and found.shape == (4 * (64 + 16), 32)
    assert (found.k_b.block, found.v_b.block) == ("Q5_0", "Q8_0")
    np.testing.assert_array_equal(found.k_b.weight, keys.weight)
    np.testing.assert_array_equal(found.v_b.weight, values.weight)
    rows = {row.path.rpartition("kv_b_proj.")[2]: row for row in inspect.report(file).arrays if "kv_b" in row.path}
    assert [(row.dtype, row.parameters) for row in rows.values()] == [("Q5_0", 8192), ("Q8_0", 2048)]


def test_dequantized_they_are_the_published_matrix(file):
    matrix = ling3.load(file, jnp.float32, dequantize=True).model.layers[0].attention.kv_b_proj
    assert isinstance(matrix, Linear)
    np.testing.assert_array_equal(matrix.weight, joined(halves()))


@pytest.mark.parametrize("float_half", [0, 1])
def test_a_half_in_floats_is_joined_with_the_other(float_half, tmp_path):
    own = halves()
    tensors = [np.asarray(half.decoded()) if i == float_half else stored(half) for i, half in enumerate(own)]
    found = ling3.load(written(tmp_path, **dict(zip(NAMES, tensors, strict=True))))
    np.testing.assert_array_equal(found.model.layers[0].attention.kv_b_proj.weight, joined(own))


@pytest.mark.slow
def test_a_mesh_has_the_heads_of_each_device(file):
    """And an adapter's rows for them."""
    mesh = jax.make_mesh((1, 2), ("data", "tensor"), devices=jax.devices()[:2])
    models = ling3.load(file), ling3.load(file, mesh=mesh)
    adapter = random_adapter(models[0])
    for each in (models, [ling3.with_adapter(model, adapter) for model in models]):
        for own, other in zip(*map(logits, each), strict=True):
            # As in tests/mesh: XLA may order sums differently for fewer heads.
            np.testing.assert_allclose(own, other, atol=1e-5)


def logits(model):
    """Logits of a prompt's last token, and of the token after it by a decode step."""
    cache = model.init_cache(2, 16)
    prefilled, cache = model.step(TOKENS[:, :8], cache, last=True)
    decoded, _ = model.step(TOKENS[:, 8:], cache)
    return np.asarray(prefilled), np.asarray(decoded)


def test_a_decode_step_is_the_last_token_of_a_prompt(file):
    model = ling3.load(file)
    np.testing.assert_allclose(logits(model)[1][:, 0], model(TOKENS)[:, -1], atol=2e-5)


def test_a_half_that_does_not_fit_is_refused(tmp_path):
    keys, values = halves()
    wrong = drawn("Q5_0", 24, 2, 4)
    with pytest.raises(CheckpointError, match=r"kv_b_proj.k_b.weight, in model.gguf: found \[4, 24, 44\]; expected"):
        ling3.load(written(tmp_path, **dict(zip(NAMES, map(stored, (wrong, values)), strict=True))))
    with pytest.raises(CheckpointError, match=r"attn_k_b|kv_b_proj"):
        ling3.load(written(tmp_path, **{NAMES[0]: stored(keys), NAMES[1]: None}))
