import dataclasses
import json
import pickle

import pytest
from published_configs import FLASH, LING_26, NOTE, TINY, TRANSFORMERS

from ling3.families.config_fields import rules
from ling3.families.ling3_config import ConfigError, Ling3Config

ABSENT = object()


def changed(base: dict, **changes) -> dict:
    return {key: value for key, value in (base | changes).items() if value is not ABSENT}


def refusal(raw: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Ling3Config.from_dict(raw)
    return str(caught.value)


def test_the_published_tiny_is_the_default():
    assert Ling3Config.from_dict(TINY) == Ling3Config() == Ling3Config.tiny()


def test_the_published_flash():
    config = Ling3Config.from_dict(FLASH)
    assert config == Ling3Config.flash()
    assert (config.num_hidden_layers, config.layer_group_size, config.num_experts) == (42, 6, 512)
    assert config.q_lora_rank is None
    assert config.num_nextn_predict_layers == 1
    assert config.expert_swiglu_limit_list == (0.0,) * 36 + (4.0,) * 6
    assert config.share_expert_swiglu_limit_list == (0.0,) * 36 + (5.0,) * 5 + (7.0,)
    assert [i for i in range(42) if config.attention_kind(i) == "mla"] == [5, 11, 17, 23, 29, 35, 41]


def test_the_notes_checkpoint():
    config = Ling3Config.from_dict(NOTE)
    assert (config.rope_theta, config.max_position_embeddings) == (10000.0, 8192)
    assert config.eos_token_id == (156892,)
    assert config.pad_token_id is None
    assert config.num_nextn_predict_layers == 1


def test_what_transformers_writes():
    config = Ling3Config.from_dict(TRANSFORMERS)
    expected = {
        "head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_theta": 6000000.0,
        "max_position_embeddings": 262144,
        "norm_topk_prob": True,
        "n_group": 8,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": None,
        "moe_shared_expert_intermediate_size": 768,
        "short_conv_kernel_size": 4,
    }
    assert {name: getattr(config, name) for name in expected} == expected


def test_a_file_without_architectures_is_told_by_its_kda_fields():
    assert Ling3Config.from_dict(changed(TINY, architectures=ABSENT)) == Ling3Config()
    assert Ling3Config.from_dict(changed(TINY, model_type=ABSENT)) == Ling3Config()


@pytest.mark.parametrize("base", [TINY, FLASH, NOTE, TRANSFORMERS], ids=["tiny", "flash", "note", "transformers"])
def test_written_and_read_again(base, tmp_path):
    config = Ling3Config.from_dict(base)
    assert Ling3Config.from_dict(config.to_dict()) == config
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert Ling3Config.from_file(tmp_path) == config == Ling3Config.from_file(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["use_mla_nope", "mla_use_nope"])
def test_mla_without_rope(name):
    config = Ling3Config.from_dict(changed(TINY, **{"use_mla_nope": ABSENT, name: True}))
    assert config == Ling3Config(mla_rope=False)
    raw = config.to_dict()
    assert raw["use_mla_nope"] is True and raw["architectures"] == ["BailingMoeV3ForCausalLM"]
    assert "mla_rope" not in raw and Ling3Config.from_dict(raw) == config
    assert "one value" in refusal(changed(TINY, use_mla_nope=True, mla_use_nope=False))
    assert "mla_rope: found True; expected False" in refusal(changed(TINY, use_mla_nope=True, mla_rope=True))
    ablated = {"architectures": ["Ling3AblatedForCausalLM"], "model_type": "ling3_ablated", "mla_rope": False}
    assert Ling3Config.from_dict(changed(TINY, **ablated)) == config, "as ling3 once wrote it"


def test_the_layers_by_their_attention():
    expected = {
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23],
        "full_attn_layers": [4, 8, 12, 16, 20, 24],
        "head_dim": 128,
        "num_heads": 16,
        "short_conv_kernel_size": 4,
    }
    assert Ling3Config.from_dict(TINY).linear_attn_config == expected == Ling3Config().to_dict()["linear_attn_config"]
    short = dataclasses.replace(Ling3Config(), num_hidden_layers=6, layer_overrides={0: {"attention": "none"}})
    assert short.linear_attn_config["kda_layers"] == [2, 3, 5, 6], "none after the last whole group is MLA"
    assert short.linear_attn_config["full_attn_layers"] == [4]
    assert Ling3Config.from_dict(short.to_dict()) == short
    raw = short.to_dict() | {"linear_attn_config": expected}
    assert "linear_attn_config.kda_layers: found [1, 2, 3" in refusal(raw)


def test_head_sizes():
    config = Ling3Config()
    assert (config.head_dim, config.qk_head_dim, config.latent_entry_dim) == (128, 192, 576)


def test_the_number_of_mtp_layers_may_be_left_out():
    config = Ling3Config.from_dict(changed(TINY, num_nextn_predict_layers=ABSENT))
    assert config.num_nextn_predict_layers is None and Ling3Config.from_dict(config.to_dict()) == config


def test_what_is_written_names_the_architecture_and_the_gate():
    raw = Ling3Config(kda_lower_bound=None, eos_token_id=(3, 5)).to_dict()
    assert raw["architectures"] == ["BailingMoeV3ForCausalLM"]
    assert raw["model_type"] == "bailing_hybrid"
    assert raw["kda_safe_gate"] is False
    assert raw["eos_token_id"] == [3, 5]
    assert Ling3Config.from_dict(raw).kda_lower_bound is None


def test_values_come_in_their_own_types():
    config = Ling3Config.from_dict(changed(TINY, kda_lower_bound=-1, eos_token_id=[1, 2]))
    assert type(config.kda_lower_bound) is float
    assert type(config.rope_theta) is float
    assert config.eos_token_id == (1, 2)
    assert hash(config) == hash(pickle.loads(pickle.dumps(config)))
    assert Ling3Config(rope_theta=10000, expert_swiglu_limit_list=[1] * 24).expert_swiglu_limit_list == (1.0,) * 24


def test_the_safe_gate_off_means_no_bound():
    assert Ling3Config.from_dict(changed(TINY, kda_safe_gate=False)).kda_lower_bound is None
    assert Ling3Config.from_dict(changed(TINY, kda_safe_gate=False, kda_lower_bound=None)).kda_lower_bound is None
    assert "kda_lower_bound: not in this config" in refusal(changed(TINY, kda_lower_bound=None))
    assert "kda_safe_gate: not in this config" in refusal(changed(TINY, kda_safe_gate=ABSENT))
    assert "kda_safe_gate: found 1" in refusal(changed(TINY, kda_safe_gate=1))


def test_limits_of_the_mtp_layers_are_kept():
    config = Ling3Config.from_dict(changed(FLASH, expert_swiglu_limit_list=[4] * 43))
    assert config.expert_swiglu_limit_list == (4.0,) * 43
    assert Ling3Config.from_dict(config.to_dict()) == config
    assert "found 44 entries; expected one per layer, 42" in refusal(changed(FLASH, expert_swiglu_limit_list=[4] * 44))
    assert "found 41 entries" in refusal(changed(FLASH, share_expert_swiglu_limit_list=[4] * 41))


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("num_experts_per_token", "num_experts_per_tok"),
        ("num_expert_group", "n_group"),
        ("moe_renormalize", "norm_topk_prob"),
        ("model_max_length", "max_position_embeddings"),
        ("num_local_experts", "num_experts"),
        ("n_shared_experts", "num_shared_experts"),
        ("num_mtp_layers", "num_nextn_predict_layers"),
        ("linear_conv_kernel_dim", "short_conv_kernel_size"),
    ],
)
def test_aliases_are_read_and_must_agree(alias, name):
    renamed = changed(TINY, **{name: ABSENT, alias: TINY[name]})
    assert Ling3Config.from_dict(renamed) == Ling3Config()
    assert Ling3Config.from_dict(changed(TINY, **{alias: TINY[name]})) == Ling3Config()
    assert Ling3Config.from_dict(changed(TINY, **{name: None, alias: TINY[name]})) == Ling3Config()
    other = 2 if TINY[name] is not True else False
    message = refusal(changed(TINY, **{alias: other}))
    assert name in message and alias in message and "one value" in message


def test_rope_parameters():
    rope = {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.5}
    assert Ling3Config.from_dict(changed(TINY, rope_theta=ABSENT, rope_parameters=rope)).rope_theta == 10000.0
    assert "rope_theta" in refusal(changed(TINY, rope_parameters=rope))
    yarn = {"type": "yarn", "factor": 4.0}
    for name in ("rope_scaling", "rope_parameters"):
        message = refusal(changed(TINY, **{name: yarn}))
        assert f"{name}: " in message and "yarn" in message and "factor" in message
        assert f"{name}: found 'linear'" in refusal(changed(TINY, **{name: "linear"}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("score_function", "softmax"),
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("router_dtype", "bf16"),
        ("scale_router_input", True),
        ("moe_layer_freq", 2),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("attention_bias", True),
        ("use_bias", True),
        ("use_qkv_bias", True),
        ("use_mla_nope", 1),
        ("mla_use_nope", "true"),
        ("rope_interleave", False),
        ("gated_attention_proj_granularity_type", None),
        ("gated_attention_proj_granularity_type", "element_wise"),
        ("no_kda_lora", False),
        ("use_kda_lora", True),
        ("moe_router_enable_expert_bias", False),
        ("kda_allow_neg_eigval", True),
        ("mla_rope", False),
        ("layer_overrides", {"1": {"kda_decay": False}}),
        ("linear_attention", "lightning"),
        ("use_qk_norm", False),
        ("group_norm_size", 4),
        ("sliding_window", 4096),
        ("use_sliding_window", True),
        ("quantization_config", {"quant_method": "fp8"}),
        ("num_key_value_heads", 4),
        ("num_kv_heads_for_linear_attn", 4),
        ("qk_head_dim", 128),
        ("rotary_dim", 32),
        ("layer_types", ["full_attention"] * 24),
        ("mlp_layer_types", ["sparse"] * 24),
        ("linear_num_heads", 8),
        ("linear_head_dim", 32),
        ("linear_attn_config", {"kda_layers": [1]}),
        ("linear_attn_config", [1]),
        ("attn_logit_softcapping", 30.0),
        ("rope_local_base_freq", 10000),
        ("moe_gate_temperature", 2.0),
        ("index_topk", 2048),
    ],
)
def test_what_is_not_computed_is_refused_by_name(name, value):
    message = refusal(changed(TINY, **{name: value}))
    assert f"{'head_dim' if name == 'linear_head_dim' else name}" in message
    assert "expected" in message or "unknown field" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_key_value_heads", 16),
        ("num_kv_heads_for_linear_attn", 16),
        ("layer_types", (["linear_attention"] * 3 + ["full_attention"]) * 6),
        ("linear_attn_config", {"head_dim": 128, "num_heads": 16, "full_attn_layers": [4, 8, 12, 16, 20, 24]}),
        ("quantization_config", None),
        ("sliding_window", None),
        ("partial_rotary_factor", 1.0),
        ("max_window_layers", 3),
        ("use_cache", False),
        ("attention_dropout", 0.1),
        ("attn_implementation", "eager"),
        ("attn_logit_softcapping", None),
        ("norm_head", False),
        ("temperature", 0.6),
        ("vendor_note", {"anything": [1]}),
    ],
)
def test_what_cannot_change_the_numbers_is_accepted(name, value):
    assert Ling3Config.from_dict(changed(TINY, **{name: value})) == Ling3Config()


@pytest.mark.parametrize("raw", [LING_26, changed(LING_26, architectures=ABSENT)], ids=["named", "unnamed"])
def test_ling_26_is_refused_by_name(raw):
    message = refusal(raw)
    assert "Ling 2.6" in message and "Lightning" in message and "architectures" in message


@pytest.mark.parametrize("value", ["deepseek_v3", 3, ["bailing_hybrid"]])
def test_another_model_type(value):
    assert "model_type: found" in refusal(changed(TINY, model_type=value))


@pytest.mark.parametrize("value", [[], "BailingMoeV3ForCausalLM", ["BailingMoeV3ForCausalLM", "Other"], [None], {}])
def test_other_architectures(value):
    assert "architectures: found" in refusal(changed(TINY, architectures=value))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", "1536"),
        ("hidden_size", True),
        ("hidden_size", 1536.0),
        ("hidden_size", -1),
        ("hidden_size", 0),
        ("hidden_size", [1536]),
        ("num_hidden_layers", 10**9),
        ("num_experts", 10**30),
        ("q_lora_rank", 0),
        ("rope_theta", float("nan")),
        ("rope_theta", float("inf")),
        pytest.param("rope_theta", 2**2000, id="rope_theta-huge"),
        ("rope_theta", 0),
        ("rms_norm_eps", 0.0),
        ("rms_norm_eps", "1e-6"),
        ("kda_lower_bound", 0),
        ("kda_lower_bound", 5),
        ("kda_lower_bound", float("-inf")),
        ("norm_topk_prob", 1),
        ("norm_topk_prob", "true"),
        ("eos_token_id", "2"),
        ("eos_token_id", [1, None]),
        ("eos_token_id", True),
        ("eos_token_id", -1),
        ("pad_token_id", -2),
        ("expert_swiglu_limit_list", 4.0),
        ("expert_swiglu_limit_list", [-1.0] * 24),
        ("expert_swiglu_limit_list", [None] * 24),
    ],
)
def test_types_and_ranges(name, value):
    message = refusal(changed(TINY, **{name: value}))
    assert f"\n  {name}: found" in message and "expected" in message
    if name != "kda_lower_bound":
        with pytest.raises(ConfigError, match=f"Ling3Config: 1 problem\n  {name}: found"):
            dataclasses.replace(Ling3Config(), **{name: value})


@pytest.mark.parametrize("huge", [10**400, -(10**400)], ids=["positive", "negative"])
@pytest.mark.parametrize("name", rules(Ling3Config))
def test_an_integer_beyond_every_float_is_out_of_range(name, huge):
    for value in (huge, [huge], [1, huge]):
        assert f"\n  {name}: found" in refusal(changed(TINY, **{name: value}))
        with pytest.raises(ConfigError, match=f"Ling3Config: 1 problem\n  {name}: found"):
            dataclasses.replace(Ling3Config(), **{name: value})


def test_an_integer_too_long_to_print_is_told_by_its_bits():
    with pytest.raises(ConfigError, match="vocab_size: found a number of 16610 bits"):
        Ling3Config(vocab_size=10**5000)
    with pytest.raises(ConfigError, match="eos_token_id: found a list"):
        Ling3Config(eos_token_id=(10**5000,))


def test_sizes_that_are_left_out_are_not_guessed():
    assert "hidden_size: not in this config; expected an integer from 1" in refusal(changed(TINY, hidden_size=ABSENT))
    assert "head_dim: not in this config" in refusal(changed(TINY, head_dim=None))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"qk_rope_head_dim": 63, "qk_head_dim": 191, "rotary_dim": 63}, "qk_rope_head_dim"),
        ({"num_experts": 130}, "n_group"),
        ({"n_group": 128}, "n_group"),
        ({"topk_group": 9}, "topk_group"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok"),
        ({"n_group": 1, "topk_group": 1, "num_experts_per_tok": 129}, "num_experts_per_tok"),
        ({"first_k_dense_replace": 25}, "first_k_dense_replace"),
        ({"expert_swiglu_limit_list": [1.0]}, "expert_swiglu_limit_list"),
        ({"hidden_size": 2**20, "intermediate_size": 2**20, "vocab_size": 2**24}, "parameters"),
    ],
)
def test_sizes_that_do_not_fit_together(changes, field):
    message = refusal(changed(TINY, **changes))
    assert field in message and "expected" in message


def test_all_problems_come_in_one_message():
    message = refusal(
        changed(TINY, hidden_size="1536", rms_norm_eps=None, score_function="softmax", rope_scaling={"type": "yarn"})
    )
    assert message.startswith("config.json: 4 problems")
    assert [line.split(":")[0].strip() for line in message.splitlines()[1:]] == [
        "hidden_size",
        "rms_norm_eps",
        "rope_scaling",
        "score_function",
    ]


def test_no_groups_at_all():
    config = Ling3Config.from_dict(changed(TINY, n_group=1, topk_group=1, num_experts=7, num_experts_per_tok=3))
    assert (config.n_group, config.num_experts) == (1, 7)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no valid JSON"),
        ("[]", "expected a JSON object"),
        ("{", "no valid JSON"),
        ('{"hidden_size": 1, "hidden_size": 2}', "the same key twice: 'hidden_size'"),
        ('{"rope_parameters": {"rope_theta": 1, "rope_theta": 2}}', "the same key twice: 'rope_theta'"),
        ('{"rope_theta": NaN}', "NaN is not a JSON value"),
        ('{"rope_theta": -Infinity}', "-Infinity is not a JSON value"),
        ('{"a":' * 100000 + "1" + "}" * 100000, "nested too deeply"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "config.json"),
        ("\xff\xfe", "config.json"),
    ],
)
def test_files_that_are_no_clean_json(tmp_path, text, said):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        Ling3Config.from_file(tmp_path)
    assert said in str(caught.value) and "config.json" in str(caught.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: 1 problem\n  cannot be read"):
        Ling3Config.from_file(tmp_path)


def test_a_variant_survives_its_file_and_no_published_file_has_one():
    config = Ling3Config(
        kda_output_gate="swish",
        kda_beta=1,
        mla_rope=False,
        layer_overrides={3: {"kda_decay": False}, "1": {"kda_lower_bound": -1}},
    )
    raw = config.to_dict()
    assert Ling3Config.from_dict(json.loads(json.dumps(raw))) == config
    assert raw["architectures"] == ["Ling3AblatedForCausalLM"] and raw["layer_overrides"]["1"] == {
        "kda_lower_bound": -1.0
    }
    assert config.at(1).kda_lower_bound == -1.0 and config.at(3).kda_decay is False and config.at(0) is config
    assert Ling3Config(layer_overrides={2: {}}).variant() == {}
    published = Ling3Config.from_dict(TINY)
    assert published.variant() == {} and published.to_dict()["architectures"] == ["BailingMoeV3ForCausalLM"]
    assert not {"layer_overrides", "kda_output_gate", "attention"} & published.to_dict().keys()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kda_output_gate": "tanh"}, "found 'tanh'; expected one of sigmoid, swish, constant, none"),
        ({"attention": None}, "attention: not in this config; expected one of scheduled, kda, mla, none"),
        ({"kda_beta": 3.0}, "kda_beta: found 3.0; expected a finite number from 0 to 2 or null"),
        ({"mla_rope": 1}, "mla_rope: found 1; expected true or false"),
        ({"layer_overrides": {24: {"mla_rope": False}}}, "expected a layer from 0 to 23"),
        (
            {"layer_overrides": {1: {"hidden_size": 8}}},
            "1.hidden_size: not a field that layers differ in",
        ),
        (
            {"layer_overrides": {1: {"kda_decay": "no"}}},
            "1.kda_decay: found 'no'; expected true or false",
        ),
        ({"layer_overrides": {1: {"num_experts_per_tok": 99}}}, "layer_overrides.1.num_experts_per_tok: found 99"),
        ({"layer_overrides": [1, 2]}, "layer_overrides: found [1, 2]; expected an object of layer numbers"),
    ],
)
def test_a_senseless_variant_names_its_field(fields, message):
    with pytest.raises(ConfigError) as caught:
        Ling3Config(**fields)
    assert message in str(caught.value)
