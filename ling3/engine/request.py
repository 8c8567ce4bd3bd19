"""A request and its sequences while the engine works on them: parameters, memory, output so far, and times."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ling3.engine.capture import Captured
from ling3.engine.grammars import Constraint
from ling3.engine.outputs import Completion, Delta, FinishReason, Logprob, RequestOutput, Timings
from ling3.engine.plans import StepPlan
from ling3.engine.sampling import NOT_A_NUMBER
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import DECODE_STEPS
from ling3.engine.snapshots import Snapshot
from ling3.engine.speculation import Speculation
from ling3.intervention import Intervention, structure
from ling3.text.detokenizer import StopStrings, StreamDecoder

NOT_FINITE = (
    "the model left no token to choose: its logits were NaN (weights that are not finite, or too narrow a dtype), or a "
    "logit_bias or min_tokens struck out every token"
)


@dataclasses.dataclass(eq=False)
class Times:
    """When a sequence was queued, got its slot and its first token, in seconds, and how often it was preempted."""

    submitted: float = dataclasses.field(default_factory=time.perf_counter)
    admitted: float | None = None
    first_token: float | None = None
    preemptions: int = 0

    def admit(self) -> None:
        """Notes the time at which the sequence first got a slot."""
        self.admitted = time.perf_counter() if self.admitted is None else self.admitted

    def until_now(self, tokens: int) -> Timings:
        """The timings so far of a sequence that has `tokens` new tokens."""
        now, first = time.perf_counter(), self.first_token
        return Timings(
            None if self.admitted is None else self.admitted - self.submitted,
            None if first is None else first - self.submitted,
            None if first is None or tokens < 2 else (now - first) / (tokens - 1),
            now - self.submitted,
            self.preemptions,
        )


@dataclasses.dataclass(eq=False)
class SequenceMemory:
    """Where a sequence's caches are, and its use of a known prefix. Scheduler and prefixes update it."""

    slot: int | None = None
    group: int = 0
    """The group of devices that its slot and pages are in, or last were in."""
    pages: list[int] = dataclasses.field(default_factory=list)
    first_page: int = 0
    """The block table's column of the first of `pages`: the pages before it were freed."""
    saved: Any = None
    """Its states and pages on the host while it is preempted, or those that it will continue from: of a snapshot, or of
    a sequence with the same prompt."""
    lock: Any = None
    """The lock on the known prefix that it uses."""
    looked_up: int | None = None
    """The number of prefixes inserted before its prefix was last looked up: a lookup without new ones is skipped."""
    branch: int = 0
    """The number of tokens before the prompt diverges from known prefixes, where a snapshot is worth it; 0 for none."""
    states: Any = None
    """The states after a known prefix, until they are copied into the slot."""
    copied: list[int] = dataclasses.field(default_factory=list)
    """The pages of a known prefix that will be copied to its first pages."""


# No types are checked here: these methods run for every token of every request, and take less time than the checks.
@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and its `n` sequences."""

    request_id: int
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    deliver: Callable[[Delta], None] = lambda delta: None
    """Called with each of its deltas."""
    fallback: Callable[[Delta], None] = lambda delta: None
    """Called in place of `deliver` once that has raised an exception."""
    origin: Any = None
    """The engine's origin, for snapshots of this request; None if none is kept."""
    updates: int | None = None
    """How often the engine's weights had been replaced when it was checked; None if it takes and leaves no snapshot."""
    fault: Exception | None = None
    """The fault of the engine that ended it, if one did."""
    sequences: list["TokenSequence"] = dataclasses.field(default_factory=list)
    interventions: tuple[Intervention, ...] = ()
    """The interventions of its params, prepared for the model."""
    want: tuple[str, ...] = ()
    """The recorder's paths of the arrays that its params capture."""
    adapter: int | None = None
    """The index of its adapter in the engine; None for the model alone."""
    at_end: list[Callable[[Any, "TokenSequence", Delta], bool]] = dataclasses.field(default_factory=list)
    """Hooks, called with the loop, a sequence that ends and its last delta, before its memory is freed. Each may change
    the completion, and returns True if it hands out the last delta itself, later."""
    followers: list["Request"] = dataclasses.field(default_factory=list)
    """Requests that must end before its last delta is handed out."""
    prompt_logprobs: list[Logprob | None] = dataclasses.field(default_factory=lambda: [None])
    """Log-probabilities of the prompt's tokens, as far as they are scored; the first token has None."""

    @property
    def finished(self) -> bool:
        """True if all its sequences and all its followers are finished."""
        return all(sequence.completion is not None for sequence in self.sequences) and all(
            follower.finished for follower in self.followers
        )

    def output(self) -> RequestOutput | None:
        """The completions, once every sequence is finished; None before."""
        if not self.finished:
            return None
        scored = self.params.prompt_logprobs is not None and len(self.prompt_logprobs) == len(self.prompt_ids)
        scores = tuple(self.prompt_logprobs) if scored else None
        completions = [sequence.completion for sequence in self.sequences if sequence.completion is not None]
        return RequestOutput(self.request_id, self.prompt, self.prompt_ids, completions, scores)


@dataclasses.dataclass(eq=False)
class TokenSequence:
    """One completion in progress: a sequence of prompt and output tokens.

    `prefilled` counts the prompt tokens in its caches, up to `prefill_end`. Each decode step puts the newest token into
    the caches, at first the prompt's last, and samples the next.
    """

    request: Request
    index: int
    order: int
    seed: int
    ends: Sequence[int]
    """The token ids that end it."""
    decoder: StreamDecoder | None
    stops: StopStrings
    constraint: Constraint | None = None
    """The state of its grammar while the sequence is unfinished; None without a grammar."""
    prefill_end: int = 0
    """The number of prompt tokens that `extend` puts in: all but the last, or all of them after `watch`."""
    want: tuple[str, ...] = ()
    """The recorder's paths of the arrays that `extend` returns for its prompt."""
    synchronous: bool = False
    """True if the host must read all its tokens before its next call."""
    stepwise: bool = False
    """True if each of its decode calls has one step."""
    reads_prefixes: bool = True
    """True if the sequence may continue from a known prefix."""
    keeps_prefixes: bool = True
    """True if the caches of its prompt may be kept for other prompts."""
    earlier: Sequence[int] = ()
    """The tokens at the prompt's end that are the same answer's, if it continues a snapshot of an answer."""

    memory: SequenceMemory = dataclasses.field(default_factory=SequenceMemory)
    speculation: Speculation | None = None
    """Its guesses of the next tokens; None if it makes none."""
    times: Times = dataclasses.field(default_factory=Times)
    cached: int = 0
    """Prompt tokens that were not computed for it, but taken from a known prefix, a snapshot or a like sequence."""
    prefilled: int = 0
    """Prompt tokens in the caches, counting those of calls in flight."""
    ahead: int = 0
    """The most tokens that calls in flight may bring."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    seen: list[Any] = dataclasses.field(default_factory=list)
    """For each chunk so far, the arrays that `want` names."""
    completion: Completion | None = None
    _text: list[str] = dataclasses.field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """The token ids of the request's prompt."""
        return self.request.prompt_ids

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the request."""
        return self.request.params

    @property
    def adapter(self) -> int | None:
        """The index of the request's adapter in the engine; None for the model alone."""
        return self.request.adapter

    @property
    def scored(self) -> bool:
        """True if this sequence computes its prompt's log-probabilities: the first of a request that wants them."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """The interventions that may apply to a token of the next call: all of them until the prompt is prefilled."""
        every = self.request.interventions
        if not self.decoding:
            return every
        return tuple(each for each in every if each.positions is None or each.positions.max() >= self.prefill_end)

    @property
    def key(self) -> tuple[Any, ...]:
        """Sequences with the same key may share a call."""
        changes = self.interventions
        alike = structure(changes) if changes else None
        speculates = self.speculation is not None and self.decoding
        scores = self.scored and not self.decoding
        return (self.constraint is None, scores, self.want, alike, speculates, self.adapter is None)

    @property
    def decoding(self) -> bool:
        """True if its prompt is prefilled, counting calls in flight."""
        return self.prefilled == self.prefill_end

    @property
    def begun(self) -> bool:
        """True if any prompt token was computed for this sequence."""
        return self.prefilled > self.cached

    @property
    def held(self) -> int:
        """Tokens in its caches once no call is in flight."""
        return self.prefilled + len(self.token_ids)

    @property
    def next_position(self) -> int:
        """The position of the first token of its next call, unless it ends in a call in flight."""
        return self.held + self.ahead

    @property
    def left(self) -> int:
        """The number of tokens that it may still get after those of calls in flight."""
        return self.params.max_tokens - len(self.token_ids) - self.ahead

    @property
    def tally(self) -> dict[str, int]:
        """Its output tokens, and how many were guessed, and rightly."""
        guesses = self.speculation
        drafted, accepted = (0, 0) if guesses is None else (guesses.drafted, guesses.accepted)
        return {"output_tokens": len(self.token_ids), "drafted_tokens": drafted, "accepted_tokens": accepted}

    def resume(self, snapshot: Snapshot) -> None:
        """Makes the sequence continue from a snapshot, with whose tokens its prompt begins."""
        self.memory.saved, self.memory.first_page = snapshot, snapshot.first_page
        self.reads_prefixes = self.keeps_prefixes = False
        self.prefilled = self.cached = snapshot.held
        if len(self.prompt) == len(snapshot.token_ids):
            self.earlier = self.prompt[len(self.prompt) - snapshot.answered :]

    def watch(self) -> None:
        """Makes `extend` process all of the prompt and return the captured arrays; only if no token is sampled."""
        self.prefill_end, self.want = len(self.prompt), self.request.want
        self.reads_prefixes = self.keeps_prefixes = False

    def plan(self, most: int) -> StepPlan:
        """The sequence's plan of a decode call of `most` steps, or of that many tokens if it has drafts."""
        most = min(most, self.left, 1 if self.stepwise else most)
        plan = StepPlan(most) if self.constraint is None else self.constraint.plan(min(most, DECODE_STEPS))
        guesses = self.speculation
        return plan if guesses is None else dataclasses.replace(plan, drafts=guesses.drafts, depth=guesses.depth)

    def take(self, tokens: Sequence[int], logprobs: Sequence[Logprob]) -> Delta | None:
        """Adds tokens up to the sequence's end; returns the delta, or None if nothing is new.

        -1 means no token; NOT_A_NUMBER ends the sequence in `error`. `logprobs` has one per token, if it reports any.
        """
        before, text = len(self.token_ids), ""
        reason, stop_reason, error = None, None, None
        for place, token in enumerate(tokens):
            if token == NOT_A_NUMBER:
                reason, error = "error", NOT_FINITE
            elif token >= 0:
                self.times.first_token = self.times.first_token or time.perf_counter()
                self.token_ids.append(token)
                self.logprobs.extend(logprobs[place : place + 1])
                reason, stop_reason, new = self._read(token)
                text += new
                if self.constraint is not None and reason in (None, "length"):
                    reason, error = self.constraint.take(token, len(self.token_ids), self.params.min_tokens, reason)
            if reason is not None:
                return self.finish(reason, stop_reason=stop_reason, error=error, text=text, before=before)
        return self._delta(text, before) if len(self.token_ids) > before else None

    @property
    def drafts(self) -> Sequence[int] | None:
        """Guesses of the tokens that its next call gives; None for plain steps."""
        return None if self.speculation is None else self.speculation.drafts

    def take_scores(self, scores: Sequence[Logprob]) -> Delta | None:
        """Adds the scores of the prompt's next tokens; if one is NaN, ends in `error` and returns the last delta."""
        if any(math.isnan(score.logprob) for score in scores):
            return self.finish("error", error=NOT_FINITE)
        self.request.prompt_logprobs.extend(scores)
        return None

    def finish(
        self,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        text: str = "",
        before: int | None = None,
    ) -> Delta:
        """Ends the sequence, and releases the text that was held back; returns the last delta."""
        if self.decoder is not None and not self.stops.stopped:
            text += self.stops.feed(self.decoder.flush())
            if self.stops.stopped and reason == "length":
                reason, stop_reason = "stop", self.stops.stopped
            text += self.stops.flush()
        captured = Captured.joined(self.prefilled, self.seen) if self.seen and reason == "length" else None
        self.completion = Completion(
            self.index,
            "".join([*self._text, text]),
            tuple(self.token_ids),
            None if self.params.logprobs is None else tuple(self.logprobs),
            reason,
            stop_reason,
            error,
            self.seed,
            self.times.until_now(len(self.token_ids)),
            self.cached,
            captured=captured,
            drafted_tokens=self.tally["drafted_tokens"],
            accepted_tokens=self.tally["accepted_tokens"],
        )
        self.memory.saved = self.constraint = None
        self._text, self.seen = [], []
        return self._delta(text, len(self.token_ids) if before is None else before)

    def amend(self, **changes: Any) -> None:
        """Replaces some fields of the sequence's completion."""
        assert self.completion is not None, "amended at its end"
        self.completion = dataclasses.replace(self.completion, **changes)

    def last(self, delta: Delta) -> Delta:
        """The last delta, updated to the current completion."""
        assert self.completion is not None, "finished"
        return dataclasses.replace(delta, finish_reason=self.completion.finish_reason, output=self.request.output())

    def fail(self, error: str) -> Delta:
        """Ends the sequence in `error`, even if it had finished for another reason; returns the last delta."""
        if self.completion is None:
            return self.finish("error", error=error)
        self.amend(finish_reason="error", stop_reason=None, error=error, captured=None)
        return self._delta("", len(self.token_ids))

    def _read(self, token: int) -> tuple[FinishReason | None, int | str | None, str]:
        """Why the sequence ends with this token, if it does, and the text that the token adds."""
        count = len(self.token_ids)
        if token in self.ends and count > self.params.min_tokens:
            return "stop", token, ""
        text = "" if self.decoder is None else self.decoder.feed([token])
        text = self.stops.feed(text, may_stop=count >= self.params.min_tokens)
        if self.stops.stopped:
            return "stop", self.stops.stopped, text
        return ("length" if count == self.params.max_tokens else None), None, text

    def _delta(self, text: str, before: int) -> Delta:
        if self.completion is None:
            self._text.append(text)
        return Delta(
            self.request.request_id,
            self.index,
            text,
            tuple(self.token_ids[before:]),
            None if self.params.logprobs is None else tuple(self.logprobs[before:]),
            None if self.completion is None else self.completion.finish_reason,
            None if self.completion is None else self.request.output(),
        )


def draw_seed() -> int:
    """Draws a seed for a request that has none."""
    return int(np.random.SeedSequence().generate_state(1)[0]) % 2**30
