"""Prompts in, new tokens out: one batch of prompts, prefilled in chunks and decoded together."""

from collections.abc import Iterable, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from ling3.cache import CacheSpec
from ling3.engine.filters import Filter, checked
from ling3.engine.forward import Batch, decode, extend
from ling3.engine.pool import Pool, Rows, cache_dtype
from ling3.engine.sampling import NOT_A_NUMBER, Adjustments, Sampling
from ling3.engine.sampling_params import SamplingParams, check_prompt, check_room, of_generate
from ling3.engine.settings import DECODE_STEPS
from ling3.execution import Execution
from ling3.intervention import Intervention, settled
from ling3.model import CausalLM
from ling3.runtime import compilation_cache
from ling3.runtime.entry_checks import refuse_fork

# Tokens of a prefill call, all rows together. A call takes a power of two tokens of each prompt: what is left of it,
# rounded down from FULL_CHUNK tokens on, and up below: there reading the weights takes the time, and padding is cheap.
PREFILL_CHUNK = 2048
FULL_CHUNK = 512
SMALLEST_CHUNK = 16
# The stop ids are padded to a power of two, at least this, so that their number changes few compiled shapes.
FEWEST_STOPS = 8


def generate(
    model: CausalLM,
    prompts: Iterable[Any],
    params: SamplingParams | None = None,
    *,
    execution: Execution | None = None,
    filters: Sequence[Filter] = (),
    **fields: Any,
) -> list[list[int]]:
    """Returns the new token ids of each prompt. All prompts, of any lengths, are one batch.

    `params` is how they are sampled. Its fields may be given by name too (`generate(model, prompts, temperature=0.8)`),
    or both, where a name replaces a single field. Texts, stop strings, grammars, log-probabilities and everything else
    in `ling3.engine.sampling_params.NOT_IN_GENERATE` need an `Engine`, which serves requests that come and go.

    A row ends after `max_tokens` tokens, or with the first of `stop_token_ids` or of the config's `eos_token_id`
    (unless `ignore_eos`); that token is the last of the row. A checkpoint's tokenizer may have more end ids than its
    config: `stop_token_ids=tokenizer.eos_token_ids` are all of them. Temperature 0 is greedy; otherwise row b draws
    from seed + b, and without a seed from b. `interventions` apply to every prompt at its own positions. `execution` is
    how the model runs, by default as suits the platform, and `filters` are as in `Engine`. Compiled programs are cached
    for later processes, see `ling3.runtime.compilation_cache`.

    Before any work, raises ParameterError, which is a ValueError, for an empty prompt, ids outside the vocabulary,
    fields out of their bounds, or more tokens than the context, and ValueError for interventions that do not fit the
    model. Raises FloatingPointError if the model's logits are NaN.
    """
    refuse_fork()
    compilation_cache.switch_on()
    config = model.config
    params = of_generate(params, fields)
    stops = params.check(config.vocab_size, config.eos_token_id)
    ids = []
    for i, prompt in enumerate(prompts):
        check_room(prompt, params.max_tokens, config.max_position_embeddings, f"prompt {i}")
        ids.append(check_prompt(prompt, config.vocab_size, f"prompt {i}"))
    changes, filters = settled(model, params.interventions), checked(filters, config.vocab_size)
    return _run(model, ids, params, stops, filters, execution or Execution.default(), changes) if ids else []


def _run(
    model: CausalLM,
    prompts: list[list[int]],
    params: SamplingParams,
    stops: Sequence[int],
    filters: tuple[Filter, ...],
    execution: Execution,
    interventions: tuple[Intervention, ...],
) -> list[list[int]]:
    batch, longest = len(prompts), max(map(len, prompts))
    columns = -(-round_up(longest + params.max_tokens, SMALLEST_CHUNK) // (page_size := model.page_size))
    rows = Rows(None, jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns))
    wanted = [(params, (params.seed or 0) + b, len(prompt), stops) for b, prompt in enumerate(prompts)]
    vocab, adjustments = model.config.vocab_size, None
    if params.adjusts or filters:
        adjustments = Adjustments.build([(params, prompt, ()) for prompt in prompts], vocab)
    room = round_up(len(stops), FEWEST_STOPS)
    sampling = Sampling.build(wanted, vocab, room, adjustments, filters=filters)
    spec = CacheSpec(batch, batch * columns, page_size, cache_dtype(model))
    pool = Pool.empty(model, sampling, spec)
    until = jnp.asarray([len(prompt) + params.max_tokens for prompt in prompts], jnp.int32)
    newest = jnp.asarray([prompt[-1] for prompt in prompts], jnp.int32)
    pool = eqx.tree_at(lambda p: (p.until, p.token, p.done), pool, (until, newest, jnp.zeros(batch, bool)))

    start = 0
    while start < longest - 1:  # a prompt's last token is the first that `decode` puts in
        width = _chunk(longest - 1 - start, batch)
        tokens, lengths = np.zeros((batch, width), np.int32), np.zeros(batch, np.int32)
        for row, prompt in enumerate(prompts):
            chunk = prompt[start : min(start + width, len(prompt) - 1)]
            tokens[row, : len(chunk)], lengths[row] = chunk, len(chunk)
        chunks = Batch(rows, jnp.asarray(tokens), jnp.asarray(lengths), interventions=interventions)
        _, pool = extend(model, chunks, pool, execution)
        start += width
    news: list[list[int]] = [[] for _ in prompts]
    steps = jnp.full(batch, DECODE_STEPS, jnp.int32)
    call = Batch(rows, jnp.zeros((batch, 0), jnp.int32), steps, interventions=interventions)
    while not bool(jnp.all(pool.done)):
        choice, pool = decode(model, call, pool, execution)
        _append(news, np.asarray(choice.token))
    return news


def _chunk(left: int, batch: int) -> int:
    """Columns of the next prefill call of a batch whose longest prompt has `left` tokens left."""
    most = max(SMALLEST_CHUNK, 1 << (max(1, PREFILL_CHUNK // batch).bit_length() - 1))
    if left >= FULL_CHUNK:
        return min(most, 1 << (left.bit_length() - 1))
    return min(most, round_up(left, SMALLEST_CHUNK))


def _append(rows: list[list[int]], tokens: Int32[np.ndarray, "batch steps"]) -> None:
    """Adds to each row its new tokens; raises FloatingPointError if a row's logits are NaN."""
    broken = np.flatnonzero(np.any(tokens == NOT_A_NUMBER, axis=1)).tolist()
    if broken:
        raise not_finite(f"prompt {', '.join(map(str, broken))}")
    for row, new in zip(rows, tokens, strict=True):
        row.extend(int(token) for token in new if token >= 0)


def not_finite(what: str) -> FloatingPointError:
    """The error of NaN in the logits of `what`."""
    return FloatingPointError(
        f"the logits of {what} are NaN: the weights may not be finite (ling3.load checks them by default), or their "
        "dtype too narrow (try dtype=jnp.float32)"
    )


def round_up(length: int, smallest: int) -> int:
    """`length` rounded up to a power of two, at least `smallest`, so that few shapes are compiled."""
    return max(smallest, 1 << (length - 1).bit_length())
