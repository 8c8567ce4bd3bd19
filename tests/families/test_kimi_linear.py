"""Kimi-Linear: its config, its names, and one small model through everything that serves and studies models."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from family_laws import answers_in_company_and_alone, losses_of_training, prompts
from kimi_reference import SMALL
from published_configs import KIMI_LINEAR

import ling3
from ling3.cache import Span
from ling3.checkpoint.names import weight_names
from ling3.evals.ablations import ablations
from ling3.execution import Execution
from ling3.families.kimi_linear import KimiLinearConfig
from ling3.interpret.inspect import Memory, report

CONFIG = KimiLinearConfig.from_dict(SMALL)


def changed(**fields):
    """SMALL with other fields; those that are None are left out, and `linear_attn_config` is changed, not replaced."""
    linear = SMALL["linear_attn_config"] | fields.pop("linear_attn_config", {})
    raw = SMALL | {"linear_attn_config": linear} | fields
    return {name: value for name, value in raw.items() if value is not None or name not in fields}


@pytest.fixture(scope="module")
def model():
    return ling3.init(CONFIG, key=jax.random.key(0))


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """A checkpoint in bfloat16 in which norms, convolutions and the like are float32, as published ones have it."""
    directory = tmp_path_factory.mktemp("kimi")
    ling3.save(ling3.init(CONFIG, key=jax.random.key(0), dtype=jnp.bfloat16), directory / "saved")
    return directory / "saved"


@pytest.mark.slow
def test_the_published_configs_census():
    """Kimi-Linear-48B-A3B: transformers' own model has as many parameters, in other tensors."""
    described = report(KimiLinearConfig.from_dict(KIMI_LINEAR))
    assert sum(row.tensors for row in described.arrays) == 20_493
    assert (described.parameters, described.activated) == (49_122_681_728, 3_484_459_904)
    assert described.memory.cache_per_token == 7 * (512 + 64) * 2
    weights = {row.published: row.published_shape for row in described.arrays}
    assert weights["model.layers.0.mlp.gate_proj.weight"] == (9216, 2304)
    assert weights["model.layers.25.self_attn.A_log"] == (1, 1, 32, 1)
    assert weights["model.layers.26.self_attn.kv_a_proj_with_mqa.weight"] == (576, 2304)
    assert weights["model.layers.26.block_sparse_moe.experts.{0..255}.w2.weight"] == (2304, 1024)
    own = {name.removeprefix("model.layers.1.self_attn.") for name in weights if name.startswith("model.layers.1.self")}
    parts = ("q_proj", "k_proj", "v_proj", "o_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_norm")
    convs = ("q_conv1d", "k_conv1d", "v_conv1d")
    assert own == {*(f"{part}.weight" for part in (*parts, *convs)), "A_log", "dt_bias"}
    assert "lm_head.weight" in weights and "model.embed_tokens.weight" in weights


def test_the_config_is_written_as_it_is_read():
    for raw in (KIMI_LINEAR, SMALL):
        config = KimiLinearConfig.from_dict(copy.deepcopy(raw))
        written = json.loads(json.dumps(config.to_dict()))
        ignored = {"auto_map", "dtype", "head_dim", "rope_scaling", "rope_theta", "transformers_version", "use_cache"}
        assert written == {name: value for name, value in raw.items() if name not in ignored}
        assert KimiLinearConfig.from_dict(written) == config


def test_transformers_spelling():
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    raw = {
        **changed(linear_attn_config={}, **dict.fromkeys(SMALL.keys() & RENAMED.keys())),
        **{new: SMALL[old] for old, new in RENAMED.items()},
        "layer_types": kinds,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "linear_num_heads": 3,
        "linear_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "head_dim": 4,
        "qk_head_dim": 12,
    }
    for name in ("linear_attn_config", "first_k_dense_replace", "mla_use_nope", "moe_layer_freq"):
        del raw[name]
    assert KimiLinearConfig.from_dict(raw) == CONFIG
    with pytest.raises(ling3.ConfigError, match=r"mlp_layer_types: found .*expected .*dense.*sparse"):
        KimiLinearConfig.from_dict(raw | {"mlp_layer_types": ["sparse", "dense", "sparse"]})
    with pytest.raises(ling3.ConfigError, match="linear_attn_config: not in this config; expected an object"):
        KimiLinearConfig.from_dict(raw | {"layer_types": 3})


RENAMED = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"linear_attn_config": {"kda_layers": [1, 2, 3]}}, r"linear_attn_config: found layers \[2\] in neither"),
        ({"linear_attn_config": {"kda_layers": [0, 2]}}, r"linear_attn_config.*kda_layers: found \[0, 2\]; expected"),
        ({"linear_attn_config": {"full_attn_layers": []}}, r"found layers \[2\] in neither"),
        ({"linear_attn_config": {"kda_layers": [1, 3, 4]}}, r"found layers \[4\] in neither"),
        ({"linear_attn_config": {"num_heads": None}}, r"linear_attn_config.*num_heads: not in this config"),
        ({"linear_attn_config": {"gate_lower_bound": -5.0}}, r"gate_lower_bound: found -5.0; unknown field"),
        ({"linear_attn_config": {"use_full_rank_gate": True}}, r"use_full_rank_gate: found True"),
        ({"num_experts_per_token": 5}, r"num_experts_per_token: found 5; expected at most 4"),
        ({"num_expert_group": 3}, r"num_expert_group: found 3; expected a divisor of num_experts, 8"),
        (
            {"num_expert_group": 8},
            r"num_expert_group: found 8; expected a divisor of num_experts, 8, for groups of two",
        ),
        ({"topk_group": 5}, r"topk_group: found 5; expected at most num_expert_group, 4"),
        ({"first_k_dense_replace": 4}, r"first_k_dense_replace: found 4; expected at most 3"),
        ({"num_key_value_heads": 1}, r"num_key_value_heads: found 1; expected 2"),
        ({"q_lora_rank": 8}, r"q_lora_rank: found 8; expected None; in ling3 MLA's queries"),
        ({"mla_use_nope": False}, r"mla_use_nope: found False; expected True; in ling3 nothing is rotated"),
        ({"moe_layer_freq": 2}, r"moe_layer_freq: found 2"),
        ({"moe_router_activation_func": "softmax"}, r"moe_router_activation_func: found 'softmax'"),
        ({"num_nextn_predict_layers": 1}, r"num_nextn_predict_layers: found 1"),
        ({"hidden_act": "situ"}, r"hidden_act: found 'situ'"),
        ({"routed_expert_hidden_size": 8}, r"routed_expert_hidden_size: found 8; unknown field"),
        ({"hidden_size": None}, r"hidden_size: not in this config; expected an integer"),
        ({"num_local_experts": 4}, r"num_experts: found num_experts 8, num_local_experts 4; expected one value"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_field(fields, message):
    with pytest.raises(ling3.ConfigError, match=message):
        KimiLinearConfig.from_dict(changed(**fields))


@pytest.mark.slow
def test_it_is_saved_as_it_was(saved, tmp_path):
    stored = safetensors.numpy.load_file(saved / "model.safetensors")
    assert set(stored) == {weight.name for weight in weight_names(CONFIG)}
    assert stored["model.layers.0.self_attn.A_log"].shape == (1, 1, 3, 1)
    assert stored["model.layers.0.self_attn.q_conv1d.weight"].shape == (24, 1, 4)
    wide = {name for name, array in stored.items() if array.dtype == np.float32}
    assert {"model.layers.0.self_attn.A_log", "model.layers.2.self_attn.dt_bias"} < wide
    assert "model.layers.1.block_sparse_moe.gate.e_score_correction_bias" in wide
    again = ling3.load(saved)
    assert again.config == CONFIG
    ling3.save(again, tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    assert (tmp_path / "again" / "config.json").read_bytes() == (saved / "config.json").read_bytes()


@pytest.mark.thorough
def test_an_a_log_of_one_axis_loads_too(saved, tmp_path):
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    stored = safetensors.numpy.load_file(saved / "model.safetensors")
    flat = {name: array.reshape(-1) if name.endswith("A_log") else array for name, array in stored.items()}
    safetensors.numpy.save_file(flat, tmp_path / "model.safetensors")
    for one, other in zip(jax.tree.leaves(ling3.load(tmp_path)), jax.tree.leaves(ling3.load(saved)), strict=True):
        assert jnp.array_equal(one, other)


def test_tensors_that_do_not_fit_are_named(saved, tmp_path):
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    stored = safetensors.numpy.load_file(saved / "model.safetensors")
    del stored["model.layers.1.block_sparse_moe.experts.7.w3.weight"]
    stored["model.layers.0.self_attn.f_a_proj.weight"] = np.zeros((9, 24), np.float32)
    stored["model.layers.0.block_sparse_moe.gate.weight"] = np.zeros((8, 24), np.float32)
    safetensors.numpy.save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ling3.CheckpointError) as error:
        ling3.load(tmp_path)
    for said in (
        "model.layers.1.block_sparse_moe.experts.7.w3.weight [10, 24]",
        "model.layers.0.self_attn.f_a_proj.weight, in model.safetensors: found [9, 24]; expected [8, 24]",
        "model.layers.0.block_sparse_moe.gate.weight, in model.safetensors",
    ):
        assert said in str(error.value)


def test_decays_have_no_bound_and_the_latents_norm_an_eps_of_its_own(model):
    kda, mla = model.model.layers[0].attention, model.model.layers[1].attention
    assert kda.lower_bound is None and kda.o_norm.eps == CONFIG.rms_norm_eps == 1e-5
    assert mla.kv_a_layernorm.eps == 1e-6 and mla.g_proj is None and mla.rotation is None and mla.q_proj is not None


@pytest.mark.slow
def test_positions_are_not_embedded(model):
    """MLA forgets the order of what came before: a permutation of its inputs changes nothing."""
    mla = model.model.layers[1].attention
    x = jax.random.normal(jax.random.key(1), (1, 7, 24))
    order = jnp.asarray([3, 0, 5, 1, 4, 2, 6])
    whole = Span.whole(1, 7, Execution.default())
    one, other = mla(x, None, whole)[0][:, -1], mla(x[:, order], None, whole)[0][:, -1]
    assert jnp.abs(one - other).max() < 1e-5 < jnp.abs(one).max()


@pytest.mark.slow
def test_it_generates_what_whole_sequences_say(model):
    asked = prompts(9, 2)
    answers = ling3.generate(model, asked, max_tokens=8, ignore_eos=True)
    for prompt, new in zip(asked, answers, strict=True):
        logits = model(jnp.asarray([prompt + new], jnp.int32))[0]
        assert new == jnp.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist()


@pytest.mark.slow
@pytest.mark.optimized
def test_answers_are_the_same_bits_in_company_and_after_preemption(model):
    params = [ling3.SamplingParams(max_tokens=20, temperature=t, seed=3, ignore_eos=True, logprobs=0) for t in (0, 1)]
    crowd, alone = answers_in_company_and_alone(model, prompts(3, 11, 8, 17, 1, 14), params * 3)
    assert crowd == alone


@pytest.mark.exhaustive
@pytest.mark.slow
def test_it_trains(model):
    losses = losses_of_training(model, prompts(12, 12))
    assert losses[-1] < losses[0]


@pytest.mark.thorough
def test_it_is_inspected_and_traced(model):
    described = report(CONFIG)
    assert described.parameters == sum(leaf.size for leaf in jax.tree.leaves(model))
    assert described.memory == Memory(20 * 2, {"recurrent": 2 * 3 * 8 * 8 * 4, "conv": 2 * 3 * 72 * 2})
    layers = [(layer["attention"], layer["mlp"]) for layer in described.to_dict()["layers"]]
    assert layers == [("kda", "dense"), ("mla", "moe"), ("kda", "moe")]
    seen = ling3.trace(model, jnp.asarray(prompts(9), jnp.int32))
    assert sorted(seen.kda) == [0, 2] and sorted(seen.mla) == [1] and sorted(seen.moe) == [1, 2]
    assert seen.kda[0].gate.shape == (1, 9, 3, 8) and seen.mla[1].gate is None
    assert jnp.all(seen.kda[0].decay < 0)


@pytest.mark.thorough
def test_its_mechanisms_are_cut(model):
    """As Ling-3's are, for its modules are Ling-3's; MLA has neither an output gate nor a rotation to lose."""
    names = [ablation.name for ablation in ablations(model)]
    assert len(names) == 17 and "KDA: no output gate" in names
    assert not {"KDA: softplus law", "MLA: no output gate", "MLA: no RoPE"} & set(names)
    without = ling3.ablate.no_output_gate(ling3.ablate.lower_bound(model, -5.0), "kda")
    without = ling3.ablate.no_shared_expert(ling3.ablate.no_decay(without, [2]))
    first, last = without.model.layers[0].attention, without.model.layers[2].attention
    assert (first.lower_bound, first.g_proj, last.f_proj) == (-5.0, None, None) and first.f_proj is not None
    assert jnp.all(jnp.isfinite(without(jnp.asarray(prompts(9), jnp.int32))))
