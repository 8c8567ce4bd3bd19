"""DeepSeek-V3: its multi-token prediction, its FP8 files, and what its config refuses."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import transformer_reference
from published_transformers import DEEPSEEK_V3
from tiny_transformers import TOKENS, open_model, write

import ling3
from ling3.checkpoint import safetensors_file
from ling3.families import read_config
from ling3.families.deepseek_v3 import DeepseekV3Config
from ling3.formats import Fp8
from ling3.interpret.inspect import report
from ling3.layers.linear import Linear

LAYER = "model.layers.2"
FP8 = DEEPSEEK_V3["quantization_config"]


@pytest.fixture
def published(tmp_path):
    """A checkpoint with a multi-token-prediction layer and its copies of embedding and head, as it is published."""
    write("deepseek-v3", tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors, draw = safetensors.numpy.load_file(tmp_path / "model.safetensors"), np.random.default_rng(1)
    for name in [name for name in tensors if ".layers.1." in name]:
        own = tensors[name]
        tensors[name.replace(".1.", ".2.", 1)] = own + 0.2 * draw.standard_normal(own.shape, np.float32)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{LAYER}.{name}.weight"] = draw.uniform(0.5, 1.5, 32).astype(np.float32)
    tensors[f"{LAYER}.eh_proj.weight"] = 0.2 * draw.standard_normal((32, 64), np.float32)
    tensors[f"{LAYER}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{LAYER}.shared_head.head.weight"] = tensors["lm_head.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.thorough
def test_multi_token_prediction_is_skipped_or_kept(published, tmp_path):
    """Its logits are those of the equations (arXiv 2412.19437, §2.2)."""
    plain = ling3.load(published)
    assert not plain.mtp and equal(plain.model, open_model("deepseek-v3").model)
    model = ling3.load(published, mtp=True)
    weights = safetensors.numpy.load_file(published / "model.safetensors")
    at, config = transformer_reference.reader(weights), model.config
    layer, hidden = at("layers.2"), transformer_reference.hidden(at, config, TOKENS)
    embedded = at("embed_tokens").weight[np.asarray(TOKENS[1:])]
    norm = transformer_reference.norm
    both = [norm(layer, "enorm", config, embedded), norm(layer, "hnorm", config, hidden[:-1])]
    x = transformer_reference.decoded(layer, config, 2, layer.linear("eh_proj", np.concatenate(both, axis=-1)))
    expected = norm(layer("shared_head"), "norm", config, x) @ weights["lm_head.weight"].T
    found = ling3.mtp_logits(model, jnp.asarray([TOKENS], jnp.int32))[0]
    np.testing.assert_allclose(found, expected, atol=5e-5)  # rounding, through a layer more than the model's logits
    ling3.save(model, tmp_path / "own")
    assert equal(ling3.load(tmp_path / "own", mtp=True), model)
    copies = {f"{LAYER}.embed_tokens.weight", f"{LAYER}.shared_head.head.weight"}
    assert safetensors.numpy.load_file(tmp_path / "own" / "model.safetensors").keys() == weights.keys() - copies


def test_copies_that_differ_are_refused(published):
    file = published / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    tensors[f"{LAYER}.shared_head.head.weight"] = -tensors["lm_head.weight"]
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(ling3.CheckpointError, match=r"shared_head\.head\.weight, in .*: differs from lm_head\.weight"):
        ling3.load(published, mtp=True)


@pytest.mark.thorough
def test_fp8_files_keep_their_bits_beside_matrices_in_floats(published, tmp_path):
    """As published, with `eh_proj` in bfloat16, of which the config says nothing."""
    raw = json.loads((published / "config.json").read_text()) | {"quantization_config": FP8}
    (published / "config.json").write_text(json.dumps(raw))
    random = ling3.init(read_config(published), key=jax.random.key(0), dtype=jnp.bfloat16, mtp=True)
    ling3.save(random, tmp_path / "fp8")
    tensors = arrays(tmp_path / "fp8")
    assert tensors[f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (1, 1)
    del tensors[f"{LAYER}.eh_proj.weight_scale_inv"]
    tensors[f"{LAYER}.eh_proj.weight"] = np.ones((32, 64), ml_dtypes.bfloat16)
    specs = {name: (array.dtype, array.shape) for name, array in tensors.items()}
    safetensors_file.write(tmp_path / "fp8" / "model.safetensors", specs, tensors.__getitem__)
    model = ling3.load(tmp_path / "fp8", mtp=True)
    assert isinstance(model.mtp[0].eh_proj, Linear) and isinstance(model.mtp[0].attention.q_b_proj, Fp8)
    assert jnp.all(jnp.isfinite(ling3.mtp_logits(model, jnp.asarray([TOKENS], jnp.int32))))
    ling3.save(model, tmp_path / "again")
    again = arrays(tmp_path / "again")
    assert again.keys() == tensors.keys() and all(again[n].tobytes() == tensors[n].tobytes() for n in again)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 3}, r"n_group: found 3; expected a divisor of n_routed_experts, 256"),
        ({"topk_group": 9}, r"topk_group: found 9; expected at most n_group, 8"),
        ({"num_experts_per_tok": 129}, r"num_experts_per_tok: found 129; expected at most 128"),
        ({"first_k_dense_replace": 62}, r"first_k_dense_replace: found 62; expected at most 61"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads: found 8; expected 128"),
        ({"index_topk": 2048}, r"index_topk: found 2048; unknown field"),
        ({"kv_lora_rank": None}, r"kv_lora_rank: not in this config"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_field(fields, message):
    with pytest.raises(ling3.ConfigError, match=message):
        DeepseekV3Config.from_dict(DEEPSEEK_V3 | fields)


def test_scores_have_yarn_s_factor_and_latents_an_eps_of_their_own():
    """(0.1 ln 40 + 1)² on the softmax scale; queries and keys are not multiplied, as both mscales are 1."""
    mla = open_model("deepseek-v3").model.layers[0].attention
    assert mla.score_factor == pytest.approx((0.1 * np.log(40) + 1) ** 2) and mla.rotation.magnitude == 1
    assert mla.q_a_layernorm.eps == mla.kv_a_layernorm.eps == 1e-6 and mla.g_proj is None


@pytest.mark.thorough
def test_it_is_inspected_and_traced():
    model = open_model("deepseek-v3")
    described = report(model.config, jnp.float32)
    assert described.memory.cache_per_token == 4 * 2 * (16 + 4)
    assert [(layer["attention"], layer["mlp"]) for layer in described.to_dict()["layers"]] == [
        ("mla", "dense"),
        ("mla", "moe"),
    ]
    seen = ling3.trace(model, jnp.asarray([TOKENS], jnp.int32))
    assert sorted(seen.mla) == [0, 1] and sorted(seen.moe) == [1] and seen.mla[0].gate is None


def equal(one, other):
    leaves = [jax.tree.leaves(tree) for tree in (one, other)]
    return len(leaves[0]) == len(leaves[1]) and all(map(jnp.array_equal, *leaves))


def arrays(directory):
    """The tensors of a checkpoint, also those in FP8, which NumPy's own reader does not know."""
    stored = safetensors_file.open_file(directory / "model.safetensors")
    return {name: tensor.array() for name, tensor in stored.items()}
