"""Checks prompts and settings before any work is done, and makes requests of prompts."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import jax
import numpy as np

from ling3.engine.grammars import Constraint, Grammars
from ling3.engine.request import Request, TokenSequence, draw_seed
from ling3.engine.sampling_params import SamplingParams, check_length, check_prompt, check_room
from ling3.engine.snapshot_layout import Layout
from ling3.engine.snapshots import Continued, Snapshot
from ling3.intervention import Intervention
from ling3.runtime.quoting import shown
from ling3.runtime.scalars import is_whole
from ling3.text.detokenizer import StopStrings
from ling3.text.tokenizer import Tokenizer

Truncate = Literal["prompt", "output"] | None
"""What is cut if prompt and max_tokens do not fit: the prompt's beginning, max_tokens, or nothing (an error)."""

NO_SNAPSHOTS = "an engine on a mesh or of attention and experts apart keeps no snapshots, nor does a fleet"


@dataclasses.dataclass
class Intake:
    """Makes requests of prompts and sampling parameters. Raises ValueError for what can never be answered."""

    tokenizer: Tokenizer | None
    vocab: int
    ends: Sequence[int]
    """The end ids of model and tokenizer."""
    room: int
    """The most tokens of a request."""
    pages: int
    page_size: int
    most_pages: int
    """The most pages that a sequence holds at once."""
    max_queue: int
    structured: bool = True
    """False: the engine's forward passes take no masks."""
    prompt_logprobs: bool = True
    """False: they give no scores of a prompt."""
    origin: Callable[[], Mapping[str, Any]] | None = None
    """What the engine's snapshots belong to; None where it takes none."""
    layout: Layout | None = None
    """What they look like; the engine sets it once it has a pool."""
    leads: bool = True
    """False: another process has checked each request before."""
    sites: Callable[[], Mapping[str, tuple[int, ...]]] | None = None
    """What the model shows to a recorder; None: they capture nothing and take no interventions."""

    def request(
        self, request_id: int, prompt: Any, params: SamplingParams | None, truncate: Truncate, name: str
    ) -> Request:
        """The checked request; errors call the prompt by `name`."""
        ids, params, ends, constraint = self.check(prompt, params, truncate, name)
        seed = draw_seed() if params.seed is None else params.seed
        request = Request(request_id, prompt if isinstance(prompt, str) else None, ids, params)
        snapshot = _before(prompt)
        request.origin = self.origin() if params.keep and self.origin is not None else None
        request.interventions, request.paths = self._watched(params)
        for index in range(params.n):
            decoder = None if self.tokenizer is None else self.tokenizer.stream(ids)
            own, stops = constraint and constraint.copy(), StopStrings(params.stop)
            request.sequences.append(TokenSequence(request, index, -1, seed + index, ends, decoder, stops, own))
            if snapshot is not None:
                request.sequences[index].resume(snapshot)
        return request

    def check(
        self, prompt: Any, params: SamplingParams | None, truncate: Truncate, name: str
    ) -> tuple[list[int], SamplingParams, tuple[int, ...], Constraint | None]:
        """The prompt's ids and the params that fit, the ids that end an answer, and its constraint."""
        params = SamplingParams() if params is None else params
        if params.n > self.max_queue:
            raise ValueError(f"n is {params.n}, but max_queue is {self.max_queue}")
        ends = params.check(self.vocab, self.ends)
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: strings need a tokenizer, and this engine has none; use stop_token_ids")
        for wanted, can in (("structured", self.structured), ("prompt_logprobs", self.prompt_logprobs)):
            if getattr(params, wanted) is not None and not can:
                raise ValueError(f"{wanted} is not None, and the forward passes of this engine do not support it")
        if params.keep and self.origin is None:
            raise ValueError(f"keep is True, and {NO_SNAPSHOTS}")
        self._watched(params)
        if (snapshot := _before(prompt)) is None:
            encoded = self._encoded(prompt, name)
        else:
            encoded = self._continued(snapshot, getattr(prompt, "more", ()), params, name)
            truncate = None if truncate == "prompt" else truncate
        # The length first: it is known at once, and a look at every id of a long prompt takes a while.
        places, params = self._fitted(range(check_length(encoded, name)), params, truncate, name)
        ids = check_prompt(encoded, self.vocab, name)[places.start :]
        return ids, params, ends, self._constraint(params, ends)

    def requests(
        self,
        ids: Iterator[int],
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        truncate: Truncate,
    ) -> list[Request]:
        """A checked request for each prompt; `params` are for all of them, or one for each."""
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params for {len(prompts)} prompts, expected one for all or one for each")
        return [self.request(next(ids), prompts[i], own, truncate, f"prompt {i}") for i, own in enumerate(each)]

    def left(self, tokens: int) -> int:
        """The largest `max_tokens` after a prompt of so many tokens; less than 1 if there is no room for any."""
        most = self.room if self.most_pages <= self.pages else min(self.room, self.pages * self.page_size + 1)
        return most - tokens

    @functools.cached_property
    def _grammars(self) -> Grammars:
        assert self.tokenizer is not None, "checked before"
        return Grammars(self.tokenizer, self.vocab, self.ends, tried=self.leads)

    def _watched(self, params: SamplingParams) -> tuple[tuple[Intervention, ...], tuple[str, ...]]:
        """The interventions, ready for the model, and the paths of what is to be captured."""
        if not params.interventions and params.capture is None:
            return (), ()
        if self.sites is None:
            name = "capture" if params.capture is not None else "interventions"
            raise ValueError(f"{name}: the forward passes of this engine do not support it (on a mesh none do)")
        shapes = self.sites()
        interventions = tuple(jax.tree.map(np.asarray, each.settled(shapes)) for each in params.interventions)
        return interventions, () if params.capture is None else params.capture.paths(shapes)

    def _constraint(self, params: SamplingParams, ends: Sequence[int]) -> Constraint | None:
        """A sequence's constraint at its beginning; None without a grammar."""
        if params.structured is None:
            return None
        if self.tokenizer is None:
            raise ValueError("structured: a grammar needs a tokenizer, and this engine has none")
        constraint = self._grammars.constraint(params.structured, ends)
        if (error := constraint.blocked(0, params.min_tokens)) is not None:
            raise ValueError(f"structured: {error}")
        return constraint

    def _encoded(self, prompt: Any, name: str) -> Any:
        """A text or a chat as ids; anything else as it is."""
        chat = isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], dict)
        if not chat and not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ValueError(f"{name} is text, and this engine has no tokenizer: give token ids")
        try:
            if isinstance(prompt, str):
                return self.tokenizer.encode(prompt)
            return self.tokenizer.apply_chat_template(prompt)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    def _continued(self, snapshot: Snapshot, more: Any, params: SamplingParams, name: str) -> list[int]:
        """The ids of a snapshot and of what follows it, which is checked."""
        if self.origin is None:
            raise ValueError(f"{name} is a snapshot, and {NO_SNAPSHOTS}")
        assert self.layout is not None, "which the engine sets"
        snapshot.check_origin(self.origin(), name)
        self.layout.check(snapshot, name)
        before = list(snapshot.token_ids)
        chat = isinstance(more, (list, tuple)) and len(more) > 0 and isinstance(more[0], dict)
        if chat:
            whole = self._encoded(more, name)
            same = next((i for i, pair in enumerate(zip(before, whole, strict=False)) if len({*pair}) > 1), None)
            if same is not None or len(whole) <= len(before):
                place = min(len(whole), len(before)) if same is None else same
                raise ValueError(
                    f"{name}: the chat's {len(whole)} tokens are not the snapshot's {len(before)} and more: they part "
                    f"at token {place}; give the whole conversation, or append token ids"
                )
            more = whole[len(before) :]
        elif isinstance(more, str) and more and self.tokenizer is not None:
            more = self.tokenizer.encode(more, add_special_tokens=False)
        elif isinstance(more, str) and more:
            raise ValueError(f"{name} is text, and this engine has no tokenizer: give token ids")
        nothing = isinstance(more, (str, list, tuple)) and not more
        ids = [] if nothing else check_prompt(more, self.vocab, name)
        snapshot.check(params, bool(ids), name)
        return before + ids

    def _fitted(
        self, places: range, params: SamplingParams, truncate: Truncate, name: str
    ) -> tuple[range, SamplingParams]:
        """The prompt's places and params, one of them cut where they do not fit and `truncate` says which."""
        if truncate == "output" and len(places) < self.room:
            most = min(params.max_tokens, self.room - len(places))
            params = dataclasses.replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        elif truncate == "prompt" and params.max_tokens < self.room:
            places = places[-(self.room - params.max_tokens) :]
        check_room(places, params.max_tokens, self.room, name)
        held = len(places) + max(params.max_tokens - (params.capture is None), 0)
        pages = min(-(-held // self.page_size), self.most_pages)
        if pages > self.pages:
            raise ValueError(
                f"{name} has {len(places)} tokens and max_tokens is {params.max_tokens}: that takes {pages} pages of "
                f"{self.page_size} tokens, and the engine has {self.pages}; ask for less, or give the engine more "
                "(num_pages, mem_fraction)"
            )
        return places, params


def listed(prompts: Any) -> list[Any]:
    """The prompts as a list: a text, ids, a chat and a snapshot are one each."""
    if isinstance(prompts, (bytes, Mapping, Set)):
        raise ValueError(f"prompts are {shown(prompts)}, expected a list; a chat is a list of messages")
    several = [prompts] if isinstance(prompts, (str, Snapshot, Continued)) else list(prompts)
    one = len(several) > 0 and (is_whole(several[0]) or isinstance(several[0], dict))
    return [several] if one else several


def _before(prompt: Any) -> Snapshot | None:
    """The snapshot that a prompt goes on from, if it does."""
    before = prompt.snapshot if isinstance(prompt, Continued) else prompt
    if isinstance(prompt, Continued) and not isinstance(before, Snapshot):
        raise ValueError(f"the prompt continues {shown(before)}, expected a ling3.Snapshot")
    return before if isinstance(before, Snapshot) else None
