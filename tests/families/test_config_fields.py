"""The reader of configs, on the config of another architecture than Ling-3."""

import dataclasses
from typing import Literal

import pytest

from ling3.families.config_fields import ConfigError, Only, check, field, published, read, rules


@dataclasses.dataclass(frozen=True)
class Rope:
    """Scaled RoPE, as an object in the file."""

    rope_type: Literal["linear", "yarn"] = field(aliases=("type",))
    factor: float = field(ge=1)
    beta_fast: float | None = field(None, gt=0)

    def __post_init__(self):
        check(self, lambda: ["beta_fast: absent; YaRN has it"] * (self.rope_type == "yarn" and self.beta_fast is None))


@dataclasses.dataclass(frozen=True)
class Config:
    """A decoder with attention windows in some layers. Sizes have no defaults."""

    vocab_size: int = field(ge=1)
    hidden_size: int = field(ge=1)
    num_hidden_layers: int = field(ge=1)
    num_attention_heads: int = field(ge=1)
    num_key_value_heads: int = field(ge=1, absent=lambda values: values["num_attention_heads"])
    head_dim: int = field(ge=1, absent=lambda values: values["hidden_size"] // values["num_attention_heads"])
    rope_theta: float = field(gt=0, absent=10000.0, aliases=("rope_parameters.rope_theta",))
    rope_scaling: Rope | None = field()
    sliding_window: int | None = field(ge=1)
    layer_types: tuple[Literal["full", "sliding"], ...] | None = field(per_layer=True)
    tie_word_embeddings: bool = field(absent=False)
    eos_token_id: tuple[int, ...] = field(ge=0, single=True)

    def __post_init__(self):
        check(self, self._misfits)

    def _misfits(self):
        if self.num_attention_heads % self.num_key_value_heads:
            yield "num_key_value_heads: expected a divisor of num_attention_heads"


ONLY = {"hidden_act": Only(("silu",), "the MLP is a SwiGLU", written=True)}
DERIVED = {"window_layers": lambda c: [i for i, kind in enumerate(c.layer_types or ()) if kind == "sliding"]}
RAW = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_act": "silu",
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}


def config_of(**changes):
    return read(Config, RAW | changes, "config.json", only=ONLY, derived=DERIVED, harmless=("layer_note",))


def problems_of(**changes):
    with pytest.raises(ConfigError) as caught:
        config_of(**changes)
    return caught.value.problems


def test_what_is_left_out_comes_from_the_field_s_line():
    config = config_of()
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (4, 16, 10000.0)
    assert (config.rope_scaling, config.sliding_window, config.layer_types) == (None, None, None)
    assert config_of(head_dim=128, rope_parameters={"rope_theta": 5}).head_dim == 128
    assert config_of(rope_parameters={"rope_theta": 5}).rope_theta == 5.0


def test_it_is_written_as_it_is_read():
    config = config_of(
        rope_scaling={"type": "linear", "factor": 4},
        layer_types=["full", "sliding"],
        sliding_window=8,
        eos_token_id=[1, 2],
    )
    raw = published(config, ONLY)
    assert raw["rope_scaling"] == {"rope_type": "linear", "factor": 4.0, "beta_fast": None}
    assert (raw["layer_types"], raw["eos_token_id"], raw["hidden_act"]) == (["full", "sliding"], [1, 2], "silu")
    assert read(Config, raw, "again", only=ONLY) == config
    assert published(config_of(), ONLY)["eos_token_id"] == 2 and config_of(eos_token_id=None).eos_token_id == ()
    assert hash(config) == hash(dataclasses.replace(config))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_size": None}, "hidden_size: not in this config; expected an integer from 1; add it"),
        ({"num_attention_heads": 0}, "num_attention_heads: found 0; expected an integer from 1; correct it"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of num_attention_heads"),
        ({"rope_theta": 10**400}, "rope_theta: found 1000"),
        (
            {"rope_theta": 1, "rope_parameters": {"rope_theta": 2}},
            "rope_theta: found rope_theta 1, rope_parameters.rope_theta 2; expected one value",
        ),
        ({"sliding_window": True}, "sliding_window: found True; expected an integer from 1 or null; correct it"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings: found 0; expected true or false; correct it"),
        ({"layer_types": ["full"]}, "layer_types: found 1 entries; expected one per layer, 2; correct it"),
        ({"layer_types": ["full", "wide"]}, "layer_types: found ['full', 'wide']; expected a list of full, sliding"),
        ({"layer_types": "full"}, "layer_types: found 'full'; expected a list of"),
        ({"eos_token_id": [1, -1]}, "eos_token_id: found [1, -1]; expected a list of integers from 0; correct it"),
        ({"rope_scaling": {"type": "ntk", "factor": 2}}, "rope_scaling.rope_type: found 'ntk'; expected one of linear"),
        (
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor: not in this config; expected a finite number from 1; add it",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling.beta_fast: absent; YaRN has it"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, "rope_scaling.mscale: found 1; unknown field"),
        ({"rope_scaling": "linear"}, "rope_scaling: found 'linear'; expected an object or null; correct it"),
        ({"hidden_act": "gelu"}, "hidden_act: found 'gelu'; expected 'silu'; in ling3 the MLP is a SwiGLU"),
        ({"qkv_bias": True}, "qkv_bias: found True; unknown field"),
        ({"window_layers": [1]}, "window_layers: found [1]; expected [], from the other fields"),
    ],
)
def test_a_problem_names_its_field(changes, problem):
    found = problems_of(**changes)[0]
    assert found.startswith(problem)


def test_all_problems_come_together():
    found = problems_of(vocab_size="100", hidden_size=None, qkv_bias=True, hidden_act="gelu")
    assert [problem.split(":")[0] for problem in found][:2] == ["vocab_size", "hidden_size"]
    assert {"qkv_bias", "hidden_act"} < {problem.split(":")[0] for problem in found}


def test_what_changes_nothing_is_accepted():
    assert config_of(layer_note=3, output_hidden_states=True, window_layers=None, qkv_bias=False) == config_of()


def test_a_list_may_have_entries_for_multi_token_prediction():
    @dataclasses.dataclass(frozen=True)
    class Predicting:
        num_hidden_layers: int = field(ge=1)
        num_nextn_predict_layers: int = field(ge=0)
        ratios: tuple[int, ...] = field(ge=0, per_layer=True)

        def __post_init__(self):
            check(self, lambda: ())

    raw = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1, "ratios": [4, 128, 0]}
    assert read(Predicting, raw, "config.json").ratios == (4, 128, 0)
    assert read(Predicting, raw | {"ratios": [4, 128]}, "config.json").ratios == (4, 128)
    with pytest.raises(ConfigError, match="found 4 entries; expected one per layer, 2"):
        read(Predicting, raw | {"ratios": [1, 2, 3, 4]}, "config.json")


def test_a_file_that_is_no_object():
    with pytest.raises(ConfigError, match="here: 1 problem\n  found \\[1\\]; expected a JSON object"):
        read(Config, [1], "here")


def test_a_rule_is_on_the_field_s_line():
    assert rules(Config)["head_dim"].describe() == "an integer from 1"
    assert rules(Config)["sliding_window"].optional and rules(Config)["layer_types"].many
