"""Snapshots: copies of a request's memory on the host, from which any number of later requests can continue."""

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
    """A request's tokens and its caches and states for them, on the host: a prompt that need not be computed again.

    `SamplingParams(keep=True)` gives one at the end of each completion (`Completion.snapshot`), and with `max_tokens=0`
    one right after the prompt. It is a prompt for any number of requests, also at once, and `then` appends to it. Only
    its last token and what is appended are computed: all other tokens are `cached_tokens`. It takes no slot and no
    page, and its memory is freed once nothing refers to it.

    It holds the state one token before the end: the next request puts the last token in. The bits of a request that
    continues from it do not depend on other requests, and they are these:

    - With nothing appended, those of one request that was never interrupted; after a prompt, those of a new request
      with that prompt. Sampling continues by (seed, position), and penalties count the complete answer. `max_tokens`
      and `min_tokens` count new tokens; a stop string is looked for only in the new text, and a grammar starts anew.
    - With tokens appended, those of a new request with all the tokens if the snapshot holds full chunks
      (`chunked_prefill_size`) of a prompt. Otherwise the new request would split the tokens into other calls, which
      round differently in the last bits, as decoding a token does compared with prefilling it. Then the bits are those
      of the same steps, from the first prompt on, in any engine of these settings.

    A prompt that continues a snapshot is not kept for `prefix_cache`.
    """

    token_ids: tuple[int, ...]
    """The tokens of prompt and answer."""
    answered: int
    """How many of these tokens, the last ones, are the answer; 0 right after a prompt."""
    held: int
    """The number of tokens in the caches: all but the last."""
    first_page: int
    """The number of pages left out at the beginning, which are behind a sliding window."""
    states: tuple[State, ...]
    """The states in the request's slot, one row of each array."""
    pages: tuple[tuple[Shaped[np.ndarray, "_moved _page ..."], ...], ...]
    """The entries of its pages: for each block of up to `PAGES_MOVED` pages, those of each paged array."""
    origin: Mapping[str, Any]
    """The model and the settings that the snapshot is for."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays in the host's memory."""
        return sum(x.nbytes for x in jax.tree.leaves((self.states, self.pages)))

    def then(self, more: Any) -> "Continued":
        """A prompt of the snapshot's tokens followed by `more`, a text or token ids.

        `more` may also be a complete chat, with the conversation so far, whose ids must begin with the snapshot's.
        """
        return Continued(self, more)

    def check(self, params: SamplingParams, more: bool, name: str) -> None:
        """Raises ParameterError if no request with `params` can continue from it, with or without `more`."""
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
    """A prompt that consists of a snapshot and what is appended to it."""

    snapshot: Snapshot
    more: Any = ()
