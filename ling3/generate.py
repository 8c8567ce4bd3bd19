"""Prompts in, new tokens out: prefill in bounded chunks, then several decode steps per call on the device."""

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from ling3.cache import Cache
from ling3.model import Ling3ForCausalLM
from ling3.sampling import Sampling, sample

# Prompt tokens of one row per prefill call; shorter rests round up to a power of two from SMALLEST_CHUNK on.
PREFILL_CHUNK = 512
SMALLEST_CHUNK = 16
# Stop ids go to the device padded to a power of two from this on, so that their number is no new shape.
FEWEST_STOPS = 8
# What stands for a token where the logits were not finite numbers.
NOT_A_NUMBER = -2
# Decode steps per call, and so the most tokens of one row between two looks from the host.
DECODE_STEPS = 16


class Running(eqx.Module):
    """A batch on its way: donated to every call, so that each one updates it in place."""

    cache: Cache
    token: Int32[Array, " batch"]  # the newest token of each row, not yet in the cache
    done: Bool[Array, " batch"]


def generate(
    model: Ling3ForCausalLM,
    prompts: Iterable[Any],
    *,
    max_tokens: Any = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop_token_ids: Iterable[Any] = (),
    ignore_eos: bool = False,
) -> list[list[int]]:
    """The new token ids of each prompt, all prompts in one batch, whatever their lengths.

    A row ends after `max_tokens` tokens, or with the first of `stop_token_ids` or of the config's `eos_token_id`
    (which `ignore_eos` disregards); that token is the last of the row. A checkpoint may name more ends than its config:
    `stop_token_ids=tokenizer.eos_token_ids` has them all. Temperature 0 is greedy; otherwise row b draws from seed + b.

    Raises ValueError for an empty prompt, ids outside the vocabulary, or more tokens than the context, before any work;
    FloatingPointError if the model's logits are NaN.
    """
    prompts = list(prompts)
    rows: list[list[int]] = [[] for _ in prompts]
    for news in stream_tokens(
        model,
        prompts,
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
    ):
        for row, new in zip(rows, news, strict=True):
            row.extend(new)
    return rows


def stream_tokens(
    model: Ling3ForCausalLM,
    prompts: Iterable[Any],
    *,
    max_tokens: Any = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    stop_token_ids: Iterable[Any] = (),
    ignore_eos: bool = False,
) -> Iterator[list[list[int]]]:
    """`generate` as it happens: each item holds, per prompt, the tokens that are new since the last item.

    The arguments are checked when it is called, before the first item is asked for.
    """
    vocab = model.config.vocab_size
    max_tokens = whole("max_tokens", max_tokens, 1, None)
    ids = check_prompts(model, prompts, max_tokens)
    stops = {whole("stop_token_ids", stop, 0, vocab) for stop in stop_token_ids}
    stops |= set() if ignore_eos else set(model.config.eos_token_id)
    sampling = Sampling.uniform(
        len(ids),
        vocab,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
    )
    padded = np.full(_round_up(len(stops), FEWEST_STOPS), -1, np.int32)
    padded[: len(stops)] = sorted(stops)
    return _run(model, ids, max_tokens, sampling, jnp.asarray(padded)) if ids else iter(())


def whole(name: str, value: Any, low: int, end: int | None) -> int:
    """`value` as a plain int in [low, end), or ValueError naming it; a bool or a float is no whole number."""
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} is {value!r:.40}, expected a whole number")
    number = operator.index(value)
    if number < low or (end is not None and number >= end):
        expected = f"a whole number >= {low}" if end is None else f"an id in [{low}, {end})"
        raise ValueError(f"{name} is {number}, expected {expected}")
    return number


def check_prompts(model: Ling3ForCausalLM, prompts: Iterable[Any], max_tokens: int) -> list[list[int]]:
    """The prompts as lists of plain ints; ValueError naming the prompt where one cannot be continued."""
    vocab, context = model.config.vocab_size, model.config.max_position_embeddings
    checked = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str) or not hasattr(prompt, "__len__"):
            raise ValueError(f"prompt {i} is {prompt!r:.40}, expected a list of token ids (see ling3.load_tokenizer)")
        if len(prompt) == 0:
            raise ValueError(f"prompt {i} is empty, expected at least one token id")
        ids = [whole(f"prompt {i}, token {place}", token, 0, vocab) for place, token in enumerate(prompt)]
        if len(ids) + max_tokens > context:
            raise ValueError(
                f"prompt {i} has {len(ids)} tokens and max_tokens is {max_tokens}: {len(ids) + max_tokens} together, "
                f"but the model's context (max_position_embeddings) is {context}; shorten one or the other"
            )
        checked.append(ids)
    return checked


def _run(
    model: Ling3ForCausalLM,
    prompts: list[list[int]],
    max_tokens: int,
    sampling: Sampling,
    stops: Int32[Array, " stops"],
) -> Iterator[list[list[int]]]:
    batch, longest = len(prompts), max(map(len, prompts))
    running = Running(
        model.init_cache(batch, _round_up(longest + max_tokens, SMALLEST_CHUNK)),
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
    )
    for start in range(0, longest, PREFILL_CHUNK):
        width = _round_up(min(longest - start, PREFILL_CHUNK), SMALLEST_CHUNK)
        chunks = [prompt[start : start + width] for prompt in prompts]
        tokens = np.zeros((batch, width), np.int32)
        for row, chunk in zip(tokens, chunks, strict=True):
            row[: len(chunk)] = chunk
        lengths = np.asarray([len(chunk) for chunk in chunks], np.int32)
        running = prefill((model, sampling, stops, jnp.asarray(tokens), jnp.asarray(lengths)), running)
    yield _new_tokens(np.asarray(running.token)[:, None])

    left = max_tokens - 1
    while left > 0 and not bool(jnp.all(running.done)):
        steps = min(left, DECODE_STEPS)
        new, running = decode((model, sampling, stops, jnp.asarray(steps, jnp.int32)), running)
        left -= steps
        yield _new_tokens(np.asarray(new))


def _new_tokens(tokens: Int32[np.ndarray, "batch steps"]) -> list[list[int]]:
    """The tokens that each row got; FloatingPointError for a row whose logits were NaN."""
    broken = np.flatnonzero(np.any(tokens == NOT_A_NUMBER, axis=1)).tolist()
    if broken:
        raise FloatingPointError(
            f"the logits of prompt {', '.join(map(str, broken))} are NaN: the weights may not be finite (ling3.load "
            "checks them by default), or their dtype too narrow (try dtype=jnp.float32)"
        )
    return [[int(token) for token in row if token >= 0] for row in tokens]


def _round_up(length: int, smallest: int) -> int:
    """The next power of two, so that lengths share few compiled shapes."""
    return max(smallest, 1 << (length - 1).bit_length())


@eqx.filter_jit(donate="all-except-first")
def prefill(
    inputs: tuple[
        Ling3ForCausalLM, Sampling, Int32[Array, " stops"], Int32[Array, "batch seq"], Int32[Array, " batch"]
    ],
    running: Running,
) -> Running:
    """Bring each row's next prompt tokens into the cache; rows that bring any sample the token after their last."""
    model, sampling, stops, tokens, lengths = inputs
    logits, cache = model.step(tokens, running.cache, lengths, last=True)
    token = jnp.where(lengths > 0, _next(logits[:, 0], sampling, cache.length), running.token)
    return Running(cache, token, _ends(token, stops))


@eqx.filter_jit(donate="all-except-first")
def decode(
    inputs: tuple[Ling3ForCausalLM, Sampling, Int32[Array, " stops"], Int32[Array, ""]],
    running: Running,
) -> tuple[Int32[Array, "batch steps"], Running]:
    """Up to `steps` new tokens for each row that is not done; -1 stands where a row got none."""
    model, sampling, stops, steps = inputs
    batch = running.token.shape[0]

    def unfinished(carry):
        i, _, running = carry
        return (i < steps) & ~jnp.all(running.done)

    def step(carry):
        i, new, running = carry
        active = ~running.done
        logits, cache = model.step(running.token[:, None], running.cache, active.astype(jnp.int32))
        token = jnp.where(active, _next(logits[:, 0], sampling, cache.length), running.token)
        new = new.at[:, i].set(jnp.where(active, token, -1))
        return i + 1, new, Running(cache, token, running.done | _ends(token, stops))

    empty = jnp.full((batch, DECODE_STEPS), -1, jnp.int32)
    _, new, running = lax.while_loop(unfinished, step, (jnp.zeros((), jnp.int32), empty, running))
    return new, running


def _next(
    logits: Float32[Array, "batch vocab"], sampling: Sampling, length: Int32[Array, " batch"]
) -> Int32[Array, " batch"]:
    """The token after each row's `length`, or NOT_A_NUMBER."""
    return jnp.where(jnp.any(jnp.isnan(logits), axis=-1), NOT_A_NUMBER, sample(logits, sampling, length))


def _ends(token: Int32[Array, " batch"], stops: Int32[Array, " stops"]) -> Bool[Array, " batch"]:
    return jnp.isin(token, stops) | (token == NOT_A_NUMBER)
