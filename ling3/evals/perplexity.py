"""Perplexity of a text: each token's log-likelihood, over sliding windows."""

import dataclasses
import math
from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Float64, Int32

from ling3.cache import Cache
from ling3.engine.pool import cache_dtype
from ling3.engine.sampling_params import check_prompt
from ling3.model import CausalLM
from ling3.text.tokenizer import Tokenizer

CONTEXT = 4096
"""Tokens of a window by default, if the model's context has room for them."""

# Windows in one batch, and tokens of each per forward pass: 320 MB of logits for Ling-3.0-tiny.
ROWS, CHUNK = 4, 128


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """A text's likelihood: `nats` is the sum of -ln p over its `tokens` tokens, `nbytes` its size in UTF-8."""

    nats: float
    tokens: int
    nbytes: int

    @property
    def nats_per_token(self) -> float:
        """The mean of -ln p over the tokens."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """The perplexity, exp of the nats per token."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """nats / (ln 2 · bytes), which is comparable between models with different tokenizers."""
        return self.nats / (math.log(2) * self.nbytes)


def perplexity(
    model: CausalLM,
    tokenizer: Tokenizer,
    text: str,
    context: int | None = None,
    stride: int | None = None,
) -> Likelihood:
    """The perplexity of `text` over all its tokens; the first one is predicted from `start_token`.

    `context` and `stride` are as for `log_likelihoods`. Raises ValueError for an empty text.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise ValueError("the text is empty, expected at least one token")
    likelihoods = log_likelihoods(model, [start_token(tokenizer), *ids], context, stride)
    return Likelihood(-math.fsum(likelihoods), len(ids), len(text.encode()))


def start_token(tokenizer: Tokenizer) -> int:
    """The token put before a text: the tokenizer's bos_token, or else the one that ends a text.

    lm-evaluation-harness uses the same for Hugging Face models (tests/parity/test_harness.py). Raises ValueError if the
    tokenizer has neither.
    """
    named = [tokenizer.token_named(name) for name in ("bos_token", "eos_token")]
    found = [token for token in (*named, *tokenizer.eos_token_ids) if token is not None]
    if not found:
        raise ValueError(f"{tokenizer.name}: no token begins or ends a text, so none can stand before its first")
    return found[0]


def log_likelihoods(
    model: CausalLM, tokens: Sequence[int], context: int | None = None, stride: int | None = None
) -> Float64[np.ndarray, " predicted"]:
    """ln p(tokens[i + 1] | the window's tokens up to i), for every token but the first: `predicted` = tokens - 1.

    The first window reads `context` tokens (by default 4096, or the model's context if that is shorter) and scores the
    successor of each. Every further window ends `stride` tokens later (by default half a window) and scores only the
    successors of those. So each token is scored once, after at least context - stride tokens, or all that there are.

    Raises ValueError for fewer than two tokens and for a `context` or `stride` out of range, and FloatingPointError if
    a result is not finite.
    """
    limit = model.config.max_position_embeddings
    context = min(CONTEXT, limit) if context is None else context
    stride = max(1, context // 2) if stride is None else stride
    if not 1 <= context <= limit:
        raise ValueError(f"context is {context}, expected a whole number in [1, {limit}] (max_position_embeddings)")
    if not 1 <= stride <= context:
        raise ValueError(f"stride is {stride}, expected a whole number in [1, {context}], the context")
    ids = np.asarray(check_prompt(tokens, model.config.vocab_size, "the text"), np.int32)
    if len(ids) < 2:
        raise ValueError("the text has 1 token, expected at least 2: the first is only read")
    found = np.full(len(ids) - 1, np.nan)
    spans = _windows(len(found), min(context, len(found)), stride)
    rows = min(ROWS, len(spans))
    for first in range(0, len(spans), rows):
        _score(model, ids, spans[first : first + rows], rows, found)
    if not np.all(np.isfinite(found)):
        raise FloatingPointError(
            f"the log-likelihood of token {int(np.argmin(np.isfinite(found))) + 1} is not finite: the weights may not "
            "be, or their dtype is too narrow (try dtype=jnp.float32)"
        )
    return found


def _windows(count: int, context: int, stride: int) -> list[tuple[int, int, int]]:
    """(first token read, first token whose successor is scored, end) of each window over `count` tokens."""
    spans = [(0, 0, context)]
    while spans[-1][2] < count:
        scored = spans[-1][2]
        end = min(scored + stride, count)
        spans.append((end - context, scored, end))
    return spans


def _score(
    model: CausalLM,
    ids: Int32[np.ndarray, " tokens"],
    spans: Sequence[tuple[int, int, int]],
    rows: int,
    found: Float64[np.ndarray, " predicted"],
) -> None:
    """Scores some windows in one batch of `rows` rows, and writes the results into `found`."""
    longest = max(end - begin for begin, _, end in spans)
    cache = model.init_cache(rows, longest, cache_dtype(model))
    for start in range(0, longest, CHUNK):
        chunk = np.zeros((2, rows, CHUNK), np.int32)
        lengths = np.zeros(rows, np.int32)
        for row, (begin, _, end) in enumerate(spans):
            here = min(begin + start, end), min(begin + start + CHUNK, end)
            lengths[row] = here[1] - here[0]
            chunk[0, row, : lengths[row]] = ids[slice(*here)]
            chunk[1, row, : lengths[row]] = ids[here[0] + 1 : here[1] + 1]
        scores, cache = _step(model, jnp.asarray(chunk[0]), jnp.asarray(chunk[1]), jnp.asarray(lengths), cache)
        for row, (begin, scored, _) in enumerate(spans):
            skipped = max(0, scored - begin - start)
            values = np.asarray(scores[row, : lengths[row]])[skipped:]
            place = begin + start + skipped
            found[place : place + len(values)] = values


@eqx.filter_jit
def _step(
    model: CausalLM,
    tokens: Int32[Array, "batch seq"],
    targets: Int32[Array, "batch seq"],
    lengths: Int32[Array, " batch"],
    cache: Cache,
) -> tuple[Float32[Array, "batch seq"], Cache]:
    """The targets' log-likelihoods, and the cache extended by the tokens."""
    logits, cache = model.step(tokens, cache, lengths)
    return log_likelihood(logits, targets), cache


def log_likelihood(
    logits: Float32[Array, "batch seq vocab"], targets: Int32[Array, "batch seq"]
) -> Float32[Array, "batch seq"]:
    """The log-probability ln softmax(logits) of each target."""
    chosen = jnp.take_along_axis(logits, targets[:, :, None], axis=2)[:, :, 0]
    return chosen - jax.nn.logsumexp(logits, axis=2)
