"""Perplexity against `model(tokens)`, window by window."""

import io
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively
from tiny import TINY, open_model

import ling3
from ling3 import cli
from ling3.evals.perplexity import Likelihood, log_likelihoods, perplexity, start_token

pytestmark = pytest.mark.thorough

# In float64, up to the rounding of the logits and of their logsumexp to float32 (5e-7 each at size 8).
CLOSE = {"rtol": 0, "atol": 2e-6}
LONGEST = 257


@pytest.fixture
def model():
    """Random, with open gates; in float64, as such layers amplify what rounding does to float32."""
    with jax.enable_x64(True):
        yield open_model(dtype=jnp.float64)


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(0, TINY.vocab_size, count).tolist()


def whole(model, ids):
    """ln p of every token but the first, by one forward pass; the padding at the end, which keeps to one shape, is
    after all that counts."""
    padded = [*ids, *[0] * (LONGEST - len(ids))]
    logits = np.asarray(model(jnp.asarray([padded], jnp.int32)))[0].astype(np.float64)
    scores = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return scores[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("count", exhaustively([2, 3, 129, 130, LONGEST], but=[130]))
def test_a_text_of_one_window(model, count):
    ids = tokens(count)
    found = log_likelihoods(model, ids)
    assert found.shape == (count - 1,) and found.dtype == np.float64
    np.testing.assert_allclose(found, whole(model, ids), **CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "stride"), exhaustively([(16, 8), (16, 16), (150, 40), (1, 1), (64, None), (16, 1)], but=[(16, 8)])
)
def test_windows(model, context, stride):
    """Each token as its own window scores it: the one that begins where the docstring says."""
    ids = tokens(201, seed=1)
    found = log_likelihoods(model, ids, context, stride)
    step = context // 2 if stride is None else stride
    ends = [context]
    while ends[-1] < 200:
        ends.append(min(ends[-1] + step, 200))
    expected, scored = np.full(200, np.nan), 0
    for end in ends:
        window = whole(model, ids[end - context : end + 1])
        expected[scored:end] = window[scored - end + context :]
        scored = end
    np.testing.assert_allclose(found, expected, **CLOSE)


def test_more_context_is_used(model):
    """The last token of a text that repeats itself depends on how far back a window reaches."""
    ids = tokens(60, seed=2)
    far, near = log_likelihoods(model, ids, 59, 59), log_likelihoods(model, ids, 4, 4)
    assert np.abs(far - near)[10:].max() > 1e-3 and np.allclose(far[:4], near[:4], **CLOSE)


@pytest.mark.parametrize(
    ("ids", "context", "stride", "message"),
    [
        ([3], None, None, "the text has 1 token"),
        ([], None, None, "the text is empty"),
        ([3, 96], None, None, r"token 1 is 96, expected an id in \[0, 96\)"),
        ([3, 4], 0, None, r"context is 0, expected .* \[1, 2048\]"),
        ([3, 4], 2049, None, "context is 2049"),
        ([3, 4], 8, 9, r"stride is 9, expected .* \[1, 8\]"),
        ([3, 4], 8, 0, "stride is 0"),
    ],
)
def test_what_cannot_be_scored(ids, context, stride, message):
    with pytest.raises(ValueError, match=message):
        log_likelihoods(open_model(), ids, context, stride)


def test_weights_that_are_not_finite():
    model = open_model()
    broken = eqx.tree_at(lambda m: m.lm_head.weight, model, jnp.full_like(model.lm_head.weight, jnp.nan))
    with pytest.raises(FloatingPointError, match="token 1 is not finite"):
        log_likelihoods(broken, [3, 4, 5])


def test_units():
    found = Likelihood(nats=4 * math.log(8), tokens=4, nbytes=6)
    assert math.isclose(found.perplexity, 8) and math.isclose(found.bits_per_byte, 2)
    assert math.isclose(found.nats_per_token, math.log(8))
    assert Likelihood(nats=1e6, tokens=1, nbytes=1).perplexity == math.inf


TEXT = "Question: Sam has 3 pens. 你好\nAnswer: 3 + 4 = 7."


@pytest.fixture(scope="module")
def nano():
    return ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")


def test_a_text(nano):
    model, tokenizer = nano
    ids = [start_token(tokenizer), *tokenizer.encode(TEXT)]
    assert ids[0] in tokenizer.eos_token_ids
    found = perplexity(model, tokenizer, TEXT)
    assert (found.tokens, found.nbytes) == (len(ids) - 1, len(TEXT.encode()))
    scores = log_likelihoods(model, ids)
    assert found.nats == -math.fsum(scores)
    # What is promised of a trained model in float32, whose chunks are summed in another order.
    np.testing.assert_allclose(scores, whole(model, ids), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="the text is empty"):
        perplexity(model, tokenizer, "")


def run(capsys, *argv):
    code = cli.main(["eval", "perplexity", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(nano, tmp_path, capsys, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    found = perplexity(*nano, TEXT)
    code, out, err = run(capsys, "nano", path, "--dtype", "float32")
    assert code == 0 and "nano: 2.37M parameters, float32, on cpu" in err
    assert out == (
        f"{found.tokens} tokens, {found.nbytes} bytes\nnats per token: {found.nats_per_token:.4f}\n"
        f"bits per byte: {found.bits_per_byte:.4f}\nperplexity: {found.perplexity:.4f}\n"
    )
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
    code, out, _ = run(capsys, "nano", "-", "--dtype", "float32", "--json")
    assert code == 0 and json.loads(out)["nats"] == found.nats
    path.write_bytes(b"\xff")
    for arguments, message in (
        ((path,), "not UTF-8"),
        ((tmp_path / "nowhere",), "nowhere"),
    ):
        code, out, err = run(capsys, "nano", *arguments)
        assert (code, out) == (2, "") and err.startswith("ling3: error: ") and message in err
