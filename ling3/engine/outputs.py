"""Answers of an engine: deltas as they come, and completions when they are whole."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from ling3.engine.capture import Captured
from ling3.engine.snapshots import Snapshot

FinishReason = Literal["stop", "length", "abort", "error"]
"""An end id, a stop string, or a grammar that allows nothing more; `max_tokens` tokens; `Engine.abort`; a fault of this
request's, in `Completion.error`."""
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)


@dataclasses.dataclass(frozen=True)
class Logprob:
    """How likely a token was, as a natural logarithm, under the model's own logits."""

    token_id: int
    logprob: float
    top: Mapping[int, float]
    """The likeliest tokens, likeliest first, as many as `logprobs` (or `prompt_logprobs`) asks for."""


@dataclasses.dataclass(frozen=True)
class Timings:
    """Where a completion's time went, in seconds; None for what never happened."""

    queued: float | None
    """From `submit` to a slot."""
    first_token: float | None
    """From `submit` to the first token."""
    per_token: float | None
    """Between two tokens after the first, on average."""
    total: float
    """From `submit` to the end."""
    preemptions: int
    """How often the request had to make room for an older one."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """One continuation of a prompt, finished or growing."""

    index: int
    """Which of the `n` of its request."""
    text: str
    """Without the stop string or control tokens; empty where the engine has no tokenizer."""
    token_ids: Sequence[int]
    """With the end id, or up to the token that completed a stop string."""
    logprobs: Sequence[Logprob] | None
    """One per token, if they were asked for."""
    finish_reason: FinishReason
    stop_reason: int | str | None
    """The end id or the stop string, for `stop`; None where `structured` allowed nothing more."""
    error: str | None
    """What was wrong, for `error`."""
    seed: int
    """What it was drawn from."""
    timings: Timings
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed for it: earlier prompts began with them, or a snapshot has them."""
    snapshot: Snapshot | None = None
    """With `keep`, what later requests go on from; None after `abort` and `error`."""
    captured: Captured | None = dataclasses.field(default=None, compare=False)
    """What `capture` asked for, if the completion ended by itself: in `stop` or `length`."""


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """The completions of one request; its own `text`, `token_ids` and so on are those of the first."""

    request_id: int
    prompt: str | None
    """The text, where the prompt was one."""
    prompt_token_ids: Sequence[int]
    outputs: Sequence[Completion]
    prompt_logprobs: Sequence[Logprob | None] | None = None
    """One for each token of the prompt, if they were asked for and computed: None for the first, which follows
    nothing."""

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
        """Where the first completion's time went."""
        return self.outputs[0].timings

    @property
    def cached_tokens(self) -> int:
        """How many tokens of the prompt were not computed for the first completion."""
        return self.outputs[0].cached_tokens

    @property
    def snapshot(self) -> Snapshot | None:
        """The snapshot of the first completion, if it was to be kept."""
        return self.outputs[0].snapshot

    @property
    def captured(self) -> Captured | None:
        """The arrays captured of the prompt and the first completion."""
        return self.outputs[0].captured


@dataclasses.dataclass(frozen=True)
class Delta:
    """The new part of one completion since its last delta."""

    request_id: int
    index: int
    text: str
    """It never ends inside a character, and never shows a part of a stop string."""
    token_ids: Sequence[int]
    logprobs: Sequence[Logprob] | None
    finish_reason: FinishReason | None
    """None until the last delta of a completion."""
    output: RequestOutput | None
    """The whole request, with the last delta of its last completion."""


@dataclasses.dataclass(frozen=True)
class Stats:
    """Counts of an engine. All `submitted` completions are waiting, running or finished, and pages and slots add up."""

    submitted: int
    waiting: int
    running: int
    finished: dict[str, int]
    """By finish reason."""
    slots: int
    free_slots: int
    pages: int
    free_pages: int
    """No running request uses them."""
    cached_pages: int
    """They have known prefixes, whether a request uses them or not."""
    snapshot_bytes: int
    """What the known prefixes take beside pages."""
    page_size: int
    prompt_tokens: int
    """Computed."""
    cached_tokens: int
    """Tokens of prompts that were not computed, since earlier prompts began with them or snapshots have them."""
    output_tokens: int
    preemptions: int
    steps: int
    """Turns of the loop."""
    prefill_calls: int
    decode_calls: int
    compile_seconds: float
    """Waited in `warmup`, mostly for compilation."""
