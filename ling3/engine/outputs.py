"""Answers of an engine: deltas as they come, and completions once they are finished."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from ling3.engine.capture import Captured
from ling3.engine.snapshots import Snapshot

FinishReason = Literal["stop", "length", "abort", "error"]
"""`stop`: an end id, a stop string, or a grammar that allows nothing more. `length`: `max_tokens` tokens. `abort`: by
the caller. `error`: a fault, which `Completion.error` describes."""
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


@dataclasses.dataclass(frozen=True)
class Logprob:
    """The log-probability of a token, in nats, under the model's unchanged logits."""

    token_id: int
    logprob: float
    top: Mapping[int, float]
    """The log-probabilities of the `logprobs` (or `prompt_logprobs`) likeliest tokens, likeliest first."""


@dataclasses.dataclass(frozen=True)
class Timings:
    """How long the parts of a completion took, in seconds; None for a part that was not reached."""

    queued: float | None
    """From `submit` until the request got a slot."""
    first_token: float | None
    """From `submit` to the first token."""
    per_token: float | None
    """The average time for each token after the first."""
    total: float
    """From `submit` to the end."""
    preemptions: int
    """How often the request was preempted to make room for an older one."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished continuation of a prompt."""

    index: int
    """Its number among the `n` completions of the request."""
    text: str
    """The text, without the stop string and control tokens; empty if the engine has no tokenizer."""
    token_ids: Sequence[int]
    """The new tokens, including the end id or the token that completed a stop string."""
    logprobs: Sequence[Logprob] | None
    """One per token, if requested."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The end id or the stop string, if `finish_reason` is `stop`; None if `structured` allowed nothing more."""
    error: str | None
    """What went wrong, if `finish_reason` is `error`."""
    seed: int
    """The seed of its random draws."""
    timings: Timings
    cached_tokens: int = 0
    """Prompt tokens that were not computed for it, as a known prefix, a snapshot or another completion has them."""
    snapshot: Snapshot | None = None
    """With `keep`, the snapshot that later requests can continue from; None after `abort` and `error`."""
    captured: Captured | None = dataclasses.field(default=None, compare=False)
    """With `capture`, the captured arrays, if `finish_reason` is `stop` or `length`."""
    drafted_tokens: int = dataclasses.field(default=0, compare=False)
    """Tokens that speculation guessed."""
    accepted_tokens: int = dataclasses.field(default=0, compare=False)
    """Those of them that were right."""


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The completions of one request; `text`, `token_ids` and the other properties are those of the first."""

    request_id: int
    prompt: str | None
    """The prompt, if it was a text."""
    prompt_token_ids: Sequence[int]
    outputs: Sequence[Completion]
    prompt_logprobs: Sequence[Logprob | None] | None = None
    """One for each prompt token, if requested and computed; None for the first, which follows nothing."""

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> Sequence[int]:
        """The token ids of the first completion."""
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> Sequence[Logprob] | None:
        """The log-probabilities of the first completion."""
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> FinishReason:
        """The reason why the first completion ended."""
        return self.outputs[0].finish_reason

    @property
    def error(self) -> str | None:
        """The error of the first completion, or None."""
        return self.outputs[0].error

    @property
    def timings(self) -> Timings:
        """The timings of the first completion, in seconds."""
        return self.outputs[0].timings

    @property
    def cached_tokens(self) -> int:
        """The number of prompt tokens that were not computed for the first completion."""
        return self.outputs[0].cached_tokens

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot of the first completion, if `keep` was set."""
        return self.outputs[0].snapshot

    @property
    def captured(self) -> Captured | None:
        """The arrays captured for the prompt and the first completion."""
        return self.outputs[0].captured


@dataclasses.dataclass(frozen=True)
class Delta:
    """The new part of one completion since its last delta."""

    request_id: int
    index: int
    text: str
    """The new text, which never ends inside a character or with a part of a stop string."""
    token_ids: Sequence[int]
    logprobs: Sequence[Logprob] | None
    finish_reason: FinishReason | None
    """None until the last delta of a completion."""
    output: RequestOutput | None
    """The request's output, in the last delta of its last completion; else None."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of an engine: `submitted` completions are those waiting, those running and those finished."""

    submitted: int
    waiting: int
    running: int
    finished: dict[str, int]
    """The number of finished completions by finish reason."""
    slots: int
    free_slots: int
    pages: int
    free_pages: int
    """Pages that no running request uses, including those of known prefixes."""
    cached_pages: int
    """Pages of known prefixes, whether a request uses them or not."""
    snapshot_bytes: int
    """Bytes on the device that snapshots for known prefixes take."""
    page_size: int
    prompt_tokens: int
    """Prompt tokens that were computed."""
    cached_tokens: int
    """Prompt tokens that were not computed, because known prefixes, snapshots or other completions have them."""
    output_tokens: int
    drafted_tokens: int
    """Tokens that speculation guessed."""
    accepted_tokens: int
    """Those of them that were right, and are output tokens."""
    preemptions: int
    steps: int
    """Turns of the loop."""
    prefill_calls: int
    decode_calls: int
    compile_seconds: float
    """Seconds spent in `warmup`, mostly on compilation."""

    @staticmethod
    def total(counts: "Sequence[Stats]") -> "Stats":
        """The counts of several engines, added up; `compile_seconds` is the shortest."""
        values = {field.name: [getattr(each, field.name) for each in counts] for field in dataclasses.fields(Stats)}
        finished = sum((Counter(each) for each in values.pop("finished")), Counter())
        page_size, compiling = (min(values.pop(name), default=0) for name in ("page_size", "compile_seconds"))
        totals = {name: sum(each) for name, each in values.items()}
        return Stats(**totals, finished=dict(finished), page_size=page_size, compile_seconds=float(compiling))
