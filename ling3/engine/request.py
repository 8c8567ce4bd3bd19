"""A request and its sequences while the engine works on them: what was asked, the output so far, and the times."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, no_type_check

import numpy as np
from jaxtyping import Float32, Int32

from ling3.engine.capture import Captured
from ling3.engine.grammars import Constraint
from ling3.engine.outputs import Completion, Delta, FinishReason, Logprob, RequestOutput, Timings
from ling3.engine.sampling import NOT_A_NUMBER
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.snapshots import Snapshot
from ling3.intervention import Intervention
from ling3.text.detokenizer import StopStrings, StreamDecoder

NOT_FINITE = (
    "the model left no token to choose: its logits were NaN (weights that are not finite, or too narrow a dtype), or a "
    "logit_bias or min_tokens struck out every token"
)


# These two's methods run for every token of every request: checking their types would take longer than they do.
@no_type_check
@dataclasses.dataclass(eq=False)
class Request:
    """A prompt and its `n` sequences."""

    request_id: int
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    deliver: Callable[[Delta], None] = lambda delta: None
    """Where its deltas go."""
    report: Callable[[Delta], None] = lambda delta: None
    """Where its last ones go once `deliver` has raised."""
    origin: Any = None
    """The engine's, where snapshots are kept."""
    fault: Exception | None = None
    """The fault of the engine that ended it, if one did."""
    sequences: list["TokenSequence"] = dataclasses.field(default_factory=list)
    interventions: tuple[Intervention, ...] = ()
    """Its params', ready for the model."""
    paths: tuple[str, ...] = ()
    """Where a recorder finds what is to be captured."""
    prompt_logprobs: list[Logprob | None] = dataclasses.field(default_factory=lambda: [None])
    """Of the prompt's first tokens, as many as were scored; the first has none."""

    @property
    def finished(self) -> bool:
        """True if all its sequences are finished."""
        return all(sequence.completion is not None for sequence in self.sequences)

    def output(self) -> RequestOutput | None:
        """The completions, once every sequence is finished; None before."""
        outputs = [sequence.completion for sequence in self.sequences]
        whole = [output for output in outputs if output is not None]
        if len(whole) < len(outputs):
            return None
        scored = self.params.prompt_logprobs is not None and len(self.prompt_logprobs) == len(self.prompt_ids)
        scores = tuple(self.prompt_logprobs) if scored else None
        return RequestOutput(self.request_id, self.prompt, self.prompt_ids, whole, scores)


@no_type_check
@dataclasses.dataclass(eq=False)
class TokenSequence:
    """One completion in the making: a sequence of prompt and output tokens."""

    request: Request
    index: int
    order: int
    seed: int
    ends: Sequence[int]
    """The token ids that end it."""
    decoder: StreamDecoder | None
    stops: StopStrings
    constraint: Constraint | None = None
    """Its place in its grammar, while it is unfinished."""

    slot: int | None = None
    group: int = 0
    """The number of the devices' group that its slot and pages are in, or were last."""
    pages: list[int] = dataclasses.field(default_factory=list)
    first_page: int = 0
    """The block table's column of the first of `pages`: as many before it were freed."""
    saved: Any = None
    """Its states and pages on the host, while it is swapped out, or a snapshot that it is to go on from."""
    resumed: bool = False
    """It goes on from a snapshot."""
    by_step: bool = False
    """All its prompt is a snapshot's, of which the last token is not in the caches: a decode step adds it."""
    earlier: Sequence[int] = ()
    """The tokens of the prompt that are the same answer's, which was interrupted."""
    logits: Any = None
    """After the prompt, for the first token, or for a snapshot."""
    stepwise: bool = False
    """Its calls have one step, and none is dispatched before the last one is read."""
    lock: Any = None
    """On the known prefix that it uses."""
    shared: int = 0
    """How many of its first `pages` are the known prefix's, and not its own."""
    cached: int = 0
    """Prompt tokens of a known prefix that it went on from."""
    looked_up: int | None = None
    """When its prefix was looked up, in prefixes kept until then."""
    branch: int = 0
    """Prompt tokens that are those of other prompts, beyond which a prefix is worth a snapshot; 0 for none."""
    snapshot: Any = None
    """The prefix's memory outside its pages, until it is in the sequence's slot."""
    copied: list[int] = dataclasses.field(default_factory=list)
    """The pages that are to be copied to its first ones."""
    prefilled: int = 0
    """Prompt tokens in the caches, counting those of calls in flight."""
    only_scored: int = 0
    """How many of these no call has prefilled: a last chunk that was scored, where no token is to follow."""
    ahead: int = 0
    """The most tokens that calls in flight may bring."""

    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[Logprob] = dataclasses.field(default_factory=list)
    completion: Completion | None = None
    whole: tuple[Completion, str, int] | None = None
    """Its completion but for what is to be captured, the text of its last delta, and the tokens of those before."""
    watcher: "TokenSequence | None" = None
    """What runs in its place once it is whole: a prompt of all its tokens, watched."""
    watched: "TokenSequence | None" = None
    """The sequence that this one is the watcher of."""
    chunks: list[Any] = dataclasses.field(default_factory=list)
    """Of a watcher: what was seen so far."""
    seen: int = 0
    """Tokens of these."""
    preemptions: int = 0
    _text: list[str] = dataclasses.field(default_factory=list)
    _submitted: float = dataclasses.field(default_factory=time.perf_counter)
    _admitted: float | None = None
    _first: float | None = None

    @property
    def prompt(self) -> list[int]:
        """The prompt's ids."""
        return self.request.prompt_ids

    @property
    def params(self) -> SamplingParams:
        """The request's sampling parameters."""
        return self.request.params

    @property
    def constrained(self) -> bool:
        """True if it has a grammar."""
        return self.params.structured is not None

    @property
    def scored(self) -> bool:
        """True if its prompt's log-probabilities are wanted, and this is the sequence to compute them."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def stepped(self) -> bool:
        """True if a decode step adds its prompt's last token."""
        return self.constrained or self.by_step

    @property
    def interventions(self) -> tuple[Intervention, ...]:
        """Those of its request, ready for the model."""
        return self.request.interventions

    @property
    def later(self) -> tuple[Intervention, ...]:
        """Those that may hold of a token that is decoded; with none it runs beside any other sequence."""
        end = self.prefill_end
        return tuple(each for each in self.interventions if each.positions is None or each.positions.max() >= end)

    @property
    def secluded(self) -> bool:
        """True if its caches have other bits than a known prefix has: under interventions, or watched."""
        return bool(self.interventions) or self.watched is not None

    @property
    def apart(self) -> bool:
        """True if it uses no known prefix: every token of its prompt is to be computed."""
        return self.scored or self.secluded

    @property
    def ended(self) -> bool:
        """True if it gets no more tokens."""
        return self.completion is not None or self.whole is not None

    @property
    def prefill_end(self) -> int:
        """Tokens of its prompt that are prefilled: with a grammar all but the last, which a masked decode step adds."""
        return len(self.prompt) - self.stepped

    @property
    def decoding(self) -> bool:
        """True if all that is prefilled of its prompt is in the caches."""
        return self.prefilled == self.prefill_end

    @property
    def begun(self) -> bool:
        """True if any of its prompt was computed for it."""
        return self.prefilled > self.cached

    @property
    def until(self) -> int:
        """The most tokens of prompt and output."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def held(self) -> int:
        """Tokens in its caches once no call is in flight: all but the newest, which has been prefilled if any was."""
        return self.prefilled + max(len(self.token_ids) - 1 + self.stepped, 0)

    @property
    def next_position(self) -> int:
        """The position of the first token of its next call, unless it ends in one that is in flight."""
        return self.prefilled + max(len(self.token_ids) + self.ahead - 1 + self.stepped, 0)

    @property
    def left(self) -> int:
        """Tokens that it may get beyond those of the calls in flight."""
        return self.params.max_tokens - len(self.token_ids) - self.ahead

    @property
    def remembers(self) -> bool:
        """True if its prompt is to be kept, and no token to follow."""
        return self.params.keep and self.params.max_tokens == 0

    def resume(self, snapshot: Snapshot) -> None:
        """Goes on from a snapshot, whose tokens its prompt begins with."""
        more = len(self.prompt) > len(snapshot.token_ids)
        self.saved, self.resumed, self.first_page = snapshot, True, snapshot.first_page
        self.prefilled = self.cached = snapshot.held
        if not more:
            self.by_step, self.logits = snapshot.logits is None, snapshot.logits
            self.earlier = self.prompt[len(self.prompt) - snapshot.answered :]

    def submitted(self) -> None:
        """Notes the time at which it was queued."""
        self._submitted = time.perf_counter()

    def admitted(self) -> None:
        """Notes the time at which it first got a slot."""
        self._admitted = time.perf_counter() if self._admitted is None else self._admitted
        if self.watched is not None:
            self.watched.admitted()

    def take(
        self,
        tokens: Int32[np.ndarray, " steps"],
        logprobs: Float32[np.ndarray, " steps"],
        top_ids: Int32[np.ndarray, "steps top"],
        top_logprobs: Float32[np.ndarray, "steps top"],
    ) -> Delta | None:
        """Adds tokens up to its end, without negative ones, which stand for none; the delta, if anything is new."""
        before, text = len(self.token_ids), ""
        reason, stop_reason, error = None, None, None
        for place, token in enumerate(tokens.tolist()):
            if token == NOT_A_NUMBER:
                reason, error = "error", NOT_FINITE
            elif token >= 0:
                self._first = time.perf_counter() if self._first is None else self._first
                self.token_ids.append(token)
                if self.params.logprobs is not None:
                    self.logprobs.append(
                        Logprob(
                            token,
                            float(logprobs[place]),
                            _top(top_ids[place], top_logprobs[place], self.params.logprobs),
                        )
                    )
                reason, stop_reason, new = self._read(token)
                text += new
                if self.constraint is not None and reason in (None, "length"):
                    reason, error = self._constrain(self.constraint, token, reason)
            if reason is not None:
                break
        if self.remembers and reason is None:
            reason = "length"
        if reason is not None:
            return self.finish(reason, stop_reason=stop_reason, error=error, text=text, before=before)
        return self._delta(text, before) if len(self.token_ids) > before else None

    def take_scores(
        self,
        length: int,
        logprobs: Float32[np.ndarray, " tokens"],
        top_ids: Int32[np.ndarray, "tokens top"],
        top_logprobs: Float32[np.ndarray, "tokens top"],
    ) -> Delta | None:
        """Adds the scores of the prompt's tokens after those of a chunk of `length`; the delta, if it ends with them.

        Where no token is to follow, it ends with the last.
        """
        scores, wanted = self.request.prompt_logprobs, self.params.prompt_logprobs
        for place, token in enumerate(self.prompt[len(scores) : len(scores) + length]):
            if np.isnan(logprobs[place]):
                return self.finish("error", error=NOT_FINITE)
            top = _top(top_ids[place], top_logprobs[place], wanted)
            scores.append(Logprob(token, float(logprobs[place]), top))
        scored = len(scores) == len(self.prompt) and self.params.max_tokens == 0
        return self.finish("length") if scored else None

    def finish(
        self,
        reason: FinishReason,
        *,
        stop_reason: int | str | None = None,
        error: str | None = None,
        text: str = "",
        before: int | None = None,
    ) -> Delta | None:
        """Ends it, and releases the text that was held back; returns the last delta.

        Where its arrays are still to be captured there is none: `watch` gives what is to run, whose last `saw` ends it.
        """
        if self.whole is not None:  # it cannot be captured any more
            completion, text, before = self.whole
            self.whole = None
            return self._end(completion, text, before, finish_reason=reason, stop_reason=None, error=error)
        if self.decoder is not None and not self.stops.stopped:
            text += self.stops.feed(self.decoder.flush())
            if self.stops.stopped and reason == "length":
                reason, stop_reason = "stop", self.stops.stopped
            text += self.stops.flush()
        before = len(self.token_ids) if before is None else before
        self._text.append(text)
        completion = Completion(
            self.index,
            "".join(self._text),
            tuple(self.token_ids),
            None if self.params.logprobs is None else tuple(self.logprobs),
            reason,
            stop_reason,
            error,
            self.seed,
            self._timings(),
            self.cached,
        )
        self.saved = self.constraint = None
        self._text = []
        if self.params.capture is not None and reason in ("stop", "length"):
            self.whole = (completion, text, before)
            return None
        return self._end(completion, text, before)

    def watch(self) -> "TokenSequence":
        """The prompt of all its tokens that is to be watched in its place."""
        whole, params = [*self.prompt, *self.token_ids], SamplingParams(max_tokens=0, capture=self.params.capture)
        request = Request(self.request.request_id, None, whole, params)
        request.interventions, request.paths = self.interventions, self.request.paths
        self.watcher = TokenSequence(request, self.index, self.order, self.seed, (), None, StopStrings(()))
        self.watcher.watched = self
        return self.watcher

    def saw(self, length: int, chunk: Any) -> Delta | None:
        """Adds to a watcher what was seen of a chunk of `length`; after the last, the watched sequence's last delta."""
        self.chunks.append(chunk)
        self.seen += length
        if self.seen < len(self.prompt):
            return None
        watched = self.watched
        assert watched is not None and watched.whole is not None, "only a watcher sees, of what is not ended"
        completion, text, before = watched.whole
        watched.whole = None
        return watched._end(completion, text, before, captured=Captured.joined(self.seen, self.chunks))

    def _end(self, completion: Completion, text: str, before: int, **changes: Any) -> Delta:
        """Ends it with a completion whose time goes on until now; returns the last delta."""
        if self.watcher is not None:
            now = self._timings()
            waited = {"queued": now.queued, "total": now.total, "preemptions": now.preemptions}
            changes["timings"] = dataclasses.replace(completion.timings, **waited)
        self.completion = dataclasses.replace(completion, **changes)
        return self._delta(text, before)

    def keep(self, snapshot: Snapshot) -> None:
        """Adds a snapshot to its completion."""
        assert self.completion is not None, "kept at its end"
        self.completion = dataclasses.replace(self.completion, snapshot=snapshot)

    def fail(self, error: str) -> Delta:
        """Ends it in `error`, even if it was finished otherwise; returns the last delta."""
        if self.completion is None:
            last = self.finish("error", error=error)
            assert last is not None, "of what fails nothing is captured"
            return last
        changes = {"finish_reason": "error", "stop_reason": None, "error": error, "captured": None}
        self.completion = dataclasses.replace(self.completion, **changes)
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

    def _constrain(
        self, constraint: Constraint, token: int, reason: FinishReason | None
    ) -> tuple[FinishReason | None, str | None]:
        """Goes on in the grammar by a token; why the sequence ends with it, if it does, and what was wrong."""
        count = len(self.token_ids)
        try:
            constraint.advance(token)
            if constraint.complete:
                return "stop", None
            if reason is not None:
                return reason, None
            error = constraint.blocked(count, self.params.min_tokens)
        except BaseException as fault:  # a panic of llguidance's is no Exception
            error = f"the grammar failed after {count} tokens of the output: {fault!r}"
        return (None, None) if error is None else ("error", error)

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

    def _timings(self) -> Timings:
        now, count = time.perf_counter(), len(self.token_ids)
        return Timings(
            None if self._admitted is None else self._admitted - self._submitted,
            None if self._first is None else self._first - self._submitted,
            None if self._first is None or count < 2 else (now - self._first) / (count - 1),
            now - self._submitted,
            self.preemptions + (0 if self.watcher is None else self.watcher.preemptions),
        )


@no_type_check
def _top(ids: Int32[np.ndarray, " top"], logprobs: Float32[np.ndarray, " top"], wanted: int) -> dict[int, float]:
    """The likeliest tokens, as many as are wanted."""
    return {int(token): float(p) for token, p in zip(ids[:wanted], logprobs[:wanted], strict=True)}


def draw_seed() -> int:
    """A seed for a request that has none."""
    return int(np.random.SeedSequence().generate_state(1)[0]) % 2**30
