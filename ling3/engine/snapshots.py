"""Snapshots: copies on the host of what requests remember, from which later requests go on any number of times."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from ling3.cache import State
from ling3.engine.sampling_params import SamplingParams
from ling3.runtime.parameters import ParameterError


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Snapshot:
    """A request's tokens and all that it remembers of them, on the host: a prompt that need not be computed again.

    `SamplingParams(keep=True)` gives one at the end of each completion (`Completion.snapshot`), and with `max_tokens=0`
    one right after the prompt. It is a prompt for any number of requests, also at once, and `then` appends to it. Only
    what is appended is computed, and the snapshot's last token: all other tokens are `cached_tokens`. It takes no slot
    and no page, and its memory is free once nothing refers to it.

    It is the state one token before the end: the last token is put in by the next request. A request that continues
    from it has the same bits in any company, and these:

    - With nothing appended, those of one request that was never interrupted: after a prompt those of a new request with
      that prompt. Draws go on by (seed, position), and penalties count the whole answer. `max_tokens` and `min_tokens`
      count new tokens; a stop string is looked for in the new text alone, and a grammar begins anew.
    - With tokens appended, those of a new request with all the tokens if the snapshot holds whole chunks
      (`chunked_prefill_size`) of a prompt. Elsewhere that request would put the tokens into other calls, which round
      otherwise in the last bits, as decoding a token does compared with prefilling it. There the bits are those of the
      same steps, from the first prompt on, in any engine of these settings.

    What comes after a snapshot is not kept for `prefix_cache`.
    """

    token_ids: tuple[int, ...]
    """Of prompt and answer."""
    answered: int
    """How many of them, the last ones, are an answer; 0 right after a prompt."""
    held: int
    """How many are in the caches: all but the last."""
    first_page: int
    """Pages before the first that is kept: those behind a sliding window are not needed."""
    states: tuple[State, ...]
    """What the request had in its slot, a row of each array."""
    pages: tuple[tuple[Shaped[np.ndarray, "_moved _page ..."], ...], ...]
    """Its pages, some at a time: those of each paged array."""
    origin: Mapping[str, Any]
    """The model and the settings that it belongs to."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays in the host's memory."""
        return sum(x.nbytes for x in jax.tree.leaves((self.states, self.pages)))

    def then(self, more: Any) -> "Continued":
        """The prompt of its tokens and `more`: a text or token ids, which are appended.

        Or a whole chat, whose ids must begin with the snapshot's: the conversation so far and its next turn.
        """
        return Continued(self, more)

    def check(self, params: SamplingParams, more: bool, name: str) -> None:
        """ParameterError if no request of `params` can go on from it, with `more` or not."""
        again = f"{name} goes on from a snapshot, and its prompt is not computed again"
        if params.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs", f"prompt_logprobs: {again}")
        if params.capture is not None or params.interventions:
            field = "interventions" if params.capture is None else "capture"
            remedy = "capture and interventions take the whole prompt in place of the snapshot"
            raise ParameterError(field, f"{again}: {remedy}")
        if params.max_tokens == 0 and not more:
            problem = f"max_tokens is 0 and {name} is a snapshot with nothing appended: nothing is to be done"
            raise ParameterError("max_tokens", problem)

    def __repr__(self) -> str:
        return f"<Snapshot: {len(self.token_ids)} tokens, {self.nbytes / 1e6:.2f} MB>"


@dataclasses.dataclass(frozen=True, eq=False)
class Continued:
    """A prompt: a snapshot, and what follows it."""

    snapshot: Snapshot
    more: Any = ()
