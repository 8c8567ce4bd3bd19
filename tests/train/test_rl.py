"""GRPO: its formulas on small cases, the ratio of exactly 1, and a policy that improves."""

import dataclasses
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import SETTINGS
from tiny_transformers import open_model

import ling3
from ling3.train import Answers, Grpo, Task, advantages, divergence, grpo, objective

VOCAB = 64
SHORT = Grpo(steps=2, questions=2, group=4, max_tokens=3, learning_rate=1e-3)


def asking(check, prompts=((3, 5, 8), (4, 6))):
    return (Task(list(prompt), check) for prompt in itertools.cycle(prompts))


def low(completion):
    """The share of tokens in the lower half of the vocabulary."""
    return sum(token < VOCAB // 2 for token in completion.token_ids) / len(completion.token_ids)


@pytest.fixture(scope="module")
def model():
    return open_model("qwen3")


@pytest.fixture(scope="module")
def engine(model):
    return ling3.Engine(model, None, **SETTINGS)


def case(rng, shape=(4, 3)):
    """Log-probabilities, and answers with other ones, advantages and lengths."""
    logprobs, old, start = (jnp.asarray(np.log(rng.uniform(0.2, 0.8, shape)), jnp.float32) for _ in range(3))
    valid = np.arange(shape[1])[None] < rng.integers(1, shape[1] + 1, shape[0])[:, None]
    gains = jnp.asarray(rng.normal(size=shape[0]), jnp.float32)
    return logprobs, Answers(gains, old, start, jnp.asarray(valid))


@pytest.mark.parametrize("kind", ["normalized", "unbiased"])
def test_advantages_sum_to_zero_in_a_group(kind):
    rewards = np.random.default_rng(0).uniform(size=(5, 6))
    rewards[0] = 0.1  # all alike: nothing is learned
    found = advantages(rewards, kind)
    # A reward minus the mean is off by 2^-53, which the smallest deviation, 1e-6, makes 1e-10.
    np.testing.assert_allclose(found.sum(axis=1), 0, atol=1e-9)
    np.testing.assert_allclose(found[0], 0, atol=1e-9)
    assert (np.argsort(found[1:]) == np.argsort(rewards[1:])).all()
    spread = rewards[1:].std(axis=1) if kind == "unbiased" else np.ones(4)
    np.testing.assert_allclose(found[1:].std(axis=1), spread, rtol=1e-4)  # of 1e-6 beside a deviation of 0.2


def test_the_divergence_estimates_kl():
    """Its mean under p is KL(p, q), it is never negative, and 0 between equals."""
    p, q = (jax.nn.softmax(jax.random.normal(jax.random.key(i), (1, 16))) for i in range(2))
    terms = divergence(jnp.log(p), jnp.log(q))
    assert (terms >= 0).all() and not divergence(jnp.log(p), jnp.log(p)).any()
    np.testing.assert_allclose(jnp.sum(p * terms), jnp.sum(p * jnp.log(p / q)), rtol=1e-5)  # float32


@pytest.mark.parametrize("kind", ["normalized", "unbiased"])
def test_the_objective_token_by_token(kind):
    rng = np.random.default_rng(1)
    settings = Grpo(steps=1, max_tokens=5, clip=0.2, kl=0.3, advantages=kind)
    logprobs, answers = case(rng)
    new, old, start, valid = (np.asarray(x, np.float64) for x in (logprobs, answers.old, answers.start, answers.valid))
    total = 0.0
    for i, gain in enumerate(np.asarray(answers.advantages, np.float64)):
        length = int(valid[i].sum())
        for t in range(length):
            ratio, other = np.exp(new[i, t] - old[i, t]), np.exp(start[i, t] - new[i, t])
            surrogate = min(ratio * gain, min(max(ratio, 0.8), 1.2) * gain)
            total += (surrogate - 0.3 * (other - np.log(other) - 1)) / (length if kind == "normalized" else 5)
    np.testing.assert_allclose(objective(logprobs, answers, settings), total / 4, rtol=1e-5)  # float32


def test_the_clip_stops_gains_alone():
    """Where the ratio left [1 - ε, 1 + ε] for a gain, the gradient is 0; where it left it for a loss, it is not."""
    old = jnp.zeros((4, 1), jnp.float32)
    logprobs = jnp.log(jnp.asarray([[1.5], [0.5], [1.5], [0.5]], jnp.float32))
    answers = Answers(jnp.asarray([1.0, -1.0, -1.0, 1.0]), old, None, jnp.ones((4, 1), bool))
    slopes = jax.grad(objective)(logprobs, answers, Grpo(steps=1, clip=0.2))
    np.testing.assert_allclose(slopes[:, 0], [0, 0, -1.5 / 4, 0.5 / 4], rtol=1e-6)  # float32


def test_the_first_gradient_is_that_of_reinforce(model):
    """Where the ratio is 1 and nothing is penalized: mean over answers and tokens of Â ∇ log p, by `model(tokens)`."""
    sequences = [([3, 5, 8], [7, 9]), ([3, 5, 8], [10, 11])]
    logprobs = ling3.score(model, sequences, **SETTINGS)
    answers = Answers(jnp.asarray([0.5, -0.5]), logprobs, None, jnp.ones((2, 2), bool))

    def gain(model):
        return objective(ling3.score(model, sequences, **SETTINGS), answers, Grpo(steps=1))

    def reinforce(model):
        rows = jnp.asarray([[*prompt, *answer] for prompt, answer in sequences], jnp.int32)
        logits = jax.nn.log_softmax(model(rows))
        own = jnp.take_along_axis(logits[:, 2:4], rows[:, 3:, None], axis=-1)[..., 0]
        return jnp.mean(jnp.mean(own, axis=1) * answers.advantages)

    found, expected = eqx.filter_grad(gain)(model), eqx.filter_grad(reinforce)(model)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)  # float32 sums of terms below 1 in another order


@pytest.mark.thorough
def test_a_policy_improves_and_its_first_ratio_is_one(model, engine):
    """Tokens of the lower half become likelier, with two updates of each batch; the same again, bit for bit."""
    settings = dataclasses.replace(SHORT, steps=8, group=8, inner=2, learning_rate=1e-2, kl=0.01)
    programs, trained = [], []

    def report(point, policy):
        programs.append(engine.loop.runner.programs)
        if point.step == 1:
            trained.append(jax.tree.map(np.asarray, policy))

    _, points = grpo(model, engine, asking(low), settings, report=report)
    assert [point.deviation for point in points] == [0.0] * 8
    assert all(point.drift > 0 for point in points)
    assert points[0].kl == 0 < points[-1].kl
    assert np.mean([point.reward for point in points[-3:]]) > points[0].reward + 0.2
    assert points[-1].tokens == pytest.approx(16 * sum(point.length for point in points))
    assert len({*programs}) == 1
    again, _ = grpo(model, engine, asking(low), dataclasses.replace(settings, steps=2))
    assert eqx.tree_equal(jax.tree.map(np.asarray, again), *trained)
    assert engine.loop.runner.model is not model  # the weights that sampled the last batch


@pytest.mark.thorough
def test_an_adapter_is_trained_alone(model, engine):
    adapter = ling3.new_adapter(model, rank=2, targets=["o_proj"], key=jax.random.key(0))
    adapted = ling3.with_adapter(model, adapter)
    policy, points = grpo(adapted, ling3.Engine(adapted, None, **SETTINGS), asking(low), SHORT)
    before, after = (x.model.layers[0].attention.o_proj for x in (adapted, policy))
    assert not np.array_equal(before.lora_B, after.lora_B)
    undone = eqx.tree_at(lambda m: m.model.layers[0].attention.o_proj, policy, before)
    assert eqx.tree_equal(undone, adapted)
    assert points[0].deviation == 0


@pytest.mark.thorough
def test_another_sampler_is_off_policy(model, engine):
    """Its weights are the rounded ones, and the recorded ratio shows it; nothing is penalized, so no KL is known."""

    def rounded(policy):
        return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(x.dtype), policy)

    settings = dataclasses.replace(SHORT, kl=0.0, advantages="unbiased")
    _, points = grpo(model, engine, asking(low), settings, sampler=rounded)
    assert all(0 < point.deviation < 0.5 for point in points)
    assert all(np.isnan(point.kl) for point in points)


def test_bad_input_is_refused(model, engine):
    with pytest.raises(ValueError, match="group is 1, expected at least 2"):
        dataclasses.replace(SHORT, group=1)
    few = itertools.islice(asking(low), 3)
    with pytest.raises(ValueError, match="the tasks ran out after 1 of 2 batches"):
        grpo(model, engine, few, SHORT)
    with pytest.raises(ValueError, match=r"rewards that are not finite: \[\[nan"):
        grpo(model, engine, asking(lambda completion: float("nan")), SHORT)
    with pytest.raises(ValueError, match="prompt 0"):
        grpo(model, engine, asking(low, [[VOCAB + 1]]), SHORT)
