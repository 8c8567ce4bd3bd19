"""Models of other families: they are inspected and traced, and mechanisms are found by the modules that have them."""

import dataclasses
import pathlib
import sys
import types
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest
from exhaustive_cases import thoroughly
from tiny import DEEP, open_model

import ling3
from ling3 import cli, families
from ling3.evals.ablations import ablations
from ling3.interpret import ablate, inspect

NOTEBOOK = pathlib.Path(__file__).parents[2] / "notebooks" / "09_a_mixer_of_your_own.py"
PLAIN = """
import dataclasses
import equinox as eqx, jax, jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float
import ling3
from ling3.layers.conv import ShortConv
from ling3.layers.linear import Linear
from ling3.layers.mlp import MLP
from ling3.layers.norm import GatedRMSNorm, RMSNorm
"""
TOKENS = jax.random.randint(jax.random.key(1), (2, 9), 0, DEEP.vocab_size)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(families, "_FAMILIES", list(families._FAMILIES))


@pytest.fixture
def delta(monkeypatch):
    """A gated DeltaNet, from the cells of notebook 9 that define its mixer and its family."""
    cells = NOTEBOOK.read_text(encoding="utf-8").split("# %%")
    own = [cell for cell in cells if any(f"\n{name}" in cell for name in ("def delta_step(", "class GatedDeltaNet("))]
    own += [cell for cell in cells if any(f"\n{name}" in cell for name in ("class DeltaConfig:", "def init(config"))]
    module = types.ModuleType("gated_delta")
    monkeypatch.setitem(sys.modules, "gated_delta", module)
    exec(PLAIN + "".join(dict.fromkeys(own)), vars(module))
    return ling3.init(module.DeltaConfig(DEEP.vocab_size, (1,)), key=jax.random.key(0))


@dataclasses.dataclass(frozen=True)
class OtherConfig:
    """A config with Ling-3's modules, and without a field for any ablation."""

    vocab_size: int = DEEP.vocab_size
    max_position_embeddings: int = DEEP.max_position_embeddings
    eos_token_id: tuple[int, ...] = (1,)

    def to_dict(self):
        return {"architectures": ["OtherForCausalLM"], **dataclasses.asdict(self)}


def of_ling_3s_modules() -> Any:
    def init(config, *, key, dtype):
        return dataclasses.replace(ling3.init(DEEP, key=key, dtype=dtype), config=config)

    ling3.register_family(
        ling3.Family(
            name="Other",
            architectures=("OtherForCausalLM",),
            model_types=(),
            config=OtherConfig,
            read=lambda raw, source: OtherConfig(),
            init=init,
        )
    )
    return dataclasses.replace(open_model(DEEP), config=OtherConfig())


def test_a_gated_deltanet_is_inspected(delta):
    report = inspect.report(delta.config)
    assert report.parameters == report.activated == sum(leaf.size for leaf in jax.tree.leaves(delta))
    assert report.memory == inspect.Memory(0, {"S": 2 * 2 * 32 * 32 * 4, "tail": 2 * 3 * 192 * 2})
    raw = report.to_dict()
    assert [layer["attention"] for layer in raw["layers"]] == ["gateddeltanet"] * 2
    assert raw["memory_bytes"]["S_state_per_sequence"] == 2 * 2 * 32 * 32 * 4


def test_a_gated_deltanets_trace_has_what_its_mixer_records(delta):
    seen = ling3.trace(delta, TOKENS)
    inside = seen.layers[1].attention
    assert isinstance(inside, dict) and sorted(inside) == ["beta", "decay"]
    assert inside["decay"].shape == (2, 9, 2) and np.all(inside["decay"] < 0)
    assert seen.kda == seen.mla == seen.moe == {}


@pytest.mark.thorough
def test_a_page_has_what_its_mixer_records(delta):
    arrays = ling3.look(delta, None, TOKENS[0]).data["layers"][1]["attention"]["arrays"]
    seen = ling3.trace(delta, TOKENS[:1]).layers[1].attention
    assert {own["name"]: own["shape"] for own in arrays} == {"beta": [2], "decay": [2]}
    for own in arrays:
        np.testing.assert_allclose(own["values"], seen[own["name"]][0], rtol=5.1e-4)


def test_what_a_gated_deltanet_cannot_be_without_is_not_cut(delta):
    message = (
        r"no output gate that can be cut: no module of it has a field g_proj that may be None.*attention in layers"
    )
    with pytest.raises(ValueError, match=message):
        ablate.no_output_gate(delta)
    with pytest.raises(ValueError, match=r"What can be cut: attention in layers \[0, 1\]$"):
        ablate.no_short_conv(delta)
    assert np.all(np.isfinite(ablate.no_attention(delta, [0])(TOKENS)))
    assert [ablation.name for ablation in ablations(delta)] == [f"layer {i}: no GatedDeltaNet" for i in (0, 1)]
    assert ablations(delta, "experts") == []


CUTS = {
    "no output gate": lambda m: ablate.no_output_gate(m, layers=[0, 3]),
    "gates at their mean": lambda m: ablate.mean_output_gate(m, TOKENS, "mla"),
    "softplus": lambda m: ablate.lower_bound(m, None),
    "no decay": ablate.no_decay,
    "beta": lambda m: ablate.fixed_beta(m, 1, [1]),
    "no convolution": ablate.no_short_conv,
    "no RoPE": ablate.no_rope,
    "no attention": lambda m: ablate.no_attention(m, [2]),
    "top 1": lambda m: ablate.top_k(m, 1),
    "no routing bias": ablate.no_routing_bias,
    "no shared expert": ablate.no_shared_expert,
    "fewer experts": lambda m: ablate.drop_experts(m, [1, 6], [2]),
}


@pytest.mark.parametrize("name", thoroughly(CUTS, but=CUTS.keys() - {"gates at their mean"}))
def test_another_familys_model_is_cut_as_ling_3_is(name):
    """The modules are the same; only Ling-3's config has fields that say what is different."""
    other, own = CUTS[name](of_ling_3s_modules()), CUTS[name](open_model(DEEP))
    assert other.config == OtherConfig()
    assert eqx.tree_equal(dataclasses.replace(other, config=own.config), own)
    assert not eqx.tree_equal(other, of_ling_3s_modules())


def test_the_table_for_another_family_is_that_for_ling_3():
    names = [[(a.name, a.formula) for a in ablations(model)] for model in (of_ling_3s_modules(), open_model(DEEP))]
    assert names[0] == names[1] and len(names[0]) == 23


def test_a_suite_that_a_model_has_nothing_for_says_what_there_is(delta, monkeypatch, capsys):
    monkeypatch.setattr("ling3.cli.loading.ModelSource.load", lambda *given: delta)
    assert cli.main(["ablate", "nano", "--suite", "gates"]) == 2
    assert "--suite gates: nothing that can be cut; what can be: attention in layers [0, 1]" in capsys.readouterr().err
