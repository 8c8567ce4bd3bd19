"""GGUF files of Qwen's hybrids and of DeepSeek-V3: the same model as from the checkpoint that a file was made of."""

import gguf_files
import numpy as np
import pytest
from block_matrices import drawn
from gguf_hybrids import ARCHITECTURES, model_of

import ling3
from ling3.checkpoint.gguf_checkpoint import published_tensors
from ling3.checkpoint.gguf_file import open_gguf
from ling3.families import ConfigError
from ling3.formats.gguf_blocks import BLOCKS, GgufBlocks
from ling3.layers.gated_deltanet import GatedDeltaNet
from ling3.leaves import array_leaves

UNSAID = {"bos_token_id", "initializer_range", "layer_types", "max_window_layers", "pad_token_id"}
"""Fields that a file does not state, and that change no logit, and one that has another form in it."""


def assert_same(found, expected):
    """The arrays are equal, but for the rounding of an exponential, and of a sum with 1."""
    for own, other in zip(array_leaves(found), array_leaves(expected), strict=True):
        assert own.path == other.path
        rounded = own.path.endswith(("A_log", "norm.weight"))
        np.testing.assert_allclose(own.value, other.value, rtol=0, atol=2e-7 if rounded else 0, err_msg=own.path)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_the_model_that_the_file_was_made_of(name, tmp_path):
    model = model_of(name)
    found = ling3.load(gguf_files.write_model(tmp_path / "model.gguf", model, ARCHITECTURES[name]))
    assert_same(found, model)
    said, expected = (own.get("text_config", own) for own in (found.config.to_dict(), model.config.to_dict()))
    assert {k: v for k, v in said.items() if k not in UNSAID} == {k: v for k, v in expected.items() if k not in UNSAID}
    assert getattr(found.config, "layer_types", ()) == getattr(model.config, "layer_types", ())


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if "qwen" in name])
def test_with_a_layer_of_multi_token_prediction(name, tmp_path):
    model = model_of(name, 1)
    path = gguf_files.write_model(tmp_path / "model.gguf", model, ARCHITECTURES[name])
    assert_same(ling3.load(path, mtp=True), model)
    assert ling3.load(path).mtp == ()


def file_of(tmp_path, name, change, **changes):
    """A file of the model whose tensors `change` changes in place, and the model; `changes` are of its config."""
    model = model_of(name, **changes)
    tensors = gguf_files.tensors_of(model)
    change(tensors)
    metadata = gguf_files.metadata_of(model.config, ARCHITECTURES[name])
    return ling3.load(gguf_files.write(tmp_path / "model.gguf", metadata, tensors)), model


def stored(blocks):
    return blocks.block, np.asarray(blocks.weight), blocks.shape


def attention(model) -> GatedDeltaNet:
    return model.model.layers[0].attention


def test_an_old_file_has_the_matrix_of_all_four(tmp_path):
    def change(tensors):
        del tensors["blk.0.attn_qkv.weight"], tensors["blk.0.attn_gate.weight"]
        tensors["blk.0.ssm_in.weight"] = np.asarray(attention(model_of("qwen3-next")).in_proj_qkvz.weight)

    found, model = file_of(tmp_path, "qwen3-next", change)
    assert_same(found, model)


@pytest.mark.parametrize(("qkv", "gate"), [("Q8_0", "Q8_0"), ("Q5_0", "Q8_0")])
def test_rows_in_another_order_keep_their_blocks(qkv, gate, tmp_path):
    """Two tensors of one type are joined in their blocks, those of two types in float32."""
    parts = {"blk.0.attn_gate.weight": drawn(gate, 128, 2), "blk.0.attn_qkv.weight": drawn(qkv, 256, 2, seed=1)}
    found, _ = file_of(tmp_path, "qwen3-next", lambda t: t.update({name: stored(own) for name, own in parts.items()}))
    own = attention(found).in_proj_qkvz
    assert isinstance(own, GgufBlocks) == (qkv == gate)
    numbers = own.decoded() if isinstance(own, GgufBlocks) else own.weight
    z, qkv_rows = (np.asarray(part.decoded()) for part in parts.values())
    # Two key heads of 32 channels, each with two heads of 32 values.
    for head in range(2):
        q, k, v, z_rows = np.split(np.asarray(numbers)[192 * head : 192 * (head + 1)], [32, 64, 128])
        np.testing.assert_array_equal(q, qkv_rows[32 * head : 32 * (head + 1)])
        np.testing.assert_array_equal(k, qkv_rows[64 + 32 * head : 64 + 32 * (head + 1)])
        np.testing.assert_array_equal(v, qkv_rows[128 + 64 * head : 128 + 64 * (head + 1)])
        np.testing.assert_array_equal(z_rows, z[64 * head : 64 * (head + 1)])


@pytest.mark.parametrize(("kind", "heads"), [("Q8_0", [0, 2, 1, 3]), ("Q4_K", [0, 2, 4, 6, 1, 3, 5, 7])])
def test_columns_in_another_order_keep_blocks_that_fit_a_head(kind, heads, tmp_path):
    """A head has 32 channels: blocks of 32 move whole; those of 256, in which are eight heads, are decoded."""
    own = drawn(kind, 64, len(heads) * 32 // BLOCKS[kind].columns)
    changes = {"linear_num_value_heads": len(heads)}
    found, _ = file_of(tmp_path, "qwen3.5", lambda t: t.update({"blk.0.ssm_out.weight": stored(own)}), **changes)
    moved = attention(found).out_proj
    assert isinstance(moved, GgufBlocks) == (kind == "Q8_0")
    numbers = moved.decoded() if isinstance(moved, GgufBlocks) else moved.weight
    by_head = np.asarray(own.decoded()).reshape(64, len(heads), 32)
    np.testing.assert_array_equal(numbers, by_head[:, heads].reshape(64, -1))


def test_a_part_of_an_array_in_another_order_is_that_part(tmp_path):
    model = model_of("qwen3.5")
    path = gguf_files.write_model(tmp_path / "model.gguf", model, "qwen35")
    tensors = published_tensors(open_gguf(path), model.config)
    tensor = tensors["model.language_model.layers.0.linear_attn.out_proj.weight"]
    part = np.empty((3, 5), np.float32)
    tensor.read(7, part, 128)  # five elements of every 128
    np.testing.assert_array_equal(part, np.asarray(attention(model).out_proj.weight)[:3, 7:12])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.recurrent_layers": [True]}, "attention.recurrent_layers: found 1 values; expected one for each"),
        ({"ssm.inner_size": 127}, "ssm.inner_size.*found .*127.*expected whole numbers"),
        ({"rope.dimension_count": None}, "rope.dimension_count.*found .*None.*expected whole numbers"),
        ({"expert_gating_func": 2}, "expert_gating_func: found 2; expected 1, the softmax"),
        ({"ssm.dt_b_c_rms": 1}, "qwen35.ssm.dt_b_c_rms: found 1; unknown key"),
    ],
)
def test_metadata_that_cannot_be_read(changes, message, tmp_path):
    changes = {f"qwen35.{key}": value for key, value in changes.items()}
    with pytest.raises(ConfigError, match=message):
        ling3.load(gguf_files.write_model(tmp_path / "model.gguf", model_of("qwen3.5"), "qwen35", **changes))


def test_without_a_list_of_layers_the_interval_says_which_are_full(tmp_path):
    changes = {"qwen35.attention.recurrent_layers": None, "qwen35.full_attention_interval": 2}
    found = ling3.load(gguf_files.write_model(tmp_path / "model.gguf", model_of("qwen3.5"), "qwen35", **changes))
    assert found.config.layer_types == ("linear_attention", "full_attention")


def test_a_deepseek_v2_is_refused_by_its_router(tmp_path):
    changes = {"deepseek2.expert_gating_func": 1}
    with pytest.raises(ConfigError, match="expert_gating_func: found 1; expected 2, the sigmoid"):
        ling3.load(gguf_files.write_model(tmp_path / "model.gguf", model_of("deepseek-v3"), "deepseek2", **changes))
