"""Each ablation is what its formula says, and what it leaves is a model: it runs, decodes, trains, saves and loads."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively
from tiny import DEEP, FLASH, TINY, UNBOUNDED, open_model

import ling3
from ling3.checkpoint.names import structure
from ling3.interpret import ablate
from ling3.layers.linear import Constant
from ling3.train import Batch, next_token_loss

TWO = dataclasses.replace(TINY, num_hidden_layers=2, layer_group_size=2)  # KDA and a dense MLP, then MLA and experts
TOKENS = jax.random.randint(jax.random.key(3), (2, 14), 0, TWO.vocab_size)
ABLATIONS = {
    "no output gate": ablate.no_output_gate,
    "no output gate in KDA": lambda m: ablate.no_output_gate(m, "kda"),
    "no output gate in layer 1": lambda m: ablate.no_output_gate(m, layers=[1]),
    "gates at their mean": lambda m: ablate.mean_output_gate(m, TOKENS),
    "bound -1": lambda m: ablate.lower_bound(m, -1.0),
    "bound -1 in layer 0": lambda m: ablate.lower_bound(m, -1.0, layers=[0]),
    "softplus": lambda m: ablate.lower_bound(m, None),
    "no decay": ablate.no_decay,
    "beta 1": lambda m: ablate.fixed_beta(m, 1),
    "no convolution": ablate.no_short_conv,
    "no RoPE": ablate.no_rope,
    "no attention in layer 0": lambda m: ablate.no_attention(m, [0]),
    "no attention at all": lambda m: ablate.no_attention(m, [0, 1]),
    "experts 1 and 6 dropped": lambda m: ablate.drop_experts(m, [1, 6]),
    "top 1": lambda m: ablate.top_k(m, 1),
    "no routing bias": ablate.no_routing_bias,
    "no shared expert": ablate.no_shared_expert,
    "swish gate, b up to 2": lambda m: ablate.variant(m, kda_output_gate="swish", kda_allow_neg_eigval=True),
    "several at once": lambda m: ablate.no_rope(ablate.no_short_conv(ablate.no_decay(m))),
}


@functools.cache
def ablated(name):
    return ABLATIONS[name](open_model(TWO))


def edited(where, replace):
    """The model with some of its weights replaced, and nothing else."""
    return eqx.tree_at(where, open_model(TWO), replace_fn=replace)


def held(rows, value):
    return Constant(jnp.full(rows, value, jnp.float32))


def kda(m):
    return m.model.layers[0].attention


def moe(m):
    return m.model.layers[1].mlp


# The same model by other means: a weight that makes the mechanism do nothing, or always the same.
BY_WEIGHTS = {
    "no output gate": lambda: edited(
        lambda m: [layer.attention.g_proj for layer in m.model.layers], lambda g: held(g.weight.shape[0], 100.0)
    ),
    "no decay": lambda: edited(lambda m: kda(m).dt_bias, lambda bias: jnp.full_like(bias, -1e9)),
    "beta 1": lambda: edited(lambda m: kda(m).b_proj, lambda b: held(b.weight.shape[0], 100.0)),
    "no convolution": lambda: edited(
        lambda m: [conv.weight for conv in (kda(m).q_conv1d, kda(m).k_conv1d, kda(m).v_conv1d)],
        lambda taps: jnp.zeros_like(taps).at[:, -1].set(1.0),
    ),
    "no attention at all": lambda: edited(
        lambda m: (kda(m).o_proj.weight, m.model.layers[1].attention.dense.weight), jnp.zeros_like
    ),
    "no routing bias": lambda: edited(lambda m: moe(m).gate.expert_bias, jnp.zeros_like),
    "no shared expert": lambda: edited(lambda m: moe(m).shared_experts.down_proj.weight, jnp.zeros_like),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", exhaustively(BY_WEIGHTS, but=["no output gate"]))
def test_an_ablation_is_what_a_weight_can_do(name):
    expected = BY_WEIGHTS[name]()(TOKENS)
    # One rounding apart where a factor of exactly 1 or 0 is not multiplied by.
    np.testing.assert_allclose(ablated(name)(TOKENS), expected, atol=1e-5)
    assert np.abs(open_model(TWO)(TOKENS) - expected).max() > 1e-3


# Every ablation compiles three programs of its own: a user's test run takes the one that leaves out most.
@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustively(ABLATIONS, but=["several at once"]))
def test_what_is_left_is_a_model(name, tmp_path):
    model = ablated(name)
    assert jax.tree.structure(model) == jax.tree.structure(structure(model.config))
    logits = model(TOKENS)
    assert np.all(np.isfinite(logits))

    prefilled, cache = model.step(TOKENS[:, :13], model.init_cache(2, 16))
    decoded, _ = model.step(TOKENS[:, 13:], cache)
    parts = jnp.concatenate([prefilled, decoded], axis=1)
    np.testing.assert_allclose(parts, logits, atol=1e-4)  # the decode form sums in another order

    ling3.save(model, tmp_path / "model")
    again = ling3.load(tmp_path / "model")
    assert again.config == model.config and eqx.tree_equal(again, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustively(ABLATIONS, but=["gates at their mean", "several at once"]))
def test_a_config_of_its_own_trains_from_scratch(name):
    fresh = ling3.init(ablated(name).config, key=jax.random.key(0))
    assert jax.tree.structure(fresh) == jax.tree.structure(ablated(name))
    assert [x.shape for x in jax.tree.leaves(fresh)] == [x.shape for x in jax.tree.leaves(ablated(name))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gates at their mean", "swish gate, b up to 2"])
def test_every_weight_that_is_left_learns(name):
    fresh = ling3.init(ablated(name).config, key=jax.random.key(1))
    _, gradient = eqx.filter_value_and_grad(next_token_loss)(fresh, Batch(TOKENS, jnp.ones(TOKENS.shape)))
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.all(np.isfinite(leaf))
        assert np.any(leaf != 0) or "expert_bias" in jax.tree_util.keystr(path), path


def test_no_weight_is_copied():
    model = open_model(TWO)
    kept = {id(leaf) for leaf in jax.tree.leaves(model)}
    assert all(id(leaf) in kept for leaf in jax.tree.leaves(ablated("no decay")))
    assert model.config == TWO


@pytest.mark.slow
def test_decays_follow_their_law():
    before, after = (ling3.trace(m, TOKENS).kda for m in (open_model(TWO), ablated("bound -1")))
    np.testing.assert_allclose(after[0].decay, before[0].decay / 5.0, rtol=1e-5)
    one = ling3.trace(ablated("bound -1 in layer 0"), TOKENS).kda
    assert np.array_equal(one[0].decay, after[0].decay)
    softplus = ling3.trace(ablated("softplus"), TOKENS).kda[0].decay
    rate = np.exp(kda(open_model(TWO)).A_log)[:, None]
    # g = -5 sigmoid(rate z) and g' = -rate softplus(z): the one as a function of the other.
    z = -np.log(-5.0 / before[0].decay - 1) / rate
    np.testing.assert_allclose(
        softplus, -rate * np.logaddexp(0, z), rtol=2e-3, atol=1e-6
    )  # log near -5 is ill-conditioned
    doubled = ling3.trace(ablated("swish gate, b up to 2"), TOKENS).kda[0]
    np.testing.assert_allclose(doubled.beta, 2 * before[0].beta, rtol=1e-6)
    logits = np.log(before[0].gate) - np.log1p(-before[0].gate)
    np.testing.assert_allclose(doubled.gate, logits * before[0].gate, atol=1e-5)


@pytest.mark.slow
def test_a_mean_gate_is_the_mean():
    model, after = open_model(TWO), ling3.trace(ablated("gates at their mean"), TOKENS)
    before = ling3.trace(model, TOKENS)
    for i in range(1):  # layer 1 then sees another input, and has the mean over the old one
        mean = before.layers[i].attention.gate.mean(axis=(0, 1), keepdims=True)
        held = after.layers[i].attention.gate
        np.testing.assert_allclose(held, np.broadcast_to(mean, held.shape), rtol=1e-5)


@pytest.mark.thorough
def test_padding_does_not_count_in_a_mean():
    padded = jnp.pad(TOKENS, ((0, 0), (0, 5)))
    valid = jnp.arange(19)[None] < jnp.full((2, 1), 14)
    means = ablate.mean_output_gate(open_model(TWO), padded, valid=valid)
    for a, b in zip(jax.tree.leaves(means), jax.tree.leaves(ablated("gates at their mean")), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)  # the same sums in another program
    unmasked = ablate.mean_output_gate(open_model(TWO), padded)
    assert np.abs(kda(unmasked).g_proj.bias - kda(means).g_proj.bias).max() > 1e-2


def test_without_rope_the_order_of_what_came_before_is_lost():
    alone = dataclasses.replace(TINY, num_hidden_layers=1, layer_group_size=1, first_k_dense_replace=1)
    model = open_model(alone)
    turned = jnp.concatenate([TOKENS[:, 8::-1], TOKENS[:, 9:]], axis=1)

    def moved(m):
        return np.abs(m(turned)[:, 9:] - m(TOKENS)[:, 9:]).max()

    assert moved(ablate.no_rope(model)) < 1e-5  # sums in another order
    assert moved(model) > 1e-2


@pytest.mark.thorough
def test_experts_are_dropped_and_fewer_are_chosen():
    chosen = [np.asarray(x.chosen) for x in ling3.trace(ablated("experts 1 and 6 dropped"), TOKENS).moe.values()]
    assert not np.isin(chosen, [1, 6]).any()
    assert np.isin([x.chosen for x in ling3.trace(open_model(TWO), TOKENS).moe.values()], [1, 6]).any()
    top = ling3.trace(ablated("top 1"), TOKENS).moe[1]
    assert top.chosen.shape[-1] == 1
    np.testing.assert_allclose(top.weights, 2.5, rtol=1e-6)


def test_without_routed_experts_the_shared_one_is_left():
    silent = edited(lambda m: moe(m).experts.down_proj.weight, jnp.zeros_like)
    model = ablate.no_routed_experts(open_model(TWO))
    np.testing.assert_allclose(model(TOKENS), silent(TOKENS), atol=1e-5)
    assert np.abs(open_model(TWO)(TOKENS) - silent(TOKENS)).max() > 1e-3


def test_layers_say_what_is_different_and_later_words_win():
    some = ablate.no_output_gate(open_model(DEEP), layers=[1, 3])
    assert [some.config.at(i).kda_output_gate for i in range(4)] == ["sigmoid", "none", "sigmoid", "sigmoid"]
    assert some.config.mla_output_gate == "none"  # layer 3 is all of MLA
    assert some.config.to_dict()["architectures"] == ["Ling3AblatedForCausalLM"]
    everywhere = ablate.no_output_gate(some, "kda").config
    assert everywhere == ablate.no_output_gate(open_model(DEEP)).config and everywhere.layer_overrides == ()


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (lambda m: ablate.no_decay(m, [3]), r"found \[3\]; the layers of this model with decay are \[0, 1, 2\]"),
        (lambda m: ablate.no_rope(m, [9]), r"found \[9\]; the layers of this model with rotary embedding are \[3\]"),
        (lambda m: ablate.no_shared_expert(m, [0]), r"layers of this model with shared expert are \[1, 2, 3\]"),
        (lambda m: ablate.no_rope(ablate.no_attention(m, [3])), "no rotary embedding that can be cut"),
        (lambda m: ablate.no_output_gate(m, "gqa"), "no output gate in GQA that can be cut"),
        (lambda m: ablate.drop_experts(m, [8]), "expected numbers from 0 to 7"),
        (lambda m: ablate.drop_experts(m, [0, 1, 2, 4, 5, 6, 7]), "drop fewer, or spread them"),
        (lambda m: ablate.lower_bound(m, 1.0), "kda_lower_bound"),
        (lambda m: ablate.top_k(m, 5), "num_experts_per_tok"),
        (lambda m: ablate.variant(m, attention="kda"), r"has no model\.layers\.3\.attention\.q_proj"),
        (lambda m: ablate.variant(m, hidden_size=64), "has no model.word_embeddings.weight"),
        (lambda m: ablate.variant(m, kda_output_gate="constant"), "g_proj.bias"),
        pytest.param(
            lambda m: ablate.mean_output_gate(ablate.no_output_gate(m), TOKENS),
            "output gate of layer 0 is 'none'",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_what_cannot_be_cut_is_an_error(cut, message):
    with pytest.raises(ValueError, match=message):
        cut(open_model(DEEP))


@pytest.mark.slow
@pytest.mark.parametrize("config", exhaustively([FLASH, UNBOUNDED], but=[FLASH]), ids=["flash", "unbounded"])
def test_other_models_are_cut_too(config):
    model = ablate.fixed_beta(ablate.no_output_gate(ablate.top_k(open_model(config), 1)), 0.5)
    assert np.all(np.isfinite(model(TOKENS)))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_engine_serves_an_ablated_model():
    model = ablate.no_short_conv(ablate.no_attention(ablate.no_output_gate(open_model(DEEP)), [1, 3]))
    settings = {"max_running_requests": 2, "num_pages": 8, "page_size": 16, "max_model_len": 64}
    engine = ling3.Engine(model, chunked_prefill_size=16, token_paddings=(16,), **settings)
    prompts = [[5, 6, 7, 8, 9], list(range(20, 50))]
    answers = engine.generate(prompts, ling3.SamplingParams(max_tokens=6, ignore_eos=True))
    alone = [ling3.generate(model, [prompt], max_tokens=6, stop_token_ids=())[0] for prompt in prompts]
    assert [list(a.token_ids) for a in answers] == [list(a) for a in alone]
