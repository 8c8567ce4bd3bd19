"""Training: the loop learns, repeats itself, and balances the experts; the recipe's data is what it says."""

import dataclasses
import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively

import ling3
from ling3.layers.moe import MoE
from ling3.train import Batch, Optimization, balanced, excess_load, next_token_loss, plain, train
from ling3.train.balance import expert_biases
from ling3.train.loop import mtp_loss
from ling3.train.nano.drills import drills, single_steps
from ling3.train.nano.mixture import corpus, encoded
from ling3.train.nano.problems import Problem, Step
from ling3.train.tokenizer import train_tokenizer

CONFIG = ling3.Ling3Config(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    layer_group_size=2,
    first_k_dense_replace=0,
    num_attention_heads=2,
    head_dim=16,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    max_position_embeddings=64,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    moe_shared_expert_intermediate_size=16,
    n_group=2,
    topk_group=1,
    initializer_range=0.1,
    eos_token_id=(0,),
    pad_token_id=0,
)


def counting_batches(seed: int = 0):
    """Rows that count upwards from anywhere, modulo the vocabulary: learned in a few steps."""
    rng = np.random.default_rng(seed)
    while True:
        tokens = (rng.integers(0, CONFIG.vocab_size, (8, 1)) + np.arange(16)) % CONFIG.vocab_size
        yield Batch(jnp.asarray(tokens, jnp.int32), jnp.ones((8, 16), jnp.float32))


def fresh() -> ling3.CausalLM:
    return ling3.init(CONFIG, key=jax.random.key(0))


gradient_of = eqx.filter_jit(eqx.filter_grad(next_token_loss))


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.parametrize("method", ["adamw", *exhaustively(["muon"])])
def test_a_few_steps_learn_and_repeat(method):
    def run():
        curve = []
        optimization = Optimization(40, method=method, learning_rate=1e-2, warmup=4)
        model = train(fresh(), counting_batches(), optimization, every=10, report=lambda p, _: curve.append(p))
        return model, curve

    model, curve = run()
    assert [point.step for point in curve] == [10, 20, 30, 40]
    assert [point.tokens for point in curve] == [1280, 2560, 3840, 5120]
    assert curve[-1].loss < 0.5 * curve[0].loss
    assert jax.tree.structure(model) == jax.tree.structure(fresh())
    again, curve_again = run()
    assert [point.loss for point in curve_again] == [point.loss for point in curve]
    assert same(again, model)


@pytest.mark.slow
def test_the_layer_that_predicts_a_token_more_learns_and_the_model_stays():
    curve = []
    model = ling3.init(dataclasses.replace(CONFIG, num_nextn_predict_layers=1), key=jax.random.key(0), mtp=True)
    settings = Optimization(60, learning_rate=1e-2, warmup=4, part="mtp")
    trained = train(model, counting_batches(), settings, every=10, report=lambda point, _: curve.append(point))
    assert same(dataclasses.replace(trained, mtp=()), dataclasses.replace(model, mtp=()))
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), trained.mtp, model.mtp)
    assert jax.tree.all(changed) and curve[-1].loss < 0.5 * curve[0].loss
    batch, losses = next(counting_batches(1)), []
    config = dataclasses.replace(trained.config, num_nextn_predict_layers=3)
    thrice = dataclasses.replace(trained, mtp=trained.mtp * 3, config=config)
    for i in range(3):  # the layer takes its own hidden states
        logits = np.asarray(ling3.mtp_logits(thrice, batch.tokens, layer=i), np.float64)[:, :-1]
        chosen = np.take_along_axis(logits, np.asarray(batch.tokens)[:, 2 + i :, None], -1)[..., 0]
        losses.append(np.mean(np.log(np.sum(np.exp(logits), -1)) - chosen))
    assert float(mtp_loss(trained, batch)) == pytest.approx(np.mean(losses), rel=1e-5)
    with pytest.raises(ValueError, match="part is 'mtp', and the model has 0 multi-token-prediction layers"):
        train(fresh(), counting_batches(), settings)
    again = train(trained, counting_batches(), Optimization(2, warmup=1))
    assert same(again.mtp, trained.mtp) and not same(again.model, trained.model)


def test_the_loss_counts_weighted_targets_alone():
    model, batch = fresh(), next(counting_batches())
    logits = jax.nn.log_softmax(model(batch.tokens))
    weights = batch.weights.at[:, :10].set(0.0)
    expected = -jnp.mean(jnp.stack([logits[:, t - 1][jnp.arange(8), batch.tokens[:, t]] for t in range(10, 16)]))
    assert next_token_loss(model, Batch(batch.tokens, weights)) == pytest.approx(float(expected), abs=1e-5)


def test_excess_load_is_the_share_of_choices_less_the_fair_share():
    chosen = jnp.array([[0, 1], [0, 2], [0, 1]], jnp.int32)
    np.testing.assert_allclose(excess_load(chosen, 4), np.array([3, 2, 1, 0]) / 6 - 0.25, atol=1e-7)


@pytest.mark.slow
def test_a_balanced_model_has_the_same_logits_and_gradients_and_reports_its_load():
    model, batch = fresh(), next(counting_batches())
    twin = balanced(model)
    np.testing.assert_array_equal(twin(batch.tokens), model(batch.tokens))
    assert same(plain(twin), model)

    gradient, reported = gradient_of(model, batch), gradient_of(twin, batch)
    for bias in (layer.mlp.gate.expert_bias for layer in gradient.model.layers):
        np.testing.assert_array_equal(bias, np.zeros(4))
    loads = expert_biases(reported)
    assert len(loads) == 2
    for load in loads:
        assert np.abs(load).max() > 0
        assert float(jnp.sum(load)) == pytest.approx(0.0, abs=1e-6)
    zeroed = eqx.tree_at(expert_biases, reported, replace_fn=jnp.zeros_like)
    for one, other in zip(jax.tree.leaves(plain(zeroed)), jax.tree.leaves(gradient), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_one_step_moves_each_bias_against_its_load():
    model, batch = fresh(), next(counting_batches())
    loads = expert_biases(gradient_of(balanced(model), batch))
    optimization = Optimization(1, warmup=0, bias_rate=0.01)
    trained = train(model, [batch], optimization)
    for layer, load in zip(trained.model.layers, loads, strict=True):
        assert isinstance(layer.mlp, MoE)
        np.testing.assert_allclose(layer.mlp.gate.expert_bias, -0.01 * np.sign(load), atol=1e-8)


@pytest.mark.slow
def test_the_bias_rule_evens_out_a_lopsided_router():
    def lopsided(model):
        return eqx.tree_at(
            lambda tree: [layer.mlp.gate.expert_bias for layer in tree.model.layers],
            model,
            replace_fn=lambda bias: bias.at[0].set(0.3),
        )

    curve = []
    optimization = Optimization(30, learning_rate=1e-4, warmup=0, bias_rate=0.02)
    train(lopsided(fresh()), counting_batches(), optimization, every=1, report=lambda p, _: curve.append(p.imbalance))
    assert np.mean(curve[-5:]) < 0.6 * curve[0]


@pytest.mark.slow
def test_what_cannot_train_says_why():
    with pytest.raises(ValueError, match="warmup"):
        Optimization(10, warmup=10)
    with pytest.raises(ValueError, match="ran out after 0 of 5"):
        train(fresh(), [], Optimization(5, warmup=0))
    with pytest.raises(FloatingPointError, match="by step 1"):
        broken = eqx.tree_at(lambda tree: tree.lm_head.weight, fresh(), replace_fn=lambda x: x * jnp.nan)
        train(broken, counting_batches(), Optimization(2, warmup=0), every=1)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(corpus(0, 100), 900)


@pytest.mark.parametrize(("name", "shown"), [("problems", 1), ("chat", 0), ("examples", 2)])
def test_of_problems_solutions_alone_are_learned(tokenizer, name, shown):
    for tokens, weights in itertools.islice(encoded(tokenizer, name, seed=1), 20):
        learned = tokenizer.decode([token for token, weight in zip(tokens, weights, strict=True) if weight])
        assert learned.count("The answer is") >= 1
        assert "Question" not in learned and "How many" not in learned
        text = tokenizer.decode(tokens)
        assert text.count("Question:") >= shown
        assert text.count("\n\nQuestion:") == max(0, text.count("Question:") - 1)


def test_drills_learn_results_alone(tokenizer):
    equations = single_steps(5)
    for _ in range(8):
        row, weights = drills(tokenizer, equations, 128)
        text = tokenizer.decode(row)
        found = re.findall(r"(\d+) ([-+×]) (\d+) = (\d+)\.", text)
        assert len(row) == len(weights) == 128 and len(found) == 21
        learned = [tokenizer.decode([token]) for token, weight in zip(row, weights, strict=True) if weight]
        assert learned == [result for *_, result in found]
        for left, operator, right, _ in found:
            assert Problem("", (Step(int(left), operator, int(right)),)).split == "train"


def test_a_vocabulary_too_small_is_refused():
    with pytest.raises(ValueError, match="vocab_size 300 is too small"):
        train_tokenizer(["text"], 300)
