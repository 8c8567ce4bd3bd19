"""From logits to the next token: adjusted, then greedy or drawn.

`ADJUSTING` changes the logits, in its order; `Execution.draw` filters them further and draws, where a row's temperature
is above 0. A filter's parameter is a field of `SamplingParams` and a column of `Sampling`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from ling3.engine.arrays import AnyArray
from ling3.engine.filters import Filter, SoFar
from ling3.engine.masks import masked
from ling3.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from ling3.execution import Execution
from ling3.ops.drawing import Logits

Allowed = UInt32[Array, "batch words"] | None
# The token of a row that has no finite logit to choose.
NOT_A_NUMBER = -2
# A flag in `Adjustments.counts`: the prompt has this token. The lower bits count it in the output.
IN_PROMPT = 1 << 30
# The size of vocabulary from which choosing a token costs more than an iteration of `lax.map`.
MANY = 2**14
# At a lower temperature logits would overflow float32, and two infinities tie.
COLDEST = 1e-30


class DraftRows(eqx.Module):
    """For rows that are drafts: which row of bias and counts each has, and the drafts before it, which also count."""

    sequence: Int32[Array, " batch"]
    before: Int32[Array, "batch drafts"]  # -1 for none


class Adjustments(eqx.Module):
    """Biases and penalties on a row's logits, where it is `active`; see `SamplingParams`."""

    active: Bool[Array, " batch"]
    repetition: Float32[Array, " batch"]
    presence: Float32[Array, " batch"]
    frequency: Float32[Array, " batch"]
    bias: Float32[Array, "sequences vocab"]
    counts: Int32[Array, "sequences vocab"]  # of each token in the output, plus IN_PROMPT
    drafted: DraftRows | None = None  # None: row i has row i of bias and counts

    def of(self, rows: Int32[Array, " some"]) -> "Adjustments":
        """The adjustments of some rows, each with bias and counts of its own."""
        if self.drafted is None:
            return jax.tree.map(lambda x: x[rows], self)
        sequence, before = self.drafted.sequence[rows], self.drafted.before[rows]
        counts = self.counts[sequence]
        at = (jnp.arange(len(rows), dtype=jnp.int32)[:, None], jnp.where(before >= 0, before, counts.shape[1]))
        counts = counts.at[at].add(1, mode="drop")
        return dataclasses.replace(self, **self._flags(rows), bias=self.bias[sequence], counts=counts, drafted=None)

    def spread(self, sequence: Int32[Array, " rows"], before: Int32[Array, "rows drafts"]) -> "Adjustments":
        """The adjustments of rows that are drafts, which share bias and counts."""
        return dataclasses.replace(self, **self._flags(sequence), drafted=DraftRows(sequence, before))

    def _flags(self, rows: Int32[Array, " some"]) -> dict[str, Array]:
        flags = {"active": self.active, "repetition": self.repetition}
        flags |= {"presence": self.presence, "frequency": self.frequency}
        return {name: x[rows] for name, x in flags.items()}

    @staticmethod
    def build(
        rows: Sequence[tuple[SamplingParams, Sequence[int], Sequence[int]]],
        vocab: int,
        put: Callable[[Any], Any] = jax.device_put,
    ) -> "Adjustments":
        """One row per (params, tokens of the prompt, tokens of the output); `put` takes arrays to the device."""
        params = [each for each, _, _ in rows]
        bias, counts = np.zeros((len(rows), vocab), np.float32), np.zeros((len(rows), vocab), np.int32)
        for i, (each, prompt, output) in enumerate(rows):
            for token, value in (each.logit_bias or {}).items():
                bias[i, token] = value
            counts[i, list(set(prompt))] = IN_PROMPT
            np.add.at(counts[i], list(output), 1)
        active = np.asarray([each.adjusts for each in params], bool)
        penalties = [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in params]
        return Adjustments(*put((active, *np.asarray(penalties, np.float32).T, bias, counts)))


class Sampling(eqx.Module):
    """How each row of a batch is sampled. Each row has its own seed, so its draws do not depend on the other rows."""

    temperature: Float32[Array, " batch"]  # 0: greedy
    top_k: Int32[Array, " batch"]  # keep the k likeliest; the vocabulary's size keeps all
    top_p: Float32[Array, " batch"]  # keep the likeliest that together reach p; 1 keeps all
    min_p: Float32[Array, " batch"]  # keep what is at least min_p times as likely as the likeliest; 0 keeps all
    seed: Int32[Array, " batch"]
    stops: Int32[Array, "batch stops"]  # ids that end the row; -1 means no id
    least: Int32[Array, " batch"]  # no stop before the row has this many tokens, including the prompt
    alternatives: Bool[Array, " batch"]  # True where the likeliest tokens are reported
    adjustments: Adjustments | None  # None where no row wants any
    filters: tuple[Filter, ...] = eqx.field(static=True, default=())  # the user's; they need `adjustments`

    @staticmethod
    def build(
        rows: Sequence[tuple[SamplingParams, int, int, Sequence[int]]],
        vocab: int,
        width: int,
        adjustments: Adjustments | None = None,
        put: Callable[[Any], Any] = jax.device_put,
        filters: tuple[Filter, ...] = (),
    ) -> "Sampling":
        """One row per (params, seed, length of the prompt, stop ids), with `width` columns for stop ids.

        `put` takes arrays of the host to the device.
        """
        stops = np.full((len(rows), width), -1, np.int32)
        for row, (_, _, _, ids) in zip(stops, rows, strict=True):
            row[: len(ids)] = ids
        params = [row[0] for row in rows]
        columns = {
            "temperature": np.asarray([p.temperature and max(p.temperature, COLDEST) for p in params], np.float32),
            "top_k": np.asarray([vocab if p.top_k is None else min(p.top_k, vocab) for p in params], np.int32),
            "top_p": np.asarray([p.top_p for p in params], np.float32),
            "min_p": np.asarray([p.min_p for p in params], np.float32),
            "seed": np.asarray([seed for _, seed, _, _ in rows], np.int32),
            "stops": stops,
            "least": np.asarray([prompt + p.min_tokens for p, _, prompt, _ in rows], np.int32),
            "alternatives": np.asarray([bool(p.logprobs or p.prompt_logprobs) for p in params], bool),
        }
        return Sampling(**put(columns), adjustments=adjustments, filters=filters)

    def of(self, rows: Int32[Array, " some"]) -> "Sampling":
        """How some of the rows are sampled."""
        own = jax.tree.map(lambda x: x[rows], dataclasses.replace(self, adjustments=None))
        return dataclasses.replace(own, adjustments=None if self.adjustments is None else self.adjustments.of(rows))


def drafted_rows(sampling: Sampling, drafts: Int32[Array, "sequences drafts"]) -> Sampling:
    """The sampling of the rows of a pass: of each sequence's newest token, and of the drafts after it."""
    count, most = drafts.shape
    sequence = jnp.repeat(jnp.arange(count, dtype=jnp.int32), most + 1)
    rows = dataclasses.replace(sampling, adjustments=None).of(sequence)
    if (own := sampling.adjustments) is None:
        return rows
    earlier = jnp.arange(most, dtype=jnp.int32)[None, None] < jnp.arange(most + 1, dtype=jnp.int32)[None, :, None]
    before = jnp.where(earlier, drafts[:, None], -1).reshape(-1, most)
    return dataclasses.replace(rows, adjustments=own.spread(sequence, before))


class Choice(eqx.Module):
    """The next token of each row, its log-probability, and the likeliest tokens where requested."""

    token: Int32[AnyArray, "*rows"]
    logprob: Float32[AnyArray, "*rows"]  # natural, under the model's own logits
    top_ids: Int32[AnyArray, "*rows top"]
    top_logprobs: Float32[AnyArray, "*rows top"]

    @staticmethod
    def none(rows: tuple[int, ...], vocab: int) -> "Choice":
        """A choice of no tokens: -1 in every row."""
        top = (*rows, min(MAX_LOGPROBS, vocab))
        return Choice(
            jnp.full(rows, -1, jnp.int32),
            jnp.zeros(rows, jnp.float32),
            jnp.zeros(top, jnp.int32),
            jnp.zeros(top, jnp.float32),
        )


def choose(
    logits: Logits,
    total: Float32[Array, " batch"],
    sampling: Sampling,
    positions: Int32[Array, " batch"],
    execution: Execution,
    allowed: Allowed = None,
) -> Choice:
    """The token that follows each row's `positions` tokens; NOT_A_NUMBER if no finite logit is left to choose.

    `total` is log Σ e^logits. With masks, only tokens that `allowed` has are chosen.
    """
    adjusted, every = logits, jnp.ones(logits.shape[0], bool)
    for adjust in ADJUSTING:
        adjusted = adjust(adjusted, sampling, positions, allowed)
    token = sample(adjusted, execution.likeliest(adjusted, every)[0], sampling, positions, every, execution)
    best = jnp.take_along_axis(adjusted, token[:, None], axis=-1)[:, 0]
    return _usable(scored(logits, total, token, jnp.any(sampling.alternatives)), total, best)


def _usable(found: Choice, total: Float32[Array, " batch"], best: Float32[Array, " batch"]) -> Choice:
    """The choice, with NOT_A_NUMBER for rows whose sum or `best` logit is not finite."""
    usable = jnp.isfinite(total) & jnp.isfinite(best)
    return eqx.tree_at(lambda choice: choice.token, found, jnp.where(usable, found.token, NOT_A_NUMBER))


def scored(
    logits: Logits,
    total: Float32[Array, " batch"],
    token: Int32[Array, " batch"],
    alternatives: Bool[Array, ""],
) -> Choice:
    """The log-probabilities of these tokens, logits - total; with `alternatives` the likeliest tokens too."""
    own = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    logprob = own - total

    def likeliest() -> tuple[Int32[Array, "batch top"], Float32[Array, "batch top"]]:
        values, ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
        return ids.astype(jnp.int32), values - total[:, None]

    def nothing() -> tuple[Int32[Array, "batch top"], Float32[Array, "batch top"]]:
        none = Choice.none(logits.shape[:1], logits.shape[1])
        return none.top_ids, none.top_logprobs

    top_ids, top_logprobs = lax.cond(alternatives, likeliest, nothing)
    return Choice(token, logprob, top_ids, top_logprobs)


def choose_active(
    logits: Logits,
    sampling: Sampling,
    positions: Int32[Array, " batch"],
    active: Bool[Array, " batch"],
    execution: Execution,
    allowed: Allowed = None,
) -> Choice:
    """`choose` for the `active` rows; other rows get any token, and with `row_by_row` cost nothing.

    `choose` runs only if a row wants its logits adjusted, or the likeliest tokens reported.
    """
    greedy, total = execution.likeliest(logits, active)
    drafted = sampling.adjustments is not None and sampling.adjustments.drafted is not None
    if not execution.row_by_row or logits.shape[1] < MANY:
        sampling = sampling.of(jnp.arange(len(logits), dtype=jnp.int32)) if drafted else sampling
        return choose(logits, total, sampling, positions, execution, allowed)

    def chosen(row: Int32[Array, ""]) -> Choice:
        def own(x: Any) -> Any:
            return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, row, 1), x)

        how = sampling.of(row[None]) if drafted else own(sampling)
        return choose(own(logits), own(total), how, own(positions), execution, own(allowed))

    def of(row: Int32[Array, ""]) -> Choice:
        return lax.cond(active[row], chosen, lambda _: Choice.none((1,), logits.shape[1]), row)

    def one_by_one() -> Choice:
        every = lax.map(of, jnp.arange(logits.shape[0], dtype=jnp.int32))
        return jax.tree.map(lambda x: x[:, 0], every)

    def at_once() -> Choice:
        token = sample(logits, greedy, sampling, positions, active, execution)
        return _usable(scored(logits, total, token, jnp.zeros((), bool)), total, total)

    if sampling.filters or allowed is not None:
        return one_by_one()
    more = sampling.alternatives | jnp.any(_early(sampling, positions), axis=-1)
    if sampling.adjustments is not None:
        more |= sampling.adjustments.active
    return lax.cond(jnp.any(more & active), one_by_one, at_once)


def counted(sampling: Sampling, token: Int32[Array, " batch"], chosen: Bool[Array, " batch"]) -> Sampling:
    """Adds each row's new token to its counts, where one was `chosen`; returns the sampling."""
    if sampling.adjustments is None:
        return sampling
    counts = sampling.adjustments.counts
    rows = jnp.arange(token.shape[0], dtype=jnp.int32)
    counts = counts.at[rows, jnp.where(chosen & (token >= 0), token, counts.shape[1])].add(1, mode="drop")
    return eqx.tree_at(lambda s: s.adjustments.counts, sampling, counts)


def ends(token: Int32[Array, " batch"], sampling: Sampling, positions: Int32[Array, " batch"]) -> Bool[Array, " batch"]:
    """True for each row that ends with its `token`, which follows `positions` others."""
    stop = jnp.any(token[:, None] == sampling.stops, axis=-1) & (positions >= sampling.least)
    return stop | (token == NOT_A_NUMBER)


def sample(
    logits: Logits,
    greedy: Int32[Array, " batch"],
    sampling: Sampling,
    positions: Int32[Array, " batch"],
    active: Bool[Array, " batch"],
    execution: Execution,
) -> Int32[Array, " batch"]:
    """The next token of each row: `greedy`, its likeliest, or drawn where its temperature is above 0.

    `positions` counts the row's tokens so far: its draw is keyed by (seed, position).
    """
    wanted = (sampling.temperature > 0) & active

    def drawn() -> Int32[Array, " batch"]:
        key = jax.vmap(lambda seed, at: jax.random.fold_in(jax.random.key(seed), at))(sampling.seed, positions)
        how = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p
        return jnp.where(wanted, execution.draw(logits, wanted, key, *how), greedy)

    return lax.cond(jnp.any(wanted), drawn, lambda: greedy)


def biased_and_penalized(logits: Logits, sampling: Sampling, *_: Any) -> Logits:
    """Applies `logit_bias` and the three penalties to the rows that have any."""
    adjust = sampling.adjustments
    if adjust is None:
        return logits

    def adjusted() -> Logits:
        z = logits + adjust.bias
        repeated = jnp.where(z > 0, z / adjust.repetition[:, None], z * adjust.repetition[:, None])
        z = jnp.where(adjust.counts > 0, repeated, z)
        output = adjust.counts & (IN_PROMPT - 1)
        z = z - adjust.frequency[:, None] * output.astype(jnp.float32)
        z = z - adjust.presence[:, None] * (output > 0).astype(jnp.float32)
        return jnp.where(adjust.active[:, None], z, logits)

    return lax.cond(jnp.any(adjust.active), adjusted, lambda: logits)


def filtered_by_user(logits: Logits, sampling: Sampling, positions: Int32[Array, " batch"], *_: Any) -> Logits:
    """Applies the user's filters to each row by itself."""
    if not sampling.filters:
        return logits
    assert sampling.adjustments is not None, "whose counts the filters are given"
    counts = sampling.adjustments.counts
    so_far = SoFar(positions, counts & (IN_PROMPT - 1), counts >= IN_PROMPT)
    for each in sampling.filters:
        logits = jax.vmap(each)(logits, so_far)
    return logits


def without_early_stops(logits: Logits, sampling: Sampling, positions: Int32[Array, " batch"], *_: Any) -> Logits:
    """Sets the stop ids of a row to -inf while they may not end it, by `min_tokens`."""
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    struck = jnp.where(_early(sampling, positions), sampling.stops, logits.shape[1])
    return logits.at[rows, struck].set(-jnp.inf, mode="drop")


def _early(sampling: Sampling, positions: Int32[Array, " batch"]) -> Bool[Array, "batch stops"]:
    """True for each stop id that may not end its row yet."""
    return (positions < sampling.least)[:, None] & (sampling.stops >= 0)


def allowed_only(logits: Logits, _: Sampling, __: Int32[Array, " batch"], allowed: Allowed) -> Logits:
    """Sets the tokens that `structured` does not allow to -inf."""
    return logits if allowed is None else masked(logits, allowed)


# A user's filters come first, so that they cannot undo `min_tokens` or the grammar.
ADJUSTING = (biased_and_penalized, filtered_by_user, without_early_stops, allowed_only)
"""Filters `f(logits, sampling, positions, allowed)`, which are applied to every row."""
