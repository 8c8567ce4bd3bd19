"""`SamplingParams`: how a completion is drawn and where it ends, checked before any work is done."""

import dataclasses
import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

from ling3.engine.structured import KINDS, Structured
from ling3.runtime.parameters import ParameterError, make_plain, parameter, problems_of
from ling3.runtime.quoting import shown
from ling3.runtime.scalars import is_real, is_whole

if TYPE_CHECKING:
    from ling3.engine.capture import Capture
    from ling3.intervention import Intervention

MAX_LOGPROBS = 20
"""The most alternatives that are reported per token."""
MAX_STOP_IDS = 64
"""The most token ids that may end one request, including the model's end ids."""
MAX_COMPLETIONS = 128
"""The most completions of one prompt."""
MAX_BIASES = 1024
"""The most entries of one `logit_bias`."""
MAX_STOPS = 64
"""The most stop strings of one request."""
MAX_STOP_LENGTH = 256
"""The most characters of one stop string."""
LARGEST = 1e9
"""The largest value of a parameter: float32 can add, multiply and divide such numbers without overflow."""
MAX_SEED = 2**31 - 1 - MAX_COMPLETIONS
"""The largest seed: the last completion's seed has to be an int32 too."""
NOT_IN_GENERATE = ("stop", "structured", "n", "logprobs", "prompt_logprobs", "capture", "keep", "adapter")
"""Fields that only an engine supports, as `ling3.generate` returns token ids alone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. The names are vLLM's and SGLang's; the defaults are greedy, and 128 tokens.

    With logits z, the tokens so far t and their counts c (of the output alone):

        z <- z + logit_bias
        z_t <- z_t / repetition_penalty if z_t > 0 else z_t · repetition_penalty     for t in prompt and output
        z_t <- z_t - frequency_penalty · c_t - presence_penalty · [c_t > 0]
        z <- the engine's filters, if it has any
        z_t <- -inf    for stop ids before `min_tokens`, and tokens that `structured` does not allow next
        temperature 0: argmax z;  else a draw from softmax(z / temperature) within top-k, then top-p, then min-p

    A completion ends after `max_tokens` tokens; with an end id of the model (unless `ignore_eos`) or one of
    `stop_token_ids`, as its last token; before a string of `stop` in its text; or where `structured` allows nothing
    more. Raises ParameterError that names every invalid field.
    """

    temperature: float = parameter(0.0, ge=0, le=LARGEST)
    """0 takes the likeliest token each time."""
    top_p: float = parameter(1.0, gt=0, le=1)
    """Sample from the fewest tokens that together are at least this likely; 1 keeps all."""
    top_k: int | None = parameter(None, ge=1)
    """Sample from this many of the likeliest tokens; without it, or with -1, from all."""
    min_p: float = parameter(0.0, ge=0, le=1)
    """Leave out tokens less likely than this fraction of the likeliest token's probability; 0 keeps all."""
    repetition_penalty: float = parameter(1.0, ge=1 / LARGEST, le=LARGEST)
    """Above 1 makes tokens of prompt and output less likely; 1 does nothing."""
    presence_penalty: float = parameter(0.0, ge=-LARGEST, le=LARGEST)
    """Subtracted from the logit of each token that the output has."""
    frequency_penalty: float = parameter(0.0, ge=-LARGEST, le=LARGEST)
    """Subtracted from the logit of a token for each time that the output has it."""
    max_tokens: int = parameter(128, ge=0, common=False)
    """The most new tokens; 0, only with `prompt_logprobs`, `capture` or `keep`, for none."""
    min_tokens: int = parameter(0, ge=0)
    """No stop id or stop string ends the text before it has this many tokens."""
    stop: str | Sequence[str] = ()
    """Strings that end the text, and are not part of it."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the text."""
    ignore_eos: bool = parameter(False)
    """Continue past the model's end ids."""
    seed: int | None = parameter(None, ge=0, le=MAX_SEED, common=False)
    """The same seed gives the same tokens, whatever else runs; None draws one, which the output reports."""
    logprobs: int | None = parameter(None, ge=0, le=MAX_LOGPROBS, common=False)
    """Report the natural log-probability of each token under softmax(z), before all of the above, and those of this
    many likeliest tokens; 0 reports only the token's."""
    prompt_logprobs: int | None = parameter(None, ge=0, le=MAX_LOGPROBS, common=False)
    """Report the natural log-probability of each prompt token but the first, given those before it, under softmax(z) of
    the model's own logits, and those of this many likeliest tokens. They are computed in chunks, as prompts are, with
    the logits of 16 tokens at a time. The log-probability of a generated token comes from a step of one token, which
    rounds differently: the same token scored in a prompt may differ in the last bits of the weights' dtype. Scoring
    does not change the answer's bits. Such a prompt is computed in full, without known prefixes."""
    structured: Structured | None = None
    """Constrains the text by a `JSONSchema`, a `JSONObject`, a `Regex`, a `Choice` or a `Grammar`. The model's end ids
    and `stop_token_ids` are allowed where the text may end (with `ignore_eos` only the latter), and the text ends by
    itself where nothing can follow. Where the grammar leaves no choice of text, the tokenizer's tokens for it are
    forced, several in one call. If no token is allowed, for instance before `min_tokens`, the request ends in `error`.
    Needs the extra `structured`."""
    capture: "Capture | None" = None
    """Arrays inside the model to return for every prompt and new token, in `Completion.captured`. Capturing does not
    change the answer's bits: prompt and answer are prefilled again afterwards, and the last delta comes after that.
    `max_tokens=0` captures the prompt alone."""
    interventions: "Sequence[Intervention]" = ()
    """Changes inside the model for this request, at positions that count from the prompt's first token. Such requests
    share calls only with those that have interventions at the same sites, and use no known prefixes; each new
    combination of sites is compiled with its first request."""
    adapter: str | None = None
    """The name of one of the engine's adapters, with which prompt and answer are computed; None for the model alone.
    Requests with different adapters share calls, but not with requests that have none, whose bits are those of an
    engine without adapters. Known prefixes are never shared across adapters."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits, by token id."""
    n: int = parameter(1, ge=1, le=MAX_COMPLETIONS, common=False)
    """Completions of the prompt; the i-th has the seed `seed + i`."""
    keep: bool = parameter(False, common=False)
    """Copy the request's memory at its end to the host, for later requests to continue from: `Completion.snapshot`.
    With `max_tokens=0` that is after the prompt. The answer's bits do not change. With strings in `stop`, or a sliding
    window, the request gets one token per call, which the host reads before the next: the device must not go past an
    end that only the host sees, since a state cannot be rolled back."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the class is frozen
        set_field(self, "top_k", None if self.top_k == -1 else self.top_k)
        set_field(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        if problems := [*problems_of(self), *self._lists()] or [*self._contradictions()]:
            raise ParameterError.of("sampling parameters", [(name, f"{name} {problem}") for name, problem in problems])
        make_plain(self)
        set_field(self, "stop", tuple(self.stop))
        set_field(self, "interventions", tuple(self.interventions))
        set_field(self, "stop_token_ids", tuple(operator.index(token) for token in self.stop_token_ids))
        # A copy, so that the caller's later changes do not reach a running request.
        bias = self.logit_bias
        set_field(self, "logit_bias", None if bias is None else {operator.index(t): float(x) for t, x in bias.items()})

    def _contradictions(self) -> Iterable[tuple[str, str]]:
        """Yields (name, problem) for fields that are valid one by one, but not together."""
        if self.min_tokens > self.max_tokens:
            yield "min_tokens", f"is {self.min_tokens}, expected at most max_tokens, which is {self.max_tokens}"
        if self.max_tokens == 0:
            if self.prompt_logprobs is None and self.capture is None and not self.keep:
                yield "max_tokens", "is 0, expected a whole number >= 1: 0 is for prompt_logprobs, capture or keep"
            if self.n > 1:
                yield "n", f"is {self.n}, which needs max_tokens >= 1"
            if self.structured is not None:
                yield "structured", f"is a {type(self.structured).__name__}, which needs max_tokens >= 1"
            if self.keep and self.prompt_logprobs is not None:
                yield "keep", f"is True and prompt_logprobs is {self.prompt_logprobs}, which needs max_tokens >= 1"
        if self.keep and (self.capture is not None or self.interventions):
            yield "keep", "is True, expected False with capture or interventions: nothing is kept of such requests"

    def _lists(self) -> Iterable[tuple[str, str]]:
        """Yields (name, problem) for invalid fields that are not numbers."""
        if self.structured is not None and not isinstance(self.structured, tuple(KINDS.values())):
            yield "structured", f"is {shown(self.structured)}, expected a {', a '.join(KINDS)} or None"
        if self.capture is not None and not _is_capture(self.capture):
            yield "capture", f"is {shown(self.capture)}, expected a ling3.Capture or None"
        if self.adapter is not None and not isinstance(self.adapter, str):
            yield "adapter", f"is {shown(self.adapter)}, expected the name of an adapter or None"
        if not isinstance(self.interventions, (list, tuple)) or not all(map(_is_intervention, self.interventions)):
            yield "interventions", f"are {shown(self.interventions)}, expected a list of ling3.Intervention"
        if not _is_list(self.stop) or not all(isinstance(stop, str) and stop for stop in self.stop):
            yield "stop", f"is {shown(self.stop)}, expected strings that are not empty"
        elif len(self.stop) > MAX_STOPS or any(len(stop) > MAX_STOP_LENGTH for stop in self.stop):
            found = f"{len(self.stop)} strings of up to {max(map(len, self.stop))} characters"
            yield "stop", f"has {found}, expected at most {MAX_STOPS} of {MAX_STOP_LENGTH}"
        ids, bias = self.stop_token_ids, self.logit_bias
        if _is_list(ids) and len(ids) > MAX_BIASES:
            yield "stop_token_ids", f"has {len(ids)} ids, expected at most {MAX_BIASES}"
        elif not _is_list(ids) or not all(map(is_whole, ids)):
            yield "stop_token_ids", f"is {shown(ids)}, expected whole numbers"
        if isinstance(bias, Mapping) and len(bias) > MAX_BIASES:
            yield "logit_bias", f"has {len(bias)} entries, expected at most {MAX_BIASES}"
        elif bias is not None and not (
            isinstance(bias, Mapping)
            and all(is_whole(token) and is_real(value) and abs(value) <= LARGEST for token, value in bias.items())
        ):
            yield "logit_bias", f"is {shown(bias)}, expected numbers in [-1e9, 1e9] by token id"

    @property
    def adjusts(self) -> bool:
        """True if a penalty or a bias changes the logits."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias)

    def check(self, vocab: int, ends: Sequence[int] = ()) -> tuple[int, ...]:
        """The ids that end a text, including the model's `ends`; raises ParameterError for ids outside [0, `vocab`)."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias or ())):
            outside = [token for token in ids if not 0 <= token < vocab]
            if outside:
                problem = f"{name} has {outside[0]}, expected ids in [0, {vocab})"
                raise ParameterError.of("sampling parameters", [(name, problem)])
        stops = {*self.stop_token_ids, *(() if self.ignore_eos else ends)}
        if len(stops) > MAX_STOP_IDS:
            problem = f"{len(stops)} stop ids with the model's own, expected at most {MAX_STOP_IDS}"
            raise ParameterError.of("sampling parameters", [("stop_token_ids", problem)])
        return tuple(sorted(stops))


def of_generate(params: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
    """`params` with some `fields` changed. Raises ParameterError for NOT_IN_GENERATE, TypeError for unknown names."""
    if "stop_token_ids" in fields:
        fields = {**fields, "stop_token_ids": tuple(fields["stop_token_ids"])}
    default, names = SamplingParams(), [field.name for field in dataclasses.fields(SamplingParams)]
    for name in fields:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(names)}"
            raise TypeError(f"ling3.generate has no parameter {shown(name)}; {hint}")
    params = dataclasses.replace(params or default, **fields)
    for name in NOT_IN_GENERATE:
        if (value := getattr(params, name)) != getattr(default, name):
            raise ParameterError(name, f"{name} is {shown(value)}, which ling3.generate cannot do: use an Engine")
    return params


def check_prompt(prompt: Any, vocab: int, name: str = "prompt") -> list[int]:
    """The prompt's ids as plain ints; raises ParameterError, with its `name`, if it is empty or has invalid ids."""
    check_length(prompt, name)
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt  # iterating over an array is slow
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab:
        return list(ids)
    for place, token in enumerate(ids):
        if not is_whole(token):
            raise ParameterError(name, f"{name}, token {place} is {shown(token)}, expected a whole number")
        if not 0 <= token < vocab:
            raise ParameterError(name, f"{name}, token {place} is {shown(token)}, expected an id in [0, {vocab})")
    return [operator.index(token) for token in ids]


def check_length(prompt: Any, name: str = "prompt") -> int:
    """The number of ids in the prompt, which are not checked; raises ParameterError if it is empty or no list."""
    text_or_unordered = isinstance(prompt, (str, bytes, Mapping, Set))
    if text_or_unordered or not hasattr(prompt, "__len__") or getattr(prompt, "ndim", 1) != 1:
        raise ParameterError(
            name, f"{name} is {shown(prompt)}, expected a list of token ids (see ling3.load_tokenizer)"
        )
    if len(prompt) == 0:
        raise ParameterError(name, f"{name} is empty, expected at least one token id")
    return len(prompt)


def check_room(prompt: Any, max_tokens: int, context: int, name: str = "prompt") -> None:
    """Raises ParameterError, with the prompt's `name`, if it is no list or exceeds `context` with `max_tokens`."""
    length = check_length(prompt, name)
    if length + max_tokens > context:
        raise ParameterError(
            name,
            f"{name} has {length} tokens and max_tokens is {max_tokens}: {length + max_tokens} together, "
            f"but there is room for {context} (the model's max_position_embeddings, or a smaller max_model_len); "
            "shorten one or the other",
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset))


def _is_capture(value: Any) -> bool:
    from ling3.engine.capture import Capture  # noqa: PLC0415, only when needed: it imports NumPy

    return isinstance(value, Capture)


def _is_intervention(value: Any) -> bool:
    from ling3.intervention import Intervention  # noqa: PLC0415, only when needed: it imports JAX

    return isinstance(value, Intervention)
