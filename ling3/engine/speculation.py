"""Speculation: guesses of a sequence's next tokens (drafts).

A decode call with drafts checks several tokens of a sequence in each pass over the model (`verification.py`), if that
pays (`speculator.py`). Answers do not depend on what is guessed, or whether anything is: a wrong guess costs time, and
changes nothing.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ling3.cache import CacheSpec, Span
from ling3.execution import Execution
from ling3.model import CausalLM

LEAST = 4
"""Tokens that must have occurred before to guess from: shorter matches do not pay."""
CONTINUED = 256
"""The number of tokens that `lookup` guesses."""
PRIOR = 2.5
"""The number of guesses that stand for what is known before a sequence's own are counted."""
Draft = Callable[[Sequence[int]], Sequence[int]]
"""Guesses the tokens that follow some tokens, as many as it likes; none if it has no guess."""


def lookup(tokens: Sequence[int], least: int = LEAST) -> Sequence[int]:
    """The tokens that followed the last `least` tokens where these last occurred before (prompt lookup).

    They end with the last token, and go on from their own beginning, as in a text that repeats itself.
    """
    own = np.asarray(tokens, np.int32)
    if len(own) <= least:
        return ()
    ends = np.flatnonzero(own[least - 1 : -1] == own[-1]) + least - 1
    for back in range(1, least):
        ends = ends[own[ends - back] == own[-1 - back]]
    return np.resize(own[ends[-1] + 1 :], CONTINUED).tolist() if len(ends) else ()


class Acceptance:
    """How many guesses were right and how many wrong; earlier ones count less, by the factor `memory`."""

    def __init__(self, chance: float = 0.8, memory: float = 0.7):
        self.right, self.wrong, self.memory = PRIOR * chance, PRIOR * (1 - chance), memory

    def learn(self, right: int, wrong: int) -> None:
        """Counts the guesses of one call."""
        if right or wrong:
            self.right, self.wrong = self.memory * self.right + right, self.memory * self.wrong + wrong

    @property
    def chance(self) -> float:
        """How likely a guess is right, if those before it are."""
        return self.right / (self.right + self.wrong)


class Speculation:
    """The guesses of one sequence, and how many of them were right.

    A sequence whose guesses are not checked guesses all the same, while the device works (`foresee`): whether those
    guesses were right shows in the tokens that follow, and costs nothing.
    """

    def __init__(
        self,
        draft: Draft | Literal["lookup", "mtp"],
        each: int,
        most: int,
        vocab: int,
        earlier: Acceptance | None = None,
    ):
        self.draft = {"lookup": lookup, "mtp": self._predicted}.get(draft, draft) if isinstance(draft, str) else draft
        self.always, self.most, self.vocab, self.depth = draft == "mtp", most, vocab, each
        self._earlier = Acceptance() if earlier is None else earlier  # of earlier sequences, to which its own are added
        self.drafts: Sequence[int] | None = None
        """The guesses for the next call; None: it makes plain steps."""
        self.drafted = self.accepted = 0
        self._acceptance = Acceptance(self._earlier.chance)
        self._following: tuple[int, Sequence[int]] = (0, ())
        self._foreseen: tuple[int, Sequence[int]] = (0, ())

    def guess(self, tokens: Sequence[int], most: int) -> None:
        """Guesses at most `most` tokens for the next call, up to the first that is no token.

        Raises what `draft` raises, and TypeError for anything but whole numbers.
        """
        guesses = self._guesses(tokens)[: min(most, self.most)]
        self.drafts = guesses if guesses or self.always else None

    def foresee(self, tokens: Sequence[int]) -> None:
        """Compares the last foreseen tokens with those that came, and foresees those that follow. Raises as `guess`.

        The model's own layer foresees nothing, as it guesses only in passes.
        """
        length, guesses = self._foreseen
        if self.always or length == len(tokens):
            return
        came = tokens[length:]
        right = next((i for i, (a, b) in enumerate(zip(came, guesses, strict=False)) if a != b), None)
        if guesses:
            self._learn(min(len(came), len(guesses)) if right is None else right, int(right is not None))
        left = guesses[len(came) :] if right is None else ()
        self._foreseen = len(tokens), left or self._guesses(tokens)

    @property
    def foresees(self) -> bool:
        """True if `foresee` found guesses, or the model's own layer guesses."""
        return self.always or bool(self._foreseen[1])

    def learn(self, drafted: int, accepted: int, rejected: int, following: tuple[int, Sequence[int]]) -> None:
        """Notes a call's guesses, the right ones, and in how many passes one was wrong.

        `following` are the sequence's number of tokens, and the model's guesses of those after them.
        """
        self.drafted += drafted
        self.accepted += accepted
        self._following, self._foreseen, self.drafts = following, (0, ()), None
        if drafted:
            self._learn(accepted, rejected)

    @property
    def chance(self) -> float:
        """How likely a guess is right, if those before it are."""
        return self._acceptance.chance

    def _learn(self, right: int, wrong: int) -> None:
        self._acceptance.learn(right, wrong)
        self._earlier.learn(right, wrong)

    def _guesses(self, tokens: Sequence[int]) -> Sequence[int]:
        """The guesses of what follows `tokens`, up to the first that is no token."""
        found = map(operator.index, tuple(self.draft(tokens)))
        return tuple(itertools.takewhile(lambda token: 0 <= token < self.vocab, found))

    def _predicted(self, tokens: Sequence[int]) -> Sequence[int]:
        """The guesses of the model's own layer, which the last call left."""
        length, guesses = self._following
        return guesses if length == len(tokens) else ()


def fitting(most: int, rows: int) -> int:
    """The most guesses, up to `most`, that with one more divide the rows of a call. Raises ValueError for none."""
    found = max((count for count in range(1, most + 1) if rows % (count + 1) == 0), default=0)
    if not found:
        raise ValueError(
            f"engine settings: speculation with decode_rows {rows}: found no number of draft_tokens up to {most} that, "
            "with one more, divides it; give decode_rows as a multiple of 2 or 4"
        )
    return found


def check_drafts(model: CausalLM, execution: Execution, mtp: bool) -> None:
    """Raises ValueError, with the reason, if the platform or a layer of the model cannot promise the bits of steps."""
    if (platform := jax.default_backend()) != "cpu":
        raise ValueError(
            f"engine settings: speculation on {platform}: only on a CPU is it known that passes have the bits of "
            "steps; set it to None"
        )
    if mtp and not model.mtp:
        raise ValueError(
            "engine settings: speculation is 'mtp', and the model has no multi-token-prediction layer: load it with "
            "mtp=True, which keeps that of its checkpoint, or use 'lookup'"
        )
    try:
        _drafted.eval_shape(model, execution)
    except ValueError as error:
        raise ValueError(f"engine settings: speculation: {error}; set it to None for this model") from error


@functools.partial(jax.jit, static_argnames="execution")
def _drafted(model: CausalLM, execution: Execution) -> Any:
    """A pass over a token and one draft, of which only the shapes are asked."""
    spec, row = CacheSpec(1, 1, model.page_size, model.dtype), jnp.zeros(2, jnp.int32)
    span = Span(row, row, jnp.zeros((2, 1), jnp.int32), execution, rows_each=2)
    return model.model(row[:, None], model.empty_states(spec), span)
