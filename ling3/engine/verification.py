"""The device's side of speculation: passes over the model that check guesses of a sequence's next tokens (drafts).

The rows of a pass are each sequence's newest token and the drafts after it (`Span.rows_each`). A row does not depend on
the other rows, so each row's token is the one that a single step would give as long as the drafts before it are right.
The tokens up to the first wrong draft are kept, one of them behind the last right draft, and the states go back to the
last kept one (`cache.kept`).
"""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt32

from ling3.cache import Span, kept
from ling3.engine.arrays import AnyArray
from ling3.engine.masks import masks_of_steps
from ling3.engine.pool import Pool, Rows
from ling3.engine.sampling import Choice, choose_active, counted, drafted_rows, ends
from ling3.execution import Execution
from ling3.model import CausalLM
from ling3.mtp import predicted


class Drafts(eqx.Module):
    """Guesses for the passes of one call: pass after pass takes the next, as long as all tokens so far were guessed."""

    tokens: Int32[AnyArray, "rows guesses"]  # of those after the newest; -1 after the last
    passes: Int32[AnyArray, " rows"]  # the most that a row takes part in
    depth: Int32[AnyArray, " rows"]  # the most drafts of a row that one pass checks
    each: int = eqx.field(static=True)
    """The most drafts for which a pass has rows."""
    mtp: bool = eqx.field(static=True)
    """True: each pass guesses for the next one, with the model's multi-token-prediction layer."""

    @property
    def most(self) -> int:
        """The most tokens that a row gets in the call."""
        return self.tokens.shape[1] + 1


class Verified(eqx.Module):
    """The results of a call with drafts. Each pass gives a row the drafts that are right, and one token more."""

    choice: Choice  # [rows, most]; the tokens after a row's last are -1
    passes: Int32[AnyArray, " rows"]  # that the row took part in
    drafted: Int32[AnyArray, " rows"]  # drafts that these checked
    rejected: Int32[AnyArray, " rows"]  # passes with a wrong draft
    following: Int32[AnyArray, "rows each"]  # drafts of the tokens after the row's last; -1 for none


class AllowedTokens(eqx.Module):
    """The tokens that a grammar allows: those it forces, one for each step, and then those of the mask."""

    forced: Int32[Array, "rows steps"]
    masks: UInt32[Array, "rows words"]


class PassProgress(eqx.Module):
    """The tokens and counts that the passes of a call have given so far."""

    results: Verified  # `following` has the drafts of the next pass
    given: Int32[Array, " rows"]  # tokens
    foreseen: Bool[Array, " rows"]  # True while all of them are those of `Drafts.tokens`; with `mtp`, of the last pass


PassCarry = tuple[Int32[Array, ""], Bool[Array, ""], PassProgress, Pool]
"""The number of passes so far, whether there is another, what they gave, and the pool of the call's rows."""


def verified(passes: "Passes", pool: Pool) -> tuple[Verified, Pool]:
    """Samples up to `lengths` tokens for each row that is not done. Ends when no row has drafts for another pass."""
    view, drafts = pool.take(passes.rows, passes.execution.take_rows), passes.drafts
    count = view.token.shape[0]
    out, none = Choice.none((count, drafts.most), passes.model.config.vocab_size), jnp.zeros(count, jnp.int32)
    results = Verified(out, none, none, none, jnp.asarray(drafts.tokens)[:, : drafts.each])
    progress, first = PassProgress(results, none, jnp.ones(count, bool)), jnp.zeros((), jnp.int32)
    begin: PassCarry = (first, passes.any_active(first, progress, view), progress, view)
    *_, progress, view = lax.while_loop(lambda carry: carry[1], passes.one, begin)
    return progress.results, pool.put(passes.rows, view)


@dataclasses.dataclass(frozen=True)
class Passes:
    """The passes of one call, with the inputs that they share."""

    model: CausalLM
    rows: Rows
    lengths: Int32[Array, " rows"]
    drafts: Drafts
    allowed: AllowedTokens | None
    execution: Execution

    def active(self, i: Int32[Array, ""], progress: PassProgress, view: Pool) -> Bool[Array, " rows"]:
        """True for each row that takes part in pass i, if there is one."""
        return ~view.done & (progress.given < self.lengths) & (i < self.drafts.passes)

    def any_active(self, i: Int32[Array, ""], progress: PassProgress, view: Pool) -> Bool[Array, ""]:
        """True if there is a pass i: the first one, or one that checks a draft after tokens that were foreseen."""
        guessed = (i == 0) | (progress.foreseen & (progress.results.following[:, 0] >= 0))
        left = jnp.any(self.active(i, progress, view) & guessed)
        # Devices that share experts must do the same number of passes.
        return left if self.rows.beside is None else lax.psum(left.astype(jnp.int32), self.rows.beside) > 0

    def one(self, carry: PassCarry) -> PassCarry:
        """Takes each active row's newest token and its drafts; keeps those that are right, and gives one token more."""
        i, _, progress, view = carry
        tokens = jnp.concatenate([view.token[:, None], progress.results.following], axis=1)
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        within = (steps < (self.lengths - progress.given)[:, None]) & (steps <= self.drafts.depth[:, None])
        offered = self.active(i, progress, view)[:, None] & within & (tokens >= 0)
        span = self.span(view, offered)
        hidden, layers = self.model.model(_by_row(jnp.maximum(tokens, 0))[:, None], view.layers, span)
        choice, given, ended = self.chosen(hidden, tokens, offered, progress.given, view)
        count = given.sum(axis=1, dtype=jnp.int32)
        newest = (jnp.arange(len(count), dtype=jnp.int32), jnp.maximum(count - 1, 0))
        sampling = view.sampling
        for step in range(tokens.shape[1]):
            sampling = counted(sampling, choice.token[:, step], given[:, step])
        main = len(self.model.model.attentions)  # behind it, the multi-token-prediction layer's
        view = dataclasses.replace(
            view,
            layers=(*kept(layers[:main], count), *layers[main:]),
            length=view.length + count,
            token=jnp.where(count > 0, choice.token[newest], view.token),
            done=jnp.where(count > 0, ended[newest], view.done),
            sampling=sampling,
        )
        progress = self.after(progress, choice, given, offered)
        if self.drafts.mtp:
            known = _by_row(jnp.where(given, jnp.maximum(choice.token, 0), 0))[:, None]
            own = Span(span.start, _by_row(given).astype(jnp.int32), span.table, self.execution, tokens=known)
            guesses, view = self.guessed(hidden, own, count, view)
            following = jnp.where((count > 0)[:, None], guesses, progress.results.following)
            foreseen = jnp.where(count > 0, (count > 1) | ~offered[:, 1], progress.foreseen)
            progress = eqx.tree_at(lambda p: (p.results.following, p.foreseen), progress, (following, foreseen))
        return i + 1, self.any_active(i + 1, progress, view), progress, view

    def span(self, view: Pool, offered: Bool[Array, "rows tokens"]) -> Span:
        """The span of a pass, which has a row for each token of each row."""
        each = offered.shape[1]
        start = view.length[:, None] + jnp.arange(each, dtype=jnp.int32)[None]
        table = jnp.repeat(jnp.asarray(self.rows.table), each, axis=0)
        return Span(_by_row(start), _by_row(offered).astype(jnp.int32), table, self.execution, rows_each=each)

    def chosen(
        self,
        hidden: Float[Array, "_ 1 hidden"],
        tokens: Int32[Array, "rows tokens"],
        offered: Bool[Array, "rows tokens"],
        before: Int32[Array, " rows"],
        view: Pool,
    ) -> tuple[Choice, Bool[Array, "rows tokens"], Bool[Array, "rows tokens"]]:
        """The token that follows each token; True for those that are given; True for those that would end the row.

        The call has given `before` tokens.
        """
        steps, allowed = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], None
        after = view.length[:, None] + steps + 1
        if self.allowed is not None:
            allowed = _by_row(masks_of_steps(self.allowed.forced, self.allowed.masks, before[:, None] + steps))
        logits, sampling = self.model.logits(hidden, self.execution)[:, 0], drafted_rows(view.sampling, tokens[:, 1:])
        choice = choose_active(logits, sampling, _by_row(after), _by_row(offered), self.execution, allowed)
        ended = ends(choice.token, sampling, _by_row(after)).reshape(tokens.shape) | (after + 1 >= view.until[:, None])
        choice = jax.tree.map(lambda x: x.reshape(*tokens.shape, *x.shape[1:]), choice)
        right = (choice.token[:, :-1] == tokens[:, 1:]) & ~ended[:, :-1]
        given = jnp.cumprod(jnp.pad(right, ((0, 0), (1, 0)), constant_values=True), axis=1).astype(bool) & offered
        return choice, given, ended

    def after(
        self,
        progress: PassProgress,
        choice: Choice,
        given: Bool[Array, "rows tokens"],
        offered: Bool[Array, "rows tokens"],
    ) -> PassProgress:
        """The progress after a pass; the next drafts are those of `Drafts.tokens`, if all tokens were foreseen."""
        results, each, width = progress.results, self.drafts.each, self.drafts.tokens.shape[1]
        places = progress.given[:, None] + jnp.arange(each + 1, dtype=jnp.int32)[None]
        guesses = jnp.pad(jnp.asarray(self.drafts.tokens), ((0, 0), (0, 2 * each + 1)), constant_values=-1)
        at = (jnp.arange(len(places), dtype=jnp.int32)[:, None], jnp.where(given, places, width + 1))
        foreseen = progress.foreseen & jnp.all(~given | (choice.token == guesses[at]), axis=1)
        total, wrong = progress.given + given.sum(axis=1, dtype=jnp.int32), jnp.any(offered & ~given, axis=1)
        ahead = jnp.take_along_axis(guesses, total[:, None] + jnp.arange(each, dtype=jnp.int32)[None], axis=1)
        results = Verified(
            jax.tree.map(lambda x, new: x.at[at].set(new, mode="drop"), results.choice, choice),
            results.passes + offered[:, 0].astype(jnp.int32),
            results.drafted + offered[:, 1:].sum(axis=1, dtype=jnp.int32),
            results.rejected + wrong.astype(jnp.int32),
            jnp.where(foreseen[:, None], ahead, -1),
        )
        return PassProgress(results, total, foreseen)

    def guessed(
        self, hidden: Float[Array, "_ 1 hidden"], span: Span, count: Int32[Array, " rows"], view: Pool
    ) -> tuple[Int32[Array, "rows each"], Pool]:
        """The multi-token-prediction layer's guesses of the tokens after the newest, each from the one before.

        `span` has the given tokens. The layer's cache has an entry for each token in the model's caches, made of its
        hidden state and the token after it. Entries of guesses are overwritten once the true tokens are known.
        """
        model, execution, guesses = self.model, self.execution, []
        hidden, state = predicted(model, model.mtp[0], hidden, view.layers[-1], span)
        newest = (jnp.arange(len(count), dtype=jnp.int32), jnp.maximum(count - 1, 0))
        hidden = hidden.reshape(len(count), -1, 1, hidden.shape[-1])[newest]
        wanted = (count > 0) & ~view.done
        for i in range(self.drafts.each):
            logits = model.logits(hidden, execution)[:, 0]
            token, _ = execution.likeliest(logits, wanted)
            guesses.append(jnp.where(wanted, token, -1))
            if i + 1 < self.drafts.each:
                position = view.length + i
                length = (wanted & (position + 1 < view.until)).astype(jnp.int32)
                own = Span(position, length, jnp.asarray(self.rows.table), execution, tokens=token[:, None])
                hidden, state = predicted(model, model.mtp[0], hidden, state, own)
        return jnp.stack(guesses, axis=1), dataclasses.replace(view, layers=(*view.layers[:-1], state))


def _by_row(x: Array) -> Array:
    """The tokens of all rows, one after the other."""
    return x.reshape(-1, *x.shape[2:])
