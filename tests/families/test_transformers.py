"""Families of transformers and hybrids: the published configs, and what is refused."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import transformer_reference
from exhaustive_cases import exhaustively
from published_transformers import (
    DEEPSEEK_V3,
    GLM_53_FLASH,
    KIMI_K2,
    LLAMA_31_8B,
    LLAMA_31_405B,
    LLAMA_32_1B,
    MISTRAL_V01,
    MISTRAL_V03,
    MOONLIGHT_16B_A3B,
    QWEN3_06B,
    QWEN3_14B,
    QWEN3_30B_A3B,
    QWEN3_32B,
    QWEN3_235B_A22B,
    QWEN3_NEXT_80B_A3B,
    QWEN25_05B,
    QWEN35_9B,
    QWEN35_35B_A3B,
)

import ling3
from ling3.checkpoint import weight_names
from ling3.checkpoint.names import structure, weights_of
from ling3.families import read_config
from ling3.leaves import array_leaves

EVERY = [LLAMA_32_1B, MISTRAL_V03, QWEN25_05B, QWEN3_06B, QWEN3_30B_A3B]
CENSUS = {
    "Llama-3.2-1B": (LLAMA_32_1B, 1_235_814_400, 146),
    "Llama-3.1-8B": (LLAMA_31_8B, 8_030_261_248, 291),
    "Llama-3.1-405B": (LLAMA_31_405B, 405_853_388_800, 1_137),
    "Mistral-7B-v0.1": (MISTRAL_V01, 7_241_732_096, 291),
    "Mistral-7B-v0.3": (MISTRAL_V03, 7_248_023_552, 291),
    "Qwen2.5-0.5B": (QWEN25_05B, 494_032_768, 290),
    "Qwen3-0.6B": (QWEN3_06B, 596_049_920, 310),
    "Qwen3-14B": (QWEN3_14B, 14_768_307_200, 443),
    "Qwen3-32B": (QWEN3_32B, 32_762_123_264, 707),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624, 18_867),
    "Qwen3-235B-A22B": (QWEN3_235B_A22B, 235_093_634_560, 36_945),
    "DeepSeek-V3": (DEEPSEEK_V3 | {"quantization_config": None}, 671_026_419_200, 45_395),
    "Kimi-K2": (KIMI_K2 | {"quantization_config": None}, 1_026_408_232_448, 69_975),
    "Moonlight-16B-A3B": (MOONLIGHT_16B_A3B, 15_960_110_208, 5_317),
    "GLM-5.3-Flash": (GLM_53_FLASH, 313_326_811_966, 37_534),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT_80B_A3B, 79_674_391_296, 74_391),
    "Qwen3.5-9B": (QWEN35_9B, 8_953_803_264, 427),
    "Qwen3.5-35B-A3B": (QWEN35_35B_A3B, 34_660_610_688, 31_333),
}


def config_of(tmp_path, raw):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_config(tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", exhaustively(CENSUS, but=[name for name in CENSUS if "B-A" not in name and name != "Kimi-K2"])
)
def test_the_census_of_published_configs(tmp_path, name):
    """Parameters and tensors as on the hub; nothing is allocated, as no machine could hold the largest."""
    raw, parameters, tensors = CENSUS[name]
    config = config_of(tmp_path, raw)
    built = structure(config)
    weights = [weight for leaf in array_leaves(built) for weight in weights_of(leaf)]
    assert sum(weight.size for weight in weights) == parameters
    assert len({weight.name for weight in weights}) == len(weights) == tensors
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(built))
    assert (built.lm_head is None) == raw["tie_word_embeddings"]
    assert config_of(tmp_path, config.to_dict()) == config


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (
            LLAMA_31_8B,
            {
                "lm_head.weight": (128256, 4096),
                "model.embed_tokens.weight": (128256, 4096),
                "model.layers.3.input_layernorm.weight": (4096,),
                "model.layers.3.mlp.down_proj.weight": (4096, 14336),
                "model.layers.3.mlp.gate_proj.weight": (14336, 4096),
                "model.layers.3.mlp.up_proj.weight": (14336, 4096),
                "model.layers.3.post_attention_layernorm.weight": (4096,),
                "model.layers.3.self_attn.k_proj.weight": (1024, 4096),
                "model.layers.3.self_attn.o_proj.weight": (4096, 4096),
                "model.layers.3.self_attn.q_proj.weight": (4096, 4096),
                "model.layers.3.self_attn.v_proj.weight": (1024, 4096),
                "model.norm.weight": (4096,),
            },
        ),
        (
            QWEN25_05B,
            {
                "model.layers.0.self_attn.k_proj.bias": (128,),
                "model.layers.0.self_attn.q_proj.bias": (896,),
                "model.layers.0.self_attn.v_proj.bias": (128,),
                "model.layers.0.self_attn.o_proj.bias": None,
                "lm_head.weight": None,
            },
        ),
        (
            QWEN3_32B,
            {
                "model.layers.0.self_attn.k_norm.weight": (128,),
                "model.layers.0.self_attn.q_norm.weight": (128,),
                "model.layers.0.self_attn.q_proj.weight": (8192, 5120),
                "model.layers.0.self_attn.o_proj.weight": (5120, 8192),
                "model.layers.0.self_attn.q_proj.bias": None,
            },
        ),
        (
            DEEPSEEK_V3,
            {
                "model.layers.0.mlp.gate_proj.weight": (18432, 7168),
                "model.layers.0.self_attn.q_a_layernorm.weight": (1536,),
                "model.layers.0.self_attn.q_proj.weight": None,
                "model.layers.3.mlp.experts.255.down_proj.weight": (7168, 2048),
                "model.layers.3.mlp.experts.255.down_proj.weight_scale_inv": (56, 16),
                "model.layers.3.mlp.gate.e_score_correction_bias": (256,),
                "model.layers.3.mlp.gate.weight": (256, 7168),
                "model.layers.3.mlp.gate.weight_scale_inv": None,
                "model.layers.3.mlp.shared_experts.up_proj.weight": (2048, 7168),
                "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
                "model.layers.3.self_attn.kv_a_proj_with_mqa.weight_scale_inv": (5, 56),
                "model.layers.3.self_attn.kv_b_proj.weight": (32768, 512),
                "model.layers.3.self_attn.o_proj.weight": (7168, 16384),
            },
        ),
        (
            QWEN3_30B_A3B | {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
            {
                "model.layers.0.mlp.gate_proj.weight": (6144, 2048),
                "model.layers.1.mlp.gate.weight": (128, 2048),
                "model.layers.1.mlp.gate.expert_bias": None,
                "model.layers.1.mlp.experts.127.down_proj.weight": (2048, 768),
                "model.layers.1.mlp.experts.127.gate_proj.weight": (768, 2048),
                "model.layers.1.mlp.experts.127.up_proj.weight": (768, 2048),
                "model.layers.1.mlp.gate_proj.weight": None,
                "model.layers.3.mlp.gate_proj.weight": (6144, 2048),
            },
        ),
    ],
    ids=["llama", "qwen2", "qwen3", "deepseek-v3", "qwen3-moe"],
)
def test_names_and_shapes_are_the_published_ones(tmp_path, raw, expected):
    config = config_of(tmp_path, raw | {"num_hidden_layers": 4})
    shapes = {weight.name: weight.shape for weight in weight_names(config)}
    assert {name: shapes.get(name) for name in expected} == expected


def test_windows_of_the_published_configs(tmp_path):
    def windows(raw):
        config = config_of(tmp_path, raw | {"num_hidden_layers": 6})
        return [getattr(layer.attention, "window", "none") for layer in structure(config).model.layers]

    assert windows(MISTRAL_V01) == [4096] * 6 and windows(MISTRAL_V03) == [None] * 6
    assert windows(QWEN25_05B) == [None] * 6, "sliding_window counts only with use_sliding_window"
    assert windows(QWEN25_05B | {"use_sliding_window": True, "max_window_layers": 5}) == [None] * 5 + [32768]


def scaling(**fields):
    return {"rope_scaling": fields}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (LLAMA_31_8B, LLAMA_31_8B["rope_scaling"]),
        (LLAMA_32_1B, LLAMA_32_1B["rope_scaling"]),
        (QWEN3_06B, YARN),
        (QWEN3_06B, YARN | {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0}),
        (QWEN3_06B, YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}),
        (QWEN3_06B, YARN | {"attention_factor": 1.5}),
        (MISTRAL_V03, {"type": "linear", "factor": 8.0}),
        (MISTRAL_V03, {"type": "dynamic", "factor": 8.0}),
        (MISTRAL_V03, {"rope_type": "default"}),
        (MISTRAL_V03, None),
    ],
)
def test_angles_are_those_of_the_equations(tmp_path, raw, kind):
    """Under transformers 4's field, and under transformers 5's, which holds theta too."""
    theta = {"rope_theta": raw["rope_theta"]}
    for fields in (theta | {"rope_scaling": kind}, {"rope_theta": None, "rope_parameters": (kind or {}) | theta}):
        config = config_of(tmp_path, raw | {"rope_scaling": None} | fields)
        frequencies, magnitude = transformer_reference.rope(config)
        np.testing.assert_allclose(config.rope.frequencies, frequencies, rtol=1e-12)
        assert config.rope.magnitude == pytest.approx(magnitude, rel=1e-12)
        assert config_of(tmp_path, config.to_dict()) == config


@pytest.mark.parametrize("base", EVERY, ids=lambda raw: raw["model_type"])
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": None}, "hidden_size: not in this config; expected an integer from 1"),
        ({"vocab_size": "100"}, "vocab_size: found '100'; expected an integer from 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: found 3; expected a divisor of num_attention_heads"),
        ({"head_dim": 63}, "head_dim: found 63; expected an even number, as RoPE"),
        ({"head_dim": None, "hidden_size": 999}, "head_dim: not in this config; expected an integer from 1"),
        ({"rope_theta": 1}, "rope_theta: found 1; expected a finite number above 1"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu'; expected 'silu'; in ling3 every MLP is a SwiGLU"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config.weight_block_size: not in this config; expected",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: found 0.5; expected 1.0"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping: found 30.0; unknown field"),
        ({"vocab_size": 2**24, "hidden_size": 2**20, "head_dim": 64}, "the sizes together: found about 3"),
        (scaling(rope_type="longrope", factor=2.0), "rope_scaling.rope_type: found 'longrope'; expected one of linear"),
        (scaling(rope_type=["yarn"], factor=2.0), "rope_scaling.rope_type: found ['yarn']; expected one of linear"),
        (scaling(type="linear"), "rope_scaling.factor: not in this config; expected a finite number from 1"),
        (
            scaling(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
            "rope_scaling.original_max_position_embeddings: not in this config; expected a number, as rope_type is ",
        ),
        (
            scaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0),
            "rope_scaling.high_freq_factor: not in this config",
        ),
        (scaling(type="linear", factor=2.0, long_factor=[1.0]), "rope_scaling.long_factor: found [1.0]; unknown field"),
        ({"rope_scaling": "linear"}, "rope_scaling: found 'linear'; expected an object or null"),
        (
            scaling(type="linear", factor=2.0) | {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            "rope_scaling: found rope_scaling {",
        ),
    ],
)
def test_a_problem_names_its_field(tmp_path, base, changes, problem):
    with pytest.raises(ling3.ConfigError) as caught:
        config_of(tmp_path, base | changes)
    assert any(said.startswith(problem) for said in caught.value.problems), caught.value.problems
    assert str(tmp_path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_experts": None}, "num_experts: not in this config; expected an integer from 1"),
        ({"num_experts_per_tok": 129}, "num_experts_per_tok: found 129; expected at most num_experts, 128"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step: found 0; expected an integer from 1"),
        ({"mlp_only_layers": [0, 48]}, "mlp_only_layers: found [0, 48]; expected layers from 0 to 47"),
        ({"mlp_only_layers": 3}, "mlp_only_layers: found 3; expected a list"),
        ({"mlp_only_layers": [-1]}, "mlp_only_layers: found [-1]; expected a list"),
        ({"moe_intermediate_size": 2**20, "num_experts": 4096}, "the sizes together: found about 1"),
        ({"num_local_experts": 64}, "num_experts: found num_experts 128, num_local_experts 64"),
    ],
)
def test_a_problem_with_experts_names_its_field(tmp_path, changes, problem):
    with pytest.raises(ling3.ConfigError) as caught:
        config_of(tmp_path, QWEN3_30B_A3B | changes)
    assert any(said.startswith(problem) for said in caught.value.problems), caught.value.problems


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox"}, "architectures: found ['GPTNeoXFor"),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "architectures: found ['Llama"),
        ({"architectures": "LlamaForCausalLM"}, "architectures: found 'LlamaForCausalLM'"),
        ({"model_type": "gpt2"}, "model_type: found 'gpt2'"),
        ({"hidden_size": 8}, "architectures: not in this config"),
    ],
)
def test_an_unknown_architecture_says_which_there_are(tmp_path, named, said):
    with pytest.raises(ling3.ConfigError) as caught:
        config_of(tmp_path, named)
    (problem,) = caught.value.problems
    assert problem.startswith(said) and problem.endswith("; register others with ling3.register_family")
    for known in ("ling3 reads BailingMoeV3ForCausalLM", "LlamaForCausalLM, ", "Qwen3ForCausalLM, "):
        assert known in problem


TINY = {
    "eos_token_id": 1,
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "max_window_layers": 1,
    "moe_intermediate_size": 12,
    "num_attention_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 32,
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def checkpoint(tmp_path, raw, change=lambda tensors: None):
    """A checkpoint of the config's names and tiny sizes, in bfloat16."""
    config = config_of(tmp_path, {name: TINY.get(name, value) for name, value in raw.items()})
    draw = np.random.default_rng(0)
    tensors = {w.name: draw.normal(size=w.shape).astype(ml_dtypes.bfloat16) for w in weight_names(config)}
    change(tensors)
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("raw", [LLAMA_31_8B, MISTRAL_V01, QWEN25_05B, QWEN3_06B], ids=lambda raw: raw["model_type"])
def test_tensors_that_do_not_fit_are_named(tmp_path, raw):
    def spoil(tensors):
        del tensors["model.layers.0.self_attn.o_proj.weight"]
        tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((16, 15), ml_dtypes.bfloat16)
        tensors["model.layers.1.mlp.up_proj.weight"] = np.zeros((24, 16), ml_dtypes.bfloat16)
        tensors["model.norm.weight"] = np.zeros(16, np.int8)

    with pytest.raises(ling3.CheckpointError) as caught:
        ling3.load(checkpoint(tmp_path, raw, spoil))
    message = str(caught.value)
    assert "no file has:\n    model.layers.0.self_attn.o_proj.weight [16, 16]\n" in message
    assert "no place for:\n    model.layers.1.mlp.up_proj.weight, in model.safetensors\n" in message
    assert "q_proj.weight, in model.safetensors: found [16, 15]; expected [16, 16]" in message
    assert "model.norm.weight, in model.safetensors: found I8; expected F32, BF16, F16" in message


def test_experts_that_do_not_fit_are_named(tmp_path):
    experts = "model.layers.0.mlp.experts"

    def spoil(tensors):
        del tensors[f"{experts}.2.up_proj.weight"], tensors["model.layers.0.mlp.gate.weight"]
        tensors[f"{experts}.1.down_proj.weight"] = np.zeros((12, 16), ml_dtypes.bfloat16)
        tensors[f"{experts}.4.up_proj.weight"] = np.zeros((12, 16), ml_dtypes.bfloat16)

    with pytest.raises(ling3.CheckpointError) as caught:
        ling3.load(checkpoint(tmp_path, QWEN3_30B_A3B, spoil))
    message = str(caught.value)
    assert f"{experts}.2.up_proj.weight [12, 16]\n" in message
    assert "model.layers.0.mlp.gate.weight [4, 16]\n" in message
    assert f"no place for:\n    {experts}.4.up_proj.weight, in model.safetensors\n" in message
    assert f"{experts}.1.down_proj.weight, in model.safetensors: found [12, 16]; expected [16, 12]" in message


def test_biases_that_no_field_promises_are_left_over(tmp_path):
    bias = "model.layers.0.self_attn.q_proj.bias"
    with pytest.raises(ling3.CheckpointError, match=f"no place for:\n    {bias}"):
        ling3.load(checkpoint(tmp_path, LLAMA_31_8B, lambda t: t.update({bias: np.zeros(16, ml_dtypes.bfloat16)})))
    with pytest.raises(ling3.CheckpointError, match=f"no file has:\n    {bias}"):
        ling3.load(checkpoint(tmp_path, QWEN25_05B, lambda t: t.pop(bias)))


@pytest.mark.parametrize("block", [7, 2**18])
@pytest.mark.parametrize("raw", [LLAMA_32_1B, QWEN3_06B], ids=lambda raw: raw["model_type"])
def test_a_tied_head_that_is_stored_equals_the_embedding(tmp_path, monkeypatch, raw, block):
    monkeypatch.setattr("ling3.checkpoint.accounting.BLOCK", block)
    plain = ling3.load(checkpoint(tmp_path, raw))
    model = ling3.load(checkpoint(tmp_path, raw, lambda t: t.update({HEAD: t[EMBEDDING]})))
    assert model.lm_head is None and model.config == plain.config
    for one, other in zip(jax.tree.leaves(model), jax.tree.leaves(plain), strict=True):
        assert jnp.array_equal(one, other)
    ling3.save(model, tmp_path / "own")
    assert HEAD not in safetensors.numpy.load_file(tmp_path / "own" / "model.safetensors")


@pytest.mark.parametrize(
    "other",
    [
        lambda embedding: np.concatenate([embedding[:-1], -embedding[-1:]]),
        lambda embedding: embedding.astype(np.float32),
        lambda embedding: embedding[:-1],
        lambda embedding: embedding.T,
    ],
    ids=["numbers", "dtype", "rows", "transposed"],
)
def test_a_tied_head_that_differs_is_refused(tmp_path, other):
    directory = checkpoint(tmp_path, QWEN3_06B, lambda t: t.update({HEAD: np.ascontiguousarray(other(t[EMBEDDING]))}))
    with pytest.raises(ling3.CheckpointError, match=r"lm_head\.weight, in model\.safetensors: differs from") as caught:
        ling3.load(directory)
    assert "correct tie_word_embeddings" in str(caught.value) and EMBEDDING in str(caught.value)
