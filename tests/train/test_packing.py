"""Several texts in a row of a training batch: each has what it would have alone, and little is padding."""

import dataclasses
import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import kimi_reference
import numpy as np
import pytest
import tiny_transformers
from exhaustive_cases import exhaustively, thoroughly
from tiny import TINY, open_model, widened

import ling3
from ling3.cache import Span
from ling3.families.kimi_linear import KimiLinearConfig
from ling3.layers.csa import CSA, CSAConfig
from ling3.layers.rope import Rope
from ling3.train import Batch, next_token_loss
from ling3.train.fine_tuning import FineTuning, finetune
from ling3.train.learnt_loss import summed_loss
from ling3.train.loop import mtp_loss
from ling3.train.micro_batches import learnt_tokens, micro_batches, step_texts
from ling3.train.packing import leak
from ling3.train.texts import TrainingText

# One token, several texts in a chunk of 16, more than a chunk; borders at columns 0, 1, 15 and others of a chunk.
LENGTHS = (3, 1, 5, 6, 17, 1, 15, 9)
# KDA with a dense MLP, MLA with experts.
PAIR = dataclasses.replace(TINY, num_hidden_layers=2, layer_group_size=2)
MODELS = {
    "ling3": lambda: open_model(PAIR),
    "kimi": lambda: ling3.init(KimiLinearConfig.from_dict(kimi_reference.SMALL), key=jax.random.key(0)),
    **{
        name: functools.partial(tiny_transformers.open_model, name)
        for name in tiny_transformers.CASES
        if name != "glm5-next"  # its indexer pools a row's tokens
    },
}
CASES = ["ling3", *thoroughly(["qwen3-next"]), *exhaustively(sorted(MODELS.keys() - {"ling3", "qwen3-next"}))]


def ids():
    """Texts of these lengths, in which no token comes twice."""
    every = np.random.default_rng(0).permutation(np.arange(3, 3 + sum(LENGTHS)))
    return [own.tolist() for own in np.split(every, np.cumsum(LENGTHS)[:-1])]


def in_one_row(rows):
    """The texts one after another, in a row, and the column at which each token's text begins."""
    first = np.cumsum([0, *map(len, rows)])[:-1]
    starts = np.repeat(first, [len(row) for row in rows])[None].astype(np.int32)
    return np.asarray([list(itertools.chain(*rows))], np.int32), starts


def in_rows(rows):
    """A text in each row, right-padded with zeros, and where the tokens are."""
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for own, row in zip(tokens, rows, strict=True):
        own[: len(row)] = row
    return tokens, np.arange(tokens.shape[1])[None] < np.asarray([len(row) for row in rows])[:, None]


def hidden_of(model, tokens, starts=None):
    span = dataclasses.replace(Span.whole(*tokens.shape), text_starts=starts)
    return model.model(jnp.asarray(tokens), (None,) * len(model.model.attentions), span)[0]


@eqx.filter_jit
@functools.partial(eqx.filter_value_and_grad, has_aux=True)
def packed(model, tokens, starts, scale):
    hidden = hidden_of(model, tokens, starts)
    return jnp.sum(jnp.sin(hidden[0]) * scale), hidden[0]


@eqx.filter_jit
@functools.partial(eqx.filter_value_and_grad, has_aux=True)
def alone(model, tokens, valid, scale):
    hidden = hidden_of(model, tokens)[valid]
    return jnp.sum(jnp.sin(hidden) * scale), hidden


@pytest.mark.parametrize("name", CASES)
def test_a_text_has_the_states_and_gradients_that_it_has_alone(name):
    """In float64, up to rounding: chunks begin elsewhere. The loss weighs tokens unequally, so that none cancel."""
    rows = ids()
    scale = np.random.default_rng(1).normal(size=(sum(LENGTHS), 1))
    with jax.enable_x64(True):
        model = widened(MODELS[name]())
        tokens, valid = in_rows(rows)
        places = np.nonzero(valid)
        (_, expected), expected_gradient = alone(model, tokens, places, scale)
        (_, found), gradient = packed(model, *in_one_row(rows), scale)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * np.abs(expected).max())
        for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected_gradient), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-10 * max(1.0, np.abs(other).max()))


@pytest.mark.parametrize("name", CASES)
def test_no_gradient_leaks_from_one_text_into_another(name):
    """The gradient of a text's states by the embeddings of the texts around it is exactly 0."""
    rows = ids()
    tokens, starts = in_one_row(rows)
    with jax.enable_x64(True):
        model = widened(MODELS[name]())
        for row, start in zip(rows, np.unique(starts), strict=True):
            _, gradient = packed(model, tokens, starts, np.where(starts[0] == start, 1.0, 0.0)[:, None])
            reached = np.abs(gradient.model.word_embeddings.weight).max(axis=1) > 0
            assert np.flatnonzero(reached).tolist() == sorted(row)


def texts(lengths, seed=0):
    """Random texts of at least two tokens, of which the last half is learnt."""
    draw = np.random.default_rng(seed)
    return [
        TrainingText(tuple(row), tuple(j >= len(row) // 2 for j in range(len(row))), f"texts.jsonl:{i}")
        for i, row in enumerate(draw.integers(3, 64, n).tolist() for n in lengths)
    ]


@pytest.mark.slow
def test_losses_are_those_of_rows_with_one_text():
    """Within 1e-6: the same float32 sums in another order. Also where a text is too short to predict far ahead in."""
    config = dataclasses.replace(PAIR, num_nextn_predict_layers=1)
    model, some = ling3.init(config, key=jax.random.key(0), mtp=True), texts([2, 3, 5, 34, 4])
    [joined] = micro_batches(some, 48, packing=True)
    tokens, _ = in_rows([text.ids for text in some])
    weights = np.zeros(tokens.shape, np.float32)
    for row, text in enumerate(some):
        weights[row, 1 : len(text.ids)] = text.learnt[1:]
    apart = Batch(jnp.asarray(tokens), jnp.asarray(weights))
    assert joined.tokens.shape == (1, 48) and float(joined.weights.sum()) == weights.sum() == learnt_tokens(some)
    for loss in (next_token_loss, mtp_loss, summed_loss):
        found, expected = (float(eqx.filter_jit(loss)(model, batch)) for batch in (joined, apart))
        assert found == pytest.approx(expected, rel=1e-6)


def test_rows_hold_each_text_once_and_know_where_it_begins():
    some = texts(np.random.default_rng(0).integers(2, 61, 50))
    for devices in (1, 4):
        batches, found = micro_batches(some, 128, devices, packing=True), []
        for batch in batches:
            assert batch.tokens.shape[0] % devices == 0
            tokens, weights, starts = map(np.asarray, (batch.tokens, batch.weights, batch.text_starts))
            assert not weights[:, 0].any()
            for row, weight, start in zip(tokens, weights, starts, strict=True):
                begins = np.unique(start)
                assert begins[0] == 0 and (start[begins] == begins).all() and (np.diff(start) >= 0).all()
                pieces = zip(np.split(row, begins[1:]), np.split(weight, begins[1:]), strict=True)
                found += [(tuple(ids.tolist()), tuple(own.tolist())) for ids, own in pieces if own.any()]
        assert sorted(found) == sorted((text.ids, (0.0, *map(float, text.learnt[1:]))) for text in some)
    shapes = {batch.tokens.shape for batch in micro_batches(some, 128, packing=True)}
    assert all(rows * width <= 128 and rows & (rows - 1) == 0 for rows, width in shapes)


@pytest.mark.thorough
def test_less_is_padding_than_in_rows_of_one_text():
    """Lengths as chats have them: 5 % against 10 %, in fewer shapes; with more texts in a step, 2 %."""
    lengths = np.clip(np.random.default_rng(1).lognormal(np.log(200), 0.8, 2000), 8, 2048).astype(int)
    every = [TrainingText((5,) * n, (True,) * n, f"{i}") for i, n in enumerate(lengths)]

    def padding(count, packing):
        steps = [step_texts(every, step, count, 0, packing) for step in range(1, len(every) // count + 1)]
        assert sorted(text.source for step in steps for text in step) == sorted(text.source for text in every)
        shapes = [batch.tokens.shape for step in steps for batch in micro_batches(step, 256 * count, packing=packing)]
        return 1 - lengths.sum() / sum(rows * width for rows, width in shapes), len(set(shapes))

    (joined, few), (apart, many) = padding(8, True), padding(8, False)
    assert joined < 0.06 and apart > 0.09 and few < many and padding(40, True)[0] < 0.02


@pytest.mark.slow
def test_the_first_losses_of_a_fine_tuning_are_those_of_rows_with_one_text(tmp_path):
    """Within 1e-5: the same float32 sums in another order, and three steps that amplify it."""
    model, some = open_model(PAIR), texts([9, 30, 4, 12, 21, 7])
    how = {"steps": 3, "batch": 6, "tokens": 64, "lora": 2, "learning_rate": 1e-2, "warmup": 0}
    logs = [
        finetune(model, some, None, FineTuning(packing=packing, **how), eval_texts=some[:3]).log
        for packing in (None, False)
    ]
    for name in ("loss", "eval_loss", "tokens"):
        found, expected = ([point[name] for point in log if name in point] for log in logs)
        assert found == pytest.approx(expected, rel=1e-5)


class Running(eqx.Module):
    """A mixer that knows nothing of texts: the mean of all tokens so far."""

    def __call__(self, x, state, span):
        return jnp.cumsum(x, axis=1) / jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None], state

    def empty_state(self, spec):
        return jnp.zeros(spec.slots)


def test_a_model_that_mixes_texts_is_refused_or_has_a_row_for_each():
    sizes = {"hidden": 32, "heads": 2, "head_dim": 8, "q_rank": 8, "groups": 1, "o_rank": 8, "window": 8}
    csa = CSAConfig(**sizes, eps=1e-6, std=0.2, rope=Rope.plain(1e4, 4), ratio=4)
    model = open_model(PAIR)
    assert leak(model) is None
    for mixer, why in (
        (CSA.init(csa, key=jax.random.key(0), dtype=jnp.float32), "HCA attention compresses a row's tokens together"),
        (Running(), "Running mixes the texts of a row"),
    ):
        other = eqx.tree_at(lambda m: m.model.layers[1].attention, model, mixer)
        assert leak(other).startswith(f"layers.1: {why}")
        with pytest.raises(ValueError, match=f"packing: layers.1: {why}.*give each text a row"):
            finetune(other, texts([4]), None, FineTuning(packing=True))


def test_a_row_of_a_cache_is_one_text():
    with pytest.raises(ValueError, match="text_starts: a row of a cache is one text"):
        dataclasses.replace(Span.whole(1, 3), table=jnp.zeros((1, 1), jnp.int32), text_starts=jnp.zeros((1, 3), int))
