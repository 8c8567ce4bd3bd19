"""How a continuation is drawn and where it ends: `SamplingParams`, checked before any work is done."""

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

MAX_LOGPROBS = 20
"""The most alternatives that are reported per token."""
MAX_STOP_IDS = 64
"""The most token ids that may end one request, the model's own ends among them."""
MAX_COMPLETIONS = 128
"""The most completions of one prompt."""
MAX_BIASES = 1024
"""The most entries of one `logit_bias`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. The names are vLLM's and SGLang's; the defaults are greedy, and 128 tokens.

    With logits z, the tokens so far t and their counts c (of the output alone):

        z <- z + logit_bias;   stop ids are struck out before `min_tokens`
        z_t <- z_t / repetition_penalty if z_t > 0 else z_t · repetition_penalty     for t in prompt and output
        z_t <- z_t - frequency_penalty · c_t - presence_penalty · [c_t > 0]
        temperature 0: argmax z;  else a draw from softmax(z / temperature) within top-k, then top-p, then min-p

    A completion ends with `max_tokens` tokens, an end of the model's (unless `ignore_eos`) or one of `stop_token_ids`
    (that token is its last), or before a string of `stop` in its text. Raises ValueError naming every senseless field.
    """

    temperature: float = 0.0
    """0 takes the likeliest token each time."""
    top_p: float = 1.0
    """Sample from the fewest tokens that together are at least this likely; 1 keeps all."""
    top_k: int | None = None
    """Sample from so many of the likeliest tokens; None (or vLLM's -1) keeps all."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and output less likely; 1 does nothing."""
    presence_penalty: float = 0.0
    """Taken off the logit of each token that the output has."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for each time that the output has it."""
    max_tokens: int = 128
    """The most new tokens."""
    min_tokens: int = 0
    """No stop id, and no stop string, ends the text before it has so many tokens."""
    stop: str | Sequence[str] = ()
    """Strings that end the text, which stops short of them."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end it."""
    ignore_eos: bool = False
    """Go on past the model's own ends."""
    seed: int | None = None
    """The same seed gives the same tokens in any company; None draws one, which the output reports."""
    logprobs: int | None = None
    """Report the natural log-probability of each token under softmax(z), before all of the above, and those of so many
    likeliest tokens beside it; 0 reports the token's alone."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits, by token id."""
    n: int = 1
    """Completions of the prompt; the i-th has the seed `seed + i`."""

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the class is frozen
        set_field(self, "top_k", None if self.top_k == -1 else self.top_k)
        set_field(self, "stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        problems = [*self._numbers(), *self._whole_numbers(), *self._lists()]
        if not problems and self.min_tokens > self.max_tokens:
            problems.append(f"min_tokens is {self.min_tokens}, expected at most max_tokens, which is {self.max_tokens}")
        if problems:
            raise ValueError("sampling parameters: " + "; ".join(problems))
        set_field(self, "stop", tuple(self.stop))
        set_field(self, "stop_token_ids", tuple(operator.index(token) for token in self.stop_token_ids))

    def _numbers(self) -> list[str]:
        wanted = (
            ("temperature", 0.0, math.inf, "a finite number >= 0"),
            ("top_p", math.ulp(0.0), 1.0, "a number in (0, 1]"),
            ("min_p", 0.0, 1.0, "a number in [0, 1]"),
            ("repetition_penalty", math.ulp(0.0), math.inf, "a finite number > 0"),
            ("presence_penalty", -math.inf, math.inf, "a finite number"),
            ("frequency_penalty", -math.inf, math.inf, "a finite number"),
        )
        return [
            f"{name} is {getattr(self, name)!r:.40}, expected {expected}"
            for name, low, high, expected in wanted
            if not (_finite(value := getattr(self, name)) and low <= value <= high)
        ]

    def _whole_numbers(self) -> list[str]:
        wanted = (
            ("top_k", 1, None, "a whole number >= 1, or None for no limit", True),
            ("max_tokens", 1, None, "a whole number >= 1", False),
            ("min_tokens", 0, None, "a whole number >= 0", False),
            ("n", 1, MAX_COMPLETIONS, f"a whole number in [1, {MAX_COMPLETIONS}]", False),
            ("logprobs", 0, MAX_LOGPROBS, f"a whole number in [0, {MAX_LOGPROBS}], or None for none", True),
            ("seed", 0, 2**31 - 1 - MAX_COMPLETIONS, f"a whole number in [0, 2³¹ - {MAX_COMPLETIONS})", True),
        )
        problems = [
            f"{name} is {value!r:.40}, expected {expected}"
            for name, low, high, expected, optional in wanted
            if not ((value := getattr(self, name)) is None and optional)
            and not (is_whole(value) and low <= value and (high is None or value <= high))
        ]
        if type(self.ignore_eos) is not bool:
            problems.append(f"ignore_eos is {self.ignore_eos!r:.40}, expected True or False")
        return problems

    def _lists(self) -> list[str]:
        problems = []
        if not _is_list(self.stop) or not all(isinstance(stop, str) and stop for stop in self.stop):
            problems.append(f"stop is {self.stop!r:.80}, expected strings that are not empty")
        if not _is_list(self.stop_token_ids) or not all(is_whole(token) for token in self.stop_token_ids):
            problems.append(f"stop_token_ids is {self.stop_token_ids!r:.80}, expected whole numbers")
        bias = self.logit_bias
        if bias is not None and not (
            isinstance(bias, Mapping) and all(is_whole(token) and _finite(value) for token, value in bias.items())
        ):
            problems.append(f"logit_bias is {bias!r:.80}, expected finite numbers by token id")
        elif bias is not None and len(bias) > MAX_BIASES:
            problems.append(f"logit_bias has {len(bias)} entries, expected at most {MAX_BIASES}")
        return problems

    def check(self, vocab: int, ends: Sequence[int] = ()) -> tuple[int, ...]:
        """The ids that end a text, with the model's `ends`; ValueError for ids outside a vocabulary of `vocab`."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias or ())):
            outside = [token for token in ids if not 0 <= token < vocab]
            if outside:
                raise ValueError(f"sampling parameters: {name} has {outside[0]}, expected ids in [0, {vocab})")
        stops = {*self.stop_token_ids, *(() if self.ignore_eos else ends)}
        if len(stops) > MAX_STOP_IDS:
            raise ValueError(
                f"sampling parameters: {len(stops)} stop ids with the model's own, expected at most {MAX_STOP_IDS}"
            )
        return tuple(sorted(stops))


def is_whole(value: Any) -> bool:
    """Whether `value` is a whole number; a bool is none."""
    return hasattr(value, "__index__") and not isinstance(value, (bool, np.bool_))


def check_prompt(prompt: Any, vocab: int, name: str = "prompt") -> list[int]:
    """The prompt's ids as plain ints; ValueError, with its `name`, for an empty prompt and for what is no id."""
    if isinstance(prompt, (str, bytes)) or not hasattr(prompt, "__len__"):
        raise ValueError(f"{name} is {prompt!r:.40}, expected a list of token ids (see ling3.load_tokenizer)")
    if len(prompt) == 0:
        raise ValueError(f"{name} is empty, expected at least one token id")
    for place, token in enumerate(prompt):
        if not is_whole(token):
            raise ValueError(f"{name}, token {place} is {token!r:.40}, expected a whole number")
        if not 0 <= token < vocab:
            raise ValueError(f"{name}, token {place} is {token}, expected an id in [0, {vocab})")
    return [operator.index(token) for token in prompt]


def check_room(prompt: Sequence[int], max_tokens: int, context: int, name: str = "prompt") -> None:
    """ValueError, with the prompt's `name`, where prompt and `max_tokens` do not fit into `context` tokens."""
    if len(prompt) + max_tokens > context:
        raise ValueError(
            f"{name} has {len(prompt)} tokens and max_tokens is {max_tokens}: {len(prompt) + max_tokens} together, "
            f"but there is room for {context} (the model's max_position_embeddings, or a smaller max_model_len); "
            "shorten one or the other"
        )


def _finite(value: Any) -> bool:
    number = isinstance(value, (int, float, np.number)) and not isinstance(value, (bool, np.bool_))
    return number and math.isfinite(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset))
