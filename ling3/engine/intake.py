"""Checks prompts and sampling parameters before any work is done, and makes requests of them."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import jax
import numpy as np

from ling3.engine.adapters import ServedAdapters
from ling3.engine.at_end import capture_answer, keep_snapshot
from ling3.engine.grammars import Constraint, Grammars
from ling3.engine.origins import origin
from ling3.engine.request import Request, TokenSequence, draw_seed
from ling3.engine.runner import Runner
from ling3.engine.sampling_params import SamplingParams, check_length, check_prompt, check_room
from ling3.engine.settings import DECODE_STEPS, EngineSettings
from ling3.engine.shapes import Shapes
from ling3.engine.snapshots import NONE_KEPT, Continued, Snapshot, SnapshotChecks, continued
from ling3.engine.speculation import Acceptance, Speculation
from ling3.intervention import Intervention, sites
from ling3.mesh.sharded import placement_of
from ling3.runtime.parameters import ParameterError
from ling3.runtime.quoting import shown
from ling3.runtime.scalars import is_whole
from ling3.text.detokenizer import StopStrings
from ling3.text.tokenizer import Tokenizer

Truncate = Literal["prompt", "output"] | None
"""The part to shorten if prompt and max_tokens do not fit: the prompt's beginning, max_tokens, or none (an error)."""

UNSUPPORTED = "the forward passes of this engine do not support it"
NO_ADAPTERS = "this engine has none: give it some, as Engine(model, tokenizer, adapters={name: adapter or path})"


@dataclasses.dataclass
class Intake:
    """Makes requests of prompts and sampling parameters. Raises ParameterError if a request can never be answered."""

    tokenizer: Tokenizer | None
    vocab: int
    ends: Sequence[int]
    """The end-of-text ids of model and tokenizer."""
    settings: EngineSettings
    shapes: Shapes
    parts: frozenset[str]
    """The optional parts of a `Batch` that the engine's programs accept."""
    snapshots: SnapshotChecks | None = None
    """The checks of snapshots; None if the engine supports none."""
    leads: bool = True
    """False if another process has already checked each request."""
    sites: Callable[[], Mapping[str, tuple[int, ...]]] | None = None
    """The shapes of the arrays that the model records; None if captures and interventions are not supported."""
    adapters: ServedAdapters | None = None
    """The engine's adapters; None if it has none."""
    guessed: Acceptance = dataclasses.field(default_factory=lambda: Acceptance(memory=0.9))
    """The guesses of all sequences so far, from which one's chances are taken before its own are counted."""

    @staticmethod
    def of(runner: Runner, tokenizer: Tokenizer | None, settings: EngineSettings, leads: bool = True) -> "Intake":
        """The intake of the engine that uses `runner`."""
        model, shapes, programs, snapshots = runner.model, runner.shapes, runner.forward, None
        alone = placement_of(model) is None
        if alone and programs.snapshots:
            belongs = functools.lru_cache(1)(lambda _: origin(runner.model, settings, shapes, runner.execution))
            snapshots = SnapshotChecks.of(runner.pool, shapes, lambda: belongs(runner.updates), lambda: runner.updates)
        watched = alone and {"want", "interventions"} <= programs.parts
        return Intake(
            tokenizer=tokenizer,
            vocab=model.config.vocab_size,
            ends=sorted({*model.config.eos_token_id, *(tokenizer.eos_token_ids if tokenizer else ())}),
            settings=settings,
            shapes=shapes,
            parts=programs.parts,
            snapshots=snapshots,
            leads=leads,
            sites=(lambda: sites(runner.model)) if watched else None,
            adapters=runner.adapters,
        )

    def portable(self) -> "Intake":
        """A copy for another process, where a tokenizer is filled in; it supports no snapshots."""
        shapes = None if self.sites is None else functools.partial(dict, self.sites())
        adapters = self.adapters and self.adapters.portable()
        return dataclasses.replace(self, tokenizer=None, snapshots=None, sites=shapes, adapters=adapters)

    @property
    def room(self) -> int:
        """The most tokens of a request, prompt and output."""
        assert self.settings.max_model_len is not None, "settled"
        return self.settings.max_model_len

    @property
    def pages(self) -> int:
        """The most pages that one sequence can get, those of one group of devices."""
        return self.shapes.pages // self.shapes.groups

    def request(
        self, request_id: int, prompt: Any, params: SamplingParams | None, truncate: Truncate, name: str
    ) -> Request:
        """Checks a prompt and makes a request of it; errors call the prompt by `name`."""
        updates = None if self.snapshots is None else self.snapshots.updates()
        ids, params, ends, constraint = self.check(prompt, params, truncate, name)
        seed = draw_seed() if params.seed is None else params.seed
        request = Request(request_id, prompt if isinstance(prompt, str) else None, ids, params)
        before = continued(prompt)
        if params.adapter is not None and self.adapters is not None:
            request.adapter = self.adapters.index(params.adapter)
        if params.keep and self.snapshots is not None:
            request.origin = {**self.snapshots.origin(), **self._adapters_origin(params)}
        request.updates = updates if params.keep or before is not None else None
        request.interventions, request.want = self._watched(params)
        at_once = params.capture is not None and params.max_tokens == 0 and params.prompt_logprobs is None
        request.at_end = [keep_snapshot] * params.keep + [capture_answer] * (params.capture is not None and not at_once)
        stepwise = params.keep and (self.shapes.window is not None or bool(params.stop))
        guesses = self.shapes.drafts is not None and not (request.interventions or stepwise)
        for index in range(params.n):
            own = constraint and constraint.copy()
            sequence = TokenSequence(
                request,
                index,
                order=-1,
                seed=seed + index,
                ends=ends,
                decoder=None if self.tokenizer is None else self.tokenizer.stream(ids),
                stops=StopStrings(params.stop),
                constraint=own,
                prefill_end=len(ids) - 1,
                stepwise=stepwise,
                synchronous=stepwise or constraint is not None,
                speculation=self._speculation(own) if guesses else None,
                reads_prefixes=params.prompt_logprobs is None and not request.interventions,
                keeps_prefixes=not request.interventions,
            )
            if at_once:
                sequence.watch()
            if before is not None:
                sequence.resume(before.snapshot)
            request.sequences.append(sequence)
        return request

    def _speculation(self, constraint: Constraint | None) -> Speculation:
        """What guesses the tokens of a sequence; with a grammar, only those that it forces, which are always right."""
        draft, sizes = self.settings.speculation, self.shapes.drafts
        assert draft is not None and sizes is not None, "asked for"
        if constraint is not None:
            return Speculation(lambda _: list(constraint.forced), sizes.each, DECODE_STEPS - 1, self.vocab)
        return Speculation(draft, sizes.each, sizes.tokens - 1, self.vocab, self.guessed)

    def check(
        self, prompt: Any, params: SamplingParams | None, truncate: Truncate, name: str
    ) -> tuple[list[int], SamplingParams, tuple[int, ...], Constraint | None]:
        """The prompt's ids and the params, shortened to fit; the ids that end an answer; its constraint."""
        params = SamplingParams() if params is None else params
        if params.n > self.settings.max_queue:
            raise ParameterError("n", f"n is {params.n}, but max_queue is {self.settings.max_queue}")
        ends = params.check(self.vocab, self.ends)
        if params.stop and self.tokenizer is None:
            raise ParameterError("stop", "stop: strings need a tokenizer, and this engine has none: use stop_token_ids")
        for field, part in (("structured", "masks"), ("prompt_logprobs", "targets")):
            if getattr(params, field) is not None and part not in self.parts:
                raise ParameterError(field, f"{field} is not None, and {UNSUPPORTED}")
        if params.keep and self.snapshots is None:
            raise ParameterError("keep", f"keep is True, and {NONE_KEPT}")
        if params.adapter is not None:
            if self.adapters is None:
                raise ParameterError("adapter", f"adapter is {shown(params.adapter)}, and {NO_ADAPTERS}")
            self.adapters.index(params.adapter)
        self._watched(params)
        if (before := continued(prompt)) is None:
            encoded = self._encoded(prompt, name)
        else:
            encoded = self._continued(before, params, name)
            truncate = None if truncate == "prompt" else truncate
        # The length is checked first: checking every id of a long prompt takes a while.
        places, params = self._fitted(range(check_length(encoded, name)), params, truncate, name)
        ids = check_prompt(encoded, self.vocab, name)[places.start :]
        return ids, params, ends, self._constraint(params, ends)

    def requests(
        self,
        ids: Iterator[int],
        prompts: Sequence[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        truncate: Truncate,
        name: str = "prompt {}",
    ) -> list[Request]:
        """A checked request for each prompt, called `name` with its index; `params` are for all, or one for each."""
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ParameterError(
                "params", f"{len(each)} params for {len(prompts)} prompts, expected one for all or one for each"
            )
        return [self.request(next(ids), prompts[i], own, truncate, name.format(i)) for i, own in enumerate(each)]

    def left(self, tokens: int) -> int:
        """The largest `max_tokens` for a prompt of `tokens` tokens; less than 1 if there is no room for any."""
        most = (
            self.room
            if self.shapes.most_pages <= self.pages
            else min(self.room, self.pages * self.shapes.page_size + 1)
        )
        return most - tokens

    @functools.cached_property
    def _grammars(self) -> Grammars:
        assert self.tokenizer is not None, "checked before"
        return Grammars(self.tokenizer, self.vocab, self.ends, tried=self.leads)

    def _adapters_origin(self, params: SamplingParams) -> Mapping[str, Any]:
        """The part of a snapshot's origin that is its adapter's; empty without one."""
        return {} if params.adapter is None or self.adapters is None else self.adapters.origin(params.adapter)

    def _watched(self, params: SamplingParams) -> tuple[tuple[Intervention, ...], tuple[str, ...]]:
        """The interventions, prepared for the model, and the recorder's paths of the arrays to capture."""
        if not params.interventions and params.capture is None:
            return (), ()
        if self.sites is None:
            name = "capture" if params.capture is not None else "interventions"
            raise ParameterError(name, f"{name}: {UNSUPPORTED} (on a mesh none do)")
        shapes = self.sites()
        with _about("interventions"):
            interventions = tuple(jax.tree.map(np.asarray, each.settled(shapes)) for each in params.interventions)
        with _about("capture"):
            return interventions, () if params.capture is None else params.capture.paths(shapes)

    def _constraint(self, params: SamplingParams, ends: Sequence[int]) -> Constraint | None:
        """A sequence's constraint before its first token; None without a grammar."""
        if params.structured is None:
            return None
        if self.tokenizer is None:
            raise ParameterError("structured", "structured: a grammar needs a tokenizer, and this engine has none")
        with _about("structured"):
            constraint = self._grammars.constraint(params.structured, ends)
        if (blocked := constraint.blocked(0, params.min_tokens)) is not None:
            raise ParameterError("structured", f"structured: {blocked}")
        return constraint

    def _encoded(self, prompt: Any, name: str, **how: Any) -> Any:
        """Encodes a text (`how` are options of `Tokenizer.encode`) or a chat; returns any other prompt unchanged."""
        if not _is_chat(prompt) and not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise ParameterError(name, f"{name} is text, and this engine has no tokenizer: give token ids")
        with _about(name, f"{name}: "):
            if isinstance(prompt, str):
                return self.tokenizer.encode(prompt, **how)
            return self.tokenizer.apply_chat_template(prompt)

    def _continued(self, prompt: Continued, params: SamplingParams, name: str) -> list[int]:
        """The ids of a snapshot and of the prompt appended to it, both checked."""
        if self.snapshots is None:
            raise ParameterError(name, f"{name} is a snapshot, and {NONE_KEPT}")
        with _about(name):
            self.snapshots.check(prompt.snapshot, name, self._adapters_origin(params))
        before, more = list(prompt.snapshot.token_ids), prompt.more
        if not isinstance(more, str) or more:  # an empty text needs no tokenizer
            more = self._encoded(more, name, add_special_tokens=False)
        if _is_chat(prompt.more):
            same = next((i for i, pair in enumerate(zip(before, more, strict=False)) if len({*pair}) > 1), None)
            if same is not None or len(more) <= len(before):
                place = min(len(more), len(before)) if same is None else same
                raise ParameterError(
                    name,
                    f"{name}: the chat's {len(more)} tokens are not the snapshot's {len(before)} and more: they part "
                    f"at token {place}; give the whole conversation, or append token ids",
                )
            more = more[len(before) :]
        nothing = isinstance(more, (str, list, tuple)) and not more
        ids = [] if nothing else check_prompt(more, self.vocab, name)
        prompt.snapshot.check(params, bool(ids), name)
        return before + ids

    def _fitted(
        self, places: range, params: SamplingParams, truncate: Truncate, name: str
    ) -> tuple[range, SamplingParams]:
        """The prompt's positions and the params; if they do not fit, shortens one of them as `truncate` says."""
        if truncate == "output" and len(places) < self.room:
            most = min(params.max_tokens, self.room - len(places))
            params = dataclasses.replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most))
        elif truncate == "prompt" and params.max_tokens < self.room:
            places = places[-(self.room - params.max_tokens) :]
        check_room(places, params.max_tokens, self.room, name)
        held = len(places) + params.max_tokens - (params.capture is None)
        pages = min(-(-held // self.shapes.page_size), self.shapes.most_pages)
        if pages > self.pages:
            raise ParameterError(
                name,
                f"{name} has {len(places)} tokens and max_tokens is {params.max_tokens}: that takes {pages} pages of "
                f"{self.shapes.page_size} tokens, and the engine has {self.pages}; ask for less, or give the engine "
                "more (num_pages, mem_fraction)",
            )
        return places, params


@contextlib.contextmanager
def _about(field: str, before: str = "") -> Iterator[None]:
    """Turns a ValueError into a ParameterError about the `field`, with the text `before` its message."""
    try:
        yield
    except ValueError as error:
        raise ParameterError(field, f"{before}{error}") from error


def listed(prompts: Any) -> list[Any]:
    """The prompts as a list; a single text, list of ids, chat or snapshot becomes a list of one."""
    if isinstance(prompts, (bytes, Mapping, Set)):
        raise ParameterError("prompts", f"prompts are {shown(prompts)}, expected a list; a chat is a list of messages")
    several = [prompts] if isinstance(prompts, (str, Snapshot, Continued)) else list(prompts)
    one = len(several) > 0 and (is_whole(several[0]) or isinstance(several[0], dict))
    return [several] if one else several


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, (list, tuple)) and len(prompt) > 0 and isinstance(prompt[0], dict)
