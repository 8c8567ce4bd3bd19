"""Fine-tuning: what is learnt, that parts add up, and that a killed training continues to the same bits."""

import dataclasses
import importlib
import itertools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_models
import tiny_transformers
from tiny import TINY, open_model, widened

import ling3
from ling3.checkpoint import CheckpointError
from ling3.train import Batch, next_token_loss
from ling3.train.balance import balanced, expert_biases
from ling3.train.fine_tuning import FineTuning, finetune
from ling3.train.learnt_loss import recomputed, summed_loss
from ling3.train.micro_batches import learnt_tokens, micro_batches, step_texts, width_of
from ling3.train.texts import TrainingDataError, TrainingText

# One layer of MLA and a mixture of experts.
SMALL = dataclasses.replace(TINY, num_hidden_layers=1, layer_group_size=1, first_k_dense_replace=0)
# KDA with a dense MLP, MLA with experts.
PAIR = dataclasses.replace(TINY, num_hidden_layers=2, layer_group_size=2)
TARGETS = ("q_b_proj", "o_proj", "down_proj", "lm_head")
SHORT = {"lora": 2, "targets": TARGETS, "steps": 6, "batch": 2, "tokens": 64, "learning_rate": 1e-2, "warmup": 1}


def texts(count=7, seed=0, longest=32, vocab=96):
    """Random texts of at least 3 tokens, of which the last half is learnt."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        ids = rng.integers(3, vocab, rng.integers(3, longest + 1)).tolist()
        learnt = [j >= len(ids) // 2 for j in range(len(ids))]
        found.append(TrainingText(tuple(ids), tuple(learnt), f"texts.jsonl:{i + 1}"))
    return found


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_an_epoch_has_each_text_in_one_step_beside_texts_of_like_length():
    every = texts(203)
    epochs = [[step_texts(every, step, 4, 0) for step in range(first, first + 51)] for first in (1, 52)]
    names = [[text.source for step in epoch for text in step] for epoch in epochs]
    assert sorted(names[0]) == sorted(names[1]) == sorted(text.source for text in every) and names[0] != names[1]
    for epoch in epochs:
        assert sorted(map(len, epoch)) == [3] + [4] * 50
        spread = [max(len(text.ids) for text in step) - min(len(text.ids) for text in step) for step in epoch]
        assert np.mean(spread) < 3, "of lengths from 3 to 32"
        padded = sum(batch.tokens.size for step in epoch for batch in micro_batches(step, 4096))
        assert padded < 2 * sum(len(text.ids) for text in every)  # no batch is narrower than 32
    assert step_texts(every, 7, 4, 1) != step_texts(every, 7, 4, 0) == step_texts(every, 7, 4, 0)
    assert len(step_texts(every[:3], 5, 8, 0)) == 3


def test_micro_batches_have_each_text_in_a_row_and_few_shapes():
    assert [width_of(n) for n in (1, 32, 33, 49, 65, 97, 4096)] == [32, 32, 40, 56, 80, 112, 4096]
    many = texts(50, longest=60)
    for devices in (1, 4):
        batches = micro_batches(many, 128, devices)
        assert all(batch.tokens.shape[0] % devices == 0 for batch in batches)
        assert sum(float(batch.weights.sum()) for batch in batches) == learnt_tokens(many)
        rows = [(row, weights) for batch in batches for row, weights in zip(batch.tokens, batch.weights, strict=True)]
        found = [tuple(np.asarray(row)[: 1 + int(np.flatnonzero(w).max())].tolist()) for row, w in rows if w.any()]
        assert sorted(found) == sorted(text.ids for text in many)
        # Padding is text, for the loads of routers.
        repeated = {tuple(np.resize(text.ids, len(row)).tolist()) for text in many for row, _ in rows}
        assert all(tuple(np.asarray(row).tolist()) in repeated for row, _ in rows)
    shapes = {batch.tokens.shape for batch in micro_batches(many, 128)}
    assert all(rows * width <= 128 and rows & (rows - 1) == 0 for rows, width in shapes)


@pytest.fixture(scope="module")
def losses():
    """The loss and gradient of three texts in float64: one by one, unpadded, and as micro-batches."""

    def of(model, batches):
        function = eqx.filter_jit(eqx.filter_value_and_grad(lambda model, batch: summed_loss(recomputed(model), batch)))
        found = [function(model, batch) for batch in batches]
        return jax.tree.map(lambda *each: sum(map(np.asarray, each)), *found)

    some = [TrainingText(text.ids[:20], text.learnt[:20]) for text in texts(9) if len(text.ids) > 24][:2]
    some += [text for text in texts(9) if len(text.ids) > 24][2:3]
    alone = [
        Batch(jnp.asarray([text.ids], jnp.int32), jnp.asarray([text.learnt], jnp.float32).at[:, 0].set(0.0))
        for text in some
    ]
    with jax.enable_x64(True):
        model = widened(open_model(PAIR))
        return model, alone, of(model, alone), of(model, micro_batches(some, 32)), of(model, micro_batches(some, 9999))


@pytest.mark.slow
def test_padded_and_accumulated_batches_have_the_loss_and_gradient_of_each_text_alone(losses):
    """In float64, up to the rounding of logits and of losses to float32 (2^-24 of sums near 100)."""
    model, alone, *found = losses
    with jax.enable_x64(True):
        expected = sum(float(next_token_loss(model, batch) * batch.weights.sum()) for batch in alone)
    for loss, gradient in found:
        assert loss == pytest.approx(expected, rel=1e-6)
        for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(found[0][1]), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=2e-6 * max(1.0, np.abs(other).max()))


@pytest.mark.slow
def test_a_poisoned_neighbour_and_padding_change_nothing():
    model, [long, short] = open_model(PAIR), sorted(texts(2, seed=5, longest=40), key=lambda text: -len(text.ids))
    [batch] = micro_batches([long, short], 9999)
    gradient = eqx.filter_jit(eqx.filter_value_and_grad(summed_loss))
    rows = jnp.arange(2)[:, None] == 1  # the row of the shorter text
    beyond = jnp.arange(batch.tokens.shape[1])[None] >= len(short.ids)
    weights = jnp.where(rows, batch.weights, 0.0)
    loss, expected = gradient(model, Batch(batch.tokens, weights))
    other = jnp.where(rows & ~beyond, batch.tokens, 95 - batch.tokens)
    again, found = gradient(model, Batch(other, weights))
    np.testing.assert_allclose(again, loss, rtol=1e-6)  # zeros are added in another order
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-5 * max(1.0, np.abs(two).max()))


@pytest.mark.thorough
def test_routers_count_what_is_behind_a_text_as_it_is():
    """Padding of one token would go to the same experts; a text repeated goes where texts go."""
    model, [text] = balanced(open_model(SMALL)), texts(1, seed=5, longest=24)
    [batch] = micro_batches([text], 9999)
    zeros = jnp.where(jnp.arange(batch.tokens.shape[1])[None] < len(text.ids), batch.tokens, 0)
    gradient = eqx.filter_jit(eqx.filter_grad(summed_loss))
    loads = [expert_biases(gradient(model, Batch(tokens, batch.weights))) for tokens in (batch.tokens, zeros)]
    assert loads[0] and all(float(jnp.abs(one - other).max()) > 0 for one, other in zip(*loads, strict=True))


def test_an_adapter_learns_and_is_saved(tmp_path):
    model, some = open_model(SMALL), texts(3)
    settings = FineTuning(**SHORT | {"lora": 8, "steps": 25, "eval_every": 10, "learning_rate": 2e-2})
    tuned = finetune(model, some, tmp_path / "out", settings, eval_texts=some[:2])
    log = [json.loads(line) for line in (tmp_path / "out" / "training" / "log.jsonl").read_text().splitlines()]
    assert log == tuned.log
    assert [p["step"] for p in log] == list(range(26))
    assert [p["step"] for p in log if "eval_loss" in p] == [0, 10, 20, 25]
    assert log[-1]["eval_loss"] < 0.7 * log[0]["eval_loss"] and log[-1]["loss"] < 0.7 * log[1]["loss"]
    assert {path.name for path in (tmp_path / "out" / "training").iterdir()} == {"log.jsonl", "loss.png"}
    again = ling3.load_adapter(model, tmp_path / "out")
    assert same(again.modules, tuned.adapter.modules) and all(name.endswith(TARGETS) for name in again.modules)
    row = jnp.asarray([some[0].ids], jnp.int32)
    np.testing.assert_array_equal(ling3.with_adapter(model, again)(row), tuned.model(row))
    with pytest.raises(CheckpointError, match="is not empty; give another directory"):
        finetune(model, some, tmp_path / "out", settings)


class Killed(BaseException):
    """In place of a signal that ends the process."""


def killed_after(monkeypatch, count):
    """Ends the process, as it were, at the update after so many."""
    module = importlib.import_module("ling3.train.loop")
    original, calls = module._updated, itertools.count()

    def updated(*given):
        if next(calls) == count:
            raise Killed
        return original(*given)

    monkeypatch.setattr(module, "_updated", updated)


@pytest.mark.parametrize(
    "lora", [pytest.param(2, marks=pytest.mark.thorough), pytest.param(None, marks=pytest.mark.slow)]
)
def test_a_killed_training_continues_to_the_same_bits(tmp_path, monkeypatch, lora):
    model, some = open_model(SMALL), texts(4)
    settings = FineTuning(**SHORT | {"save_every": 2, "lora": lora, "targets": TARGETS if lora else None})
    expected = finetune(model, some, tmp_path / "at once", settings)
    for at in (3, 2, 0):  # after the fourth step, then the fifth is repeated and killed in the sixth, then at once
        with monkeypatch.context() as patch:
            killed_after(patch, at)
            with pytest.raises(Killed):
                finetune(model, some, tmp_path / "out", settings)
    assert (tmp_path / "out" / "training" / "state.json").exists()
    for change, named in (
        ({"learning_rate": 0.5}, "learning_rate: found 0.5; expected 0.01"),
        ({"seed": 1}, "seed: found 1; expected 0"),
    ):
        with pytest.raises(CheckpointError, match=named):
            finetune(model, some, tmp_path / "out", dataclasses.replace(settings, **change))
    with pytest.raises(CheckpointError, match="texts: found"):
        finetune(model, some[1:], tmp_path / "out", settings)
    with pytest.raises(CheckpointError, match="the model's weights: found"):
        finetune(open_model(SMALL, seed=1), some, tmp_path / "out", settings)
    found = finetune(model, some, tmp_path / "out", settings)
    assert same(found.model, expected.model)
    assert [p["loss"] for p in found.log] == [p["loss"] for p in expected.log]
    name = "model.safetensors" if lora is None else "adapter_model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "at once" / name).read_bytes()


@pytest.mark.slow
def test_all_weights_learn_with_balanced_experts_and_the_layer_that_predicts_ahead():
    config = dataclasses.replace(SMALL, num_nextn_predict_layers=1)
    model, some = ling3.init(config, key=jax.random.key(0), mtp=True), texts(3)
    tuned = finetune(model, some, None, FineTuning(lora=None, steps=20, batch=3, learning_rate=1e-2))
    assert tuned.adapter is None and tuned.log[-1]["loss"] < 0.7 * tuned.log[0]["loss"]
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), tuned.model, model)
    assert jax.tree.all(changed) and jax.tree.structure(tuned.model) == jax.tree.structure(model)


def test_what_cannot_be_trained_says_why(tmp_path):
    model, some = open_model(SMALL), texts(2)
    long = TrainingText((3,) * 2049, (True,) * 2049, "texts.jsonl:8")
    foreign = TrainingText((3, 96), (True, True), "texts.jsonl:9")
    with pytest.raises(TrainingDataError) as raised:
        finetune(model, [*some, long, foreign])
    assert "texts.jsonl:8: 2,049 tokens; expected at most the model's context, 2,048" in str(raised.value)
    assert "texts.jsonl:9: the token id 96; expected less than 96" in str(raised.value)
    with pytest.raises(TrainingDataError, match="no texts to learn from"):
        finetune(model, [])
    with pytest.raises(ValueError, match="eval_share holds texts out, and eval_texts are given"):
        finetune(model, some, None, FineTuning(eval_share=0.5), eval_texts=some)
    with pytest.raises(ValueError, match="alpha and targets are of an adapter"):
        finetune(model, some, None, FineTuning(lora=None, alpha=2.0))
    with pytest.raises(ValueError, match="batch: found 0; expected at least 1"):
        FineTuning(batch=0)
    with pytest.raises(ValueError, match=r"learning_rate: found -1\.0; expected more than 0"):
        FineTuning(learning_rate=-1.0)
    (tmp_path / "taken").write_text("")
    with pytest.raises(CheckpointError, match="is a file; give a directory"):
        finetune(model, some, tmp_path / "taken", FineTuning(**SHORT))


@pytest.mark.slow
def test_a_quantized_base_stays_and_its_adapter_learns():
    base = quantized_models.model("int4", num_hidden_layers=1, layer_group_size=1, first_k_dense_replace=0)
    tuned = finetune(base, texts(3), None, FineTuning(lora=8, targets=TARGETS, steps=20, batch=3, learning_rate=2e-2))
    assert tuned.log[-1]["loss"] < 0.8 * tuned.log[0]["loss"]
    known = {id(leaf) for leaf in jax.tree.leaves(base)}
    assert len([leaf for leaf in jax.tree.leaves(tuned.model) if id(leaf) not in known]) == 2 * len(
        tuned.adapter.modules
    )
    with pytest.raises(ValueError, match="the model is quantized, and its weights cannot be trained; train an adapter"):
        finetune(base, texts(3), None, FineTuning(lora=None))


@pytest.mark.slow
def test_over_devices_the_losses_are_one_devices_and_the_state_continues(tmp_path, monkeypatch):
    """Within 1e-5: the same float32 sums in another order."""
    model, some = tiny_transformers.open_model("llama"), texts(6, vocab=64)
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    settings = FineTuning(lora=None, steps=4, batch=3, learning_rate=1e-2, save_every=2)
    expected = [point["loss"] for point in finetune(model, some, None, settings).log]
    with monkeypatch.context() as patch:
        killed_after(patch, 3)
        with pytest.raises(Killed):
            finetune(model, some, tmp_path, settings, mesh=mesh)
    tuned = finetune(model, some, tmp_path, settings, mesh=mesh)
    assert [point["loss"] for point in tuned.log] == pytest.approx(expected, rel=1e-5)
    assert len(tuned.model.model.word_embeddings.weight.sharding.device_set) == 4
    assert same(ling3.load(tmp_path), tuned.model)
    with pytest.raises(ValueError, match="lora: an adapter is trained on one device"):
        finetune(model, some, None, mesh=mesh)
