"""A family from outside: a mixer, a config and a tree of its own, through everything that knows no layer by name."""

import dataclasses
import json
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from family_laws import answers_in_company_and_alone, losses_of_training, prompts
from jaxtyping import Array, Float

import ling3
from ling3 import families
from ling3.evals.ablations import ablations
from ling3.interpret.inspect import Memory, report
from ling3.layers.linear import Linear
from ling3.layers.mlp import MLP
from ling3.layers.norm import RMSNorm


class Fading(eqx.Module):
    """s <- a s + x; y = proj(s): a state of one row per slot, and no page."""

    a: Float[Array, " hidden"]
    proj: Linear

    def empty_state(self, spec):
        return jnp.zeros((spec.slots, self.a.size), jnp.float32)

    def __call__(self, x, state, span):
        def step(s, token):
            x, valid = token
            s = jnp.where(valid[:, None], self.a[None] * s + x, s)
            return s, s

        state = self.empty_state(ling3.CacheSpec(x.shape[0], 0, 1, x.dtype)) if state is None else state
        state, y = jax.lax.scan(step, state, (jnp.moveaxis(x, 1, 0), jnp.moveaxis(span.valid(x.shape[1]), 1, 0)))
        return self.proj(jnp.moveaxis(y, 0, 1), span.execution), state


@dataclasses.dataclass(frozen=True)
class FadingConfig:
    vocab_size: int = 96
    max_position_embeddings: int = 128
    eos_token_id: tuple[int, ...] = (2,)
    hidden_size: int = 16

    def to_dict(self):
        return {"architectures": ["FadingForCausalLM"], "model_type": "fading", "hidden_size": self.hidden_size}


def init(config, *, key, dtype):
    hidden, keys = config.hidden_size, jax.random.split(key, 5)
    options = {"dtype": dtype, "std": 0.5}
    mixer = Fading(jnp.linspace(0.5, 0.99, hidden), Linear.init(hidden, hidden, key=keys[0], **options))
    mlp = MLP.init(hidden, 24, key=keys[1], **options)
    layer = ling3.DecoderLayer(RMSNorm.init(hidden, 1e-6), mixer, RMSNorm.init(hidden, 1e-6), mlp)
    table = Linear.init(config.vocab_size, hidden, key=keys[2], **options)
    model = ling3.Decoder(table, (layer,), RMSNorm.init(hidden, 1e-6))
    return ling3.CausalLM(model, Linear.init(config.vocab_size, hidden, key=keys[3], **options), config)


FAMILY = ling3.Family(
    name="Fading",
    architectures=("FadingForCausalLM",),
    model_types=("fading",),
    config=FadingConfig,
    read=lambda raw, source: FadingConfig(hidden_size=raw["hidden_size"]),
    init=init,
)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(families, "_FAMILIES", list(families._FAMILIES))
    ling3.register_family(FAMILY)


def model():
    return ling3.init(FadingConfig(), key=jax.random.key(0))


def test_it_saves_and_loads(tmp_path):
    assert isinstance(model().model.layers[0].attention, ling3.Mixer)
    ling3.save(model(), tmp_path / "own")
    loaded = ling3.load(tmp_path / "own")
    assert loaded.config == FadingConfig()
    for stored, array in zip(jax.tree.leaves(loaded), jax.tree.leaves(model()), strict=True):
        assert stored.dtype == array.dtype and jnp.array_equal(stored, array)


def test_its_names_are_the_checkpoints(tmp_path):
    """The tree says `attention`; this family's checkpoints say `self_attn`, and `embed_tokens`."""

    def published(name, config):
        return name.replace(".attention.", ".self_attn.").replace("word_embeddings", "embed_tokens")

    ling3.register_family(dataclasses.replace(FAMILY, published=published))
    ling3.save(model(), tmp_path / "own")
    stored = safetensors.numpy.load_file(tmp_path / "own" / "model.safetensors")
    assert {"model.layers.0.self_attn.proj.weight", "model.embed_tokens.weight"} <= stored.keys()
    assert not [name for name in stored if "attention." in name or "word_embeddings" in name]
    loaded = ling3.load(tmp_path / "own")
    assert jnp.array_equal(loaded.model.layers[0].attention.proj.weight, model().model.layers[0].attention.proj.weight)


def test_it_generates_what_whole_sequences_say():
    (prompt,) = prompts(9)
    (new,) = ling3.generate(model(), [prompt], max_tokens=8, ignore_eos=True)
    logits = model()(jnp.asarray([prompt + new], jnp.int32))[0]
    assert new == jnp.argmax(logits[len(prompt) - 1 : -1], axis=-1).tolist()


def test_answers_are_the_same_bits_in_company_and_after_preemption():
    params = [ling3.SamplingParams(max_tokens=20, temperature=t, seed=3, ignore_eos=True, logprobs=0) for t in (0, 1)]
    crowd, alone = answers_in_company_and_alone(model(), prompts(3, 11, 8, 17, 1, 14), params * 3)
    assert crowd == alone


def test_it_trains():
    losses = losses_of_training(model(), prompts(12, 12))
    assert losses[-1] < losses[0]


def test_it_is_traced_inspected_and_ablated(tmp_path):
    tokens = jnp.asarray(prompts(5), jnp.int32)
    seen = ling3.trace(model(), tokens)
    assert seen.layers[0].attention == {} and seen.layers[0].logits is not None

    ling3.save(model(), tmp_path / "own")
    described = report(tmp_path / "own")
    assert described.parameters == sum(leaf.size for leaf in jax.tree.leaves(model()))
    assert described.memory == Memory(cache_per_token=0, state_per_sequence={"state": 4 * 16})
    assert described.to_dict()["layers"] == [{"layer": 0, "attention": "fading", "mlp": "dense"}]

    with pytest.raises(ValueError, match=r"no decay that can be cut.* What can be cut: attention in layers \[0\]$"):
        ling3.ablate.no_decay(model())
    bare = ling3.ablate.no_attention(model(), [0])
    assert bare.model.layers[0].attention is None and np.all(np.isfinite(bare(tokens)))
    assert [ablation.name for ablation in ablations(model())] == ["layer 0: no Fading"]
    with pytest.raises(ling3.CheckpointError, match="arrays that do not fit its configuration"):
        ling3.save(bare, tmp_path / "bare")


def test_a_variant_is_another_config():
    with pytest.raises(ValueError, match=r"has no model\.word_embeddings\.weight"):
        ling3.ablate.variant(model(), hidden_size=8)
    with pytest.raises(ValueError, match="a FadingConfig says nothing of single layers"):
        ling3.ablate.variant(model(), layers=[0], max_position_embeddings=64)
    assert ling3.ablate.variant(model(), max_position_embeddings=64).config.max_position_embeddings == 64


def test_a_cell_that_registers_may_run_again():
    again = types.new_class("FadingConfig", (FadingConfig,), exec_body=lambda body: body.update(__module__=__name__))
    ling3.register_family(dataclasses.replace(FAMILY, config=again))
    assert families.family_of(again()).config is again
    assert [family.name for family in families._FAMILIES].count("Fading") == 1


def test_names_that_are_another_familys_are_refused():
    @dataclasses.dataclass(frozen=True)
    class Other:
        vocab_size: int = 1

    for architectures, model_types in ((("FadingForCausalLM",), ()), ((), ("fading",))):
        other = dataclasses.replace(
            FAMILY, name="Other", config=Other, architectures=architectures, model_types=model_types
        )
        with pytest.raises(ValueError, match=r"family Other: .* is Fading's already"):
            ling3.register_family(other)
    with pytest.raises(ValueError, match="BailingMoeV3ForCausalLM is Ling-3's already"):
        ling3.register_family(dataclasses.replace(FAMILY, config=Other, architectures=("BailingMoeV3ForCausalLM",)))
    with pytest.raises(TypeError, match=r"config is a Other, expected one of a registered family"):
        ling3.init(Other(), key=jax.random.key(0))


@pytest.mark.parametrize("named", [{"architectures": ["Nobodys"]}, {"model_type": "nobodys"}])
def test_a_checkpoint_of_no_family_says_how_to_register_one(tmp_path, named):
    (tmp_path / "config.json").write_text(json.dumps(named))
    with pytest.raises(
        ling3.ConfigError, match=r"obodys.*Qwen3ForCausalLM.*register others with ling3\.register_family"
    ):
        ling3.load(tmp_path)
