"""GLM-5.3-Flash: its whole files, what its config refuses, and the laws of its indexer's pools."""

import dataclasses
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from exhaustive_cases import exhaustively
from published_transformers import GLM_53_FLASH
from quantized_models import FP8
from random_adapters import random_adapter
from tiny_transformers import TOKENS, open_model, write

import ling3
from ling3.adapters.adapter import adaptable
from ling3.cache import Span
from ling3.checkpoint import safetensors_file
from ling3.families import read_config
from ling3.families.glm5_next import Glm5NextConfig
from ling3.formats import Fp8
from ling3.interpret.inspect import report
from ling3.layers.linear import Linear
from ling3.mesh import place

TEXT = GLM_53_FLASH["text_config"]
ROW = jnp.asarray([TOKENS], jnp.int32)
FURTHER = "model.language_model.layers.2"


@pytest.fixture(scope="module")
def model():
    return open_model("glm5-next")


def equal(one, other):
    leaves = [jax.tree.leaves(tree) for tree in (one, other)]
    return len(leaves[0]) == len(leaves[1]) and all(map(jnp.array_equal, *leaves))


def whole_file(directory, **fields):
    """The tiny checkpoint as it would be published: nested, with vision and a multi-token-prediction layer."""
    write("glm5-next", directory)
    text = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1} | fields
    text.pop("architectures")
    (directory / "config.json").write_text(json.dumps(GLM_53_FLASH | {"text_config": text}))
    tensors = safetensors.numpy.load_file(directory / "model.safetensors")
    tensors |= {name.replace(".1.", ".2.", 1): own for name, own in tensors.items() if ".layers.1." in name}
    ones = np.ones(4, np.float32)
    tensors |= {f"{FURTHER}.enorm.weight": ones, f"{FURTHER}.shared_head.head.weight": ones}
    return tensors | {"model.visual.blocks.0.norm1.weight": ones}


@pytest.mark.thorough
def test_the_text_model_of_a_whole_file_is_read(model, tmp_path):
    """Vision and multi-token prediction are skipped, and nothing else; `save` writes a nested config."""
    tensors, file = whole_file(tmp_path), tmp_path / "model.safetensors"
    safetensors.numpy.save_file(tensors, file)
    loaded = ling3.load(tmp_path)
    assert equal(loaded, model) and loaded.config.num_nextn_predict_layers == 1
    ling3.save(loaded, tmp_path / "own")
    assert equal(ling3.load(tmp_path / "own"), model)
    raw = json.loads((tmp_path / "own" / "config.json").read_text())
    assert raw["model_type"] == "glm5_next" and raw["text_config"]["layer_types"][1] == "deepseek_sparse_attention"
    safetensors.numpy.save_file(tensors | {"model.language_model.layers.3.x": np.ones(4, np.float32)}, file)
    with pytest.raises(ling3.CheckpointError, match=r"no place for:\n    model\.language_model\.layers\.3\.x, in"):
        ling3.load(tmp_path)


LINEAR = TEXT["linear_attn_config"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"index_topk": 2046}, r"index_topk: found 2046; expected a multiple of index_kpool, 4"),
        ({"indexer_types": ["full"] * 44 + ["shared"]}, r"indexer_types: .*in ling3 each layer runs its indexer"),
        ({"index_topk_pattern": "FS"}, r"index_topk_pattern: found 'FS'"),
        ({"index_kpool_always_select_tail": False}, r"index_kpool_always_select_tail: found False; expected True"),
        ({"index_kpool_compress": False}, r"index_kpool_compress: found False"),
        ({"qk_rope_head_dim": 64}, r"qk_rope_head_dim: found 64; expected 0; in ling3 no channel is rotated"),
        ({"mla_use_nope": False}, r"mla_use_nope: found False"),
        ({"attn_output_gate": True}, r"attn_output_gate: found True"),
        ({"scoring_func": "softmax"}, r"scoring_func: found 'softmax'"),
        ({"q_lora_rank": None}, r"q_lora_rank: not in this config"),
        ({"index_kpool": None}, r"index_kpool: not in this config"),
        ({"num_key_value_heads": 8}, r"num_key_value_heads: found 8; expected 64"),
        ({"layer_types": ["linear_attention"] * 45}, r"layer_types: found .*from the other fields"),
        ({"first_k_dense_replace": 2}, r"first_k_dense_replace: found 2; expected 3"),
        ({"linear_attn_config": LINEAR | {"gate_lower_bound": None}}, r"gate_lower_bound: not in this config"),
        ({"linear_attn_config": LINEAR | {"safe_gate": False}}, r"linear_attn_config\.safe_gate: found False"),
        ({"linear_attn_config": LINEAR | {"kda_layers": [0]}}, r"linear_attn_config: found layers \[1, 2, 4"),
        ({"linear_attn_config": LINEAR | {"gate_rank": 3}}, r"gate_rank: found 3; unknown field"),
        ({"topk_group": 2}, r"topk_group: found 2; expected at most n_group, 1"),
        ({"index_heads_shared": 3}, r"index_heads_shared: found 3; unknown field"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_field(fields, message):
    with pytest.raises(ling3.ConfigError, match=message):
        Glm5NextConfig.from_dict(GLM_53_FLASH | {"text_config": TEXT | fields})


def test_other_spellings_are_one_config():
    """Those of transformers, which writes no `linear_attn_config`, and of files that count their dense layers."""
    config = Glm5NextConfig.from_dict(GLM_53_FLASH)
    flat = {name: value for name, value in TEXT.items() if name not in ("linear_attn_config", "mlp_layer_types")}
    flat |= {"linear_num_heads": 64, "linear_head_dim": 128, "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0}
    for kind in ("indexed_attention", "full_attention"):
        kinds = [kind if own == "deepseek_sparse_attention" else own for own in TEXT["layer_types"]]
        assert Glm5NextConfig.from_dict(flat | {"layer_types": kinds}) == config


@pytest.mark.thorough
def test_any_split_of_a_prompt_is_the_whole(model):
    """In two padded parts, cut inside and between pools, and then token by token: logits and states."""

    def step(first, count, cache):
        logits, cache = model.step(jnp.roll(ROW, -first, axis=1), cache, jnp.asarray([count], jnp.int32))
        return np.asarray(logits[:, :count]), cache

    whole, together = step(0, 20, model.init_cache(1, 64))
    np.testing.assert_allclose(whole, model(ROW)[:, :20], atol=2e-5)
    for cut in (1, 3, 4, 5, 7, 12, 19):
        first, cache = step(0, cut, model.init_cache(1, 64))
        second, cache = step(cut, 20 - cut, cache)
        np.testing.assert_allclose(np.concatenate([first, second], axis=1), whole, atol=2e-5)
        for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(together), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
    for t in range(20, 24):
        logits, cache = model.step(ROW[:, t : t + 1], cache)
        np.testing.assert_allclose(logits[:, 0], model(ROW)[:, t], atol=2e-5)


@pytest.mark.thorough
def test_nan_in_unused_memory_changes_nothing(model):
    """In latents and keys of pools that are not written yet, and in another row's memory."""
    rows, both = jnp.concatenate([ROW, ROW]), jnp.asarray([18, 18], jnp.int32)
    _, cache = model.step(rows, model.init_cache(2, 64), both)
    own = cache.layers[1]
    tail = own.indexer.tail.at[1].set(jnp.nan)
    latents, keys = (
        paged.entries.at[0, 18 // paged.tokens :].set(jnp.nan).at[1:].set(jnp.nan)
        for paged in (own.latents, own.indexer.entries)
    )

    def parts(cache):
        own = cache.layers[1]
        return own.indexer.tail, own.latents.entries, own.indexer.entries.entries

    dirty = eqx.tree_at(parts, cache, (tail, latents, keys))
    for width, length in ((1, 1), (24, 5)):
        at = jnp.full(2, length, jnp.int32)
        clean, other = (np.asarray(model.step(rows[:, :width], c, at)[0])[:, :length] for c in (cache, dirty))
        np.testing.assert_array_equal(clean[0], other[0])
        assert np.all(np.isnan(other[1]))


@pytest.mark.slow
def test_a_query_depends_on_its_pools_alone(model):
    """In a layer alone a query depends on the tokens of its pools and of the incomplete one, and on no others."""
    layer, seq = model.model.layers[1].attention, len(TOKENS)
    x = jax.random.normal(jax.random.key(1), (1, seq, 32))

    def by_token(t):
        return jnp.abs(jax.grad(lambda x: jnp.sum(layer(x, None, Span.whole(1, seq))[0][0, t] ** 2))(x)).sum(axis=2)[0]

    for t in (6, 7, 15, 22):
        seen = np.asarray(by_token(t) > 0)
        size, top = layer.indexer.pool, layer.indexer.top
        pools = seen[: (t + 1) // size * size].reshape(-1, size)
        assert np.all(pools.all(axis=1) | ~pools[:, : size - (t % size == size - 1)].any(axis=1))
        assert np.count_nonzero(pools.all(axis=1)) == min(top, len(pools)) and not seen[t + 1 :].any()
        assert seen[(t + 1) // size * size : t + 1].all()


@pytest.mark.thorough
def test_room_for_the_chosen_pools_alone_is_plain_mla(model):
    """With as many pools as there are, the masked form computes what MLA does: up to the order of its sums."""
    layer, x = model.model.layers[1].attention, jax.random.normal(jax.random.key(2), (1, 24, 32))
    every, more = (
        dataclasses.replace(layer, indexer=dataclasses.replace(layer.indexer, top=count)) for count in (5, 6)
    )
    plain, _ = layer.mla(x, None, Span.whole(1, 24))
    masked, _ = every(x, None, Span.whole(1, 24))
    np.testing.assert_allclose(masked[:, :23], plain[:, :23], atol=2e-5)  # the last query leaves out one pool of six
    np.testing.assert_array_equal(more(x, None, Span.whole(1, 24))[0], plain)


@pytest.mark.thorough
def test_it_is_inspected_traced_and_changed(model):
    described = report(model.config, jnp.float32)
    assert [(own["attention"], own["mlp"]) for own in described.to_dict()["layers"]] == [
        ("kda", "dense"),
        ("indexedmla", "moe"),
    ]
    assert described.memory.cache_per_token == 4 * (16 + 8 // 4)
    assert described.memory.state_per_sequence == {
        "recurrent": 4 * 2 * 8 * 8,
        "conv": 4 * 3 * 3 * 16,
        "indexer.tail": 4 * 3 * 2 * 8,
    }
    seen = ling3.trace(model, ROW)
    assert sorted(seen.layers[1].attention) == ["entries", "heads", "index_scores", "o", "q_nope", "q_rope"]
    assert seen.layers[1].attention["index_scores"].shape[:2] == (1, 24) and sorted(seen.kda) == [0]
    np.testing.assert_allclose(seen.layers[-1].logits, seen.logits, atol=2e-5)
    one = ling3.Intervention.set(1, "heads", 0.0, head=3, from_position=9)
    logits = model(ROW, interventions=[one])
    assert jnp.array_equal(logits[:, :9], model(ROW)[:, :9]) and not jnp.allclose(logits, model(ROW), atol=1e-3)


@pytest.mark.thorough
def test_adapters_reach_every_matrix_under_transformers_names(model):
    """Each of another sum's order: 2e-4 as in parity."""
    adapter = random_adapter(model)
    beside, merged = ling3.with_adapter(model, adapter)(ROW), ling3.merge_adapter(model, adapter)(ROW)
    assert np.abs(np.asarray(beside - model(ROW))).max() > 0.1
    np.testing.assert_allclose(beside, merged, atol=2e-4)
    modules = {own.module.removeprefix("model.language_model.layers.") for own in adaptable(model)}
    own = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    own |= {"indexer.wq_b", "indexer.wk", "indexer.weights_proj"}
    assert {name for name in modules if name.startswith("1.self_attn.")} == {f"1.self_attn.{name}" for name in own}
    assert {"0.self_attn.forget_gate.f_a_proj", "0.self_attn.g_b_proj", "0.mlp.up_proj"} <= modules


@pytest.mark.slow
def test_a_mesh_has_one_device_s_logits_and_tokens(model):
    """Indexers and streams are replicated, all else sharded. float32 both ways: 2e-5 as between pass and steps."""
    sharded = place(model, jax.make_mesh((1, 2), ("data", "tensor"), devices=jax.devices()[:2]))
    np.testing.assert_allclose(sharded(ROW), model(ROW), atol=2e-5)
    prompts = [TOKENS, TOKENS[:5]]
    answers = ling3.generate(model, prompts, max_tokens=6, ignore_eos=True)
    assert ling3.generate(sharded, prompts, max_tokens=6, ignore_eos=True) == answers


@pytest.mark.thorough
def test_fp8_files_keep_their_bits_beside_matrices_in_floats(tmp_path):
    """As published: `kv_b_proj` is in bfloat16 though the config says nothing of it."""
    whole_file(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": FP8}))
    random = ling3.init(read_config(tmp_path), key=jax.random.key(0), dtype=jnp.bfloat16)
    ling3.save(random, tmp_path / "fp8")
    stored = safetensors_file.open_file(tmp_path / "fp8" / "model.safetensors")
    tensors = {name: tensor.array() for name, tensor in stored.items()}
    name = "model.language_model.layers.1.self_attn.kv_b_proj.weight"
    del tensors[f"{name}_scale_inv"]
    tensors[name] = np.ones(tensors[name].shape, jnp.bfloat16)
    specs = {own: (array.dtype, array.shape) for own, array in tensors.items()}
    safetensors_file.write(tmp_path / "fp8" / "model.safetensors", specs, tensors.__getitem__)
    model = ling3.load(tmp_path / "fp8")
    mixer = model.model.layers[1].attention
    assert isinstance(mixer.mla.kv_b_proj, Linear) and isinstance(mixer.mla.q_b_proj, Fp8)
    assert jnp.all(jnp.isfinite(model(ROW)))
    ling3.save(model, tmp_path / "again")
    again = safetensors_file.open_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == tensors.keys()
    assert all(again[own].array().tobytes() == array.tobytes() for own, array in tensors.items())


@pytest.mark.parametrize("name", exhaustively(["rows_each", "text_starts"]))
def test_what_pools_cannot_do_is_refused(model, name):
    value = {"rows_each": 2, "text_starts": jnp.zeros((2, 1), jnp.int32)}[name]
    span = dataclasses.replace(Span.whole(2, 1), **{name: value})
    with pytest.raises(ValueError, match="indexed MLA"):
        model.model.layers[1].attention(jnp.zeros((2, 1, 32)), None, span)
