"""Asks questions to an engine or a fleet of engines, and counts the right answers."""

import contextlib
import dataclasses
import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ling3.engine.outputs import RequestOutput
from ling3.engine.sampling_params import MAX_SEED, SamplingParams, check_prompt
from ling3.engine.settings import EngineSettings
from ling3.evals.answers import Parser
from ling3.evals.predictions import Predictions
from ling3.evals.prompts import Question
from ling3.intervention import Intervention
from ling3.serve import Server
from ling3.text.tokenizer import Tokenizer
from ling3.version import __version__

MAX_TOKENS = 2000
"""The most new tokens of an answer, if the context has room for them."""
CONFIDENCE = 1.959963984540054
"""The normal distribution's 97.5 % quantile: two-sided 95 %."""

PROTOCOL = EngineSettings(
    page_size=256,
    chunked_prefill_size=512,
    token_paddings=(16, 128, 512),
    mem_fraction=0.6,
    max_running_requests=64,
    overlap=False,
)
"""The settings of Ling-3's published evaluation, which is greedy, with up to `MAX_TOKENS` tokens per answer."""

# Settings of scheduling, memory and caching. The bits of an answer do not depend on these, but may on all others.
SCHEDULE = (
    "max_running_requests",
    "mem_fraction",
    "max_queue",
    "num_pages",
    "prefix_cache",
    "snapshot_fraction",
    "prefix_dir",
    "prefix_disk_bytes",
    "overlap",
    "speculation",
    "draft_tokens",
)

ChatMode = Literal["auto", "on", "off"]
"""The thinking mode of prompts sent as a user's turn of the chat template; `auto` is the template's default."""


@dataclasses.dataclass(frozen=True)
class Score:
    """How many of `total` answers are `right`.

    As a text it is the last line of a run. Scripts around Ling's evaluations look for its Chinese word for accuracy to
    see that a run is complete.
    """

    right: int
    total: int

    @property
    def accuracy(self) -> float:
        """The share of answers that are right."""
        return self.right / self.total

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval, (p + z²/2n ± z sqrt(p(1 - p)/n + z²/4n²)) / (1 + z²/n) (JASA 22, 1927)."""
        p, n, z = self.accuracy, self.total, CONFIDENCE
        middle, reach = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = (middle - reach) / (1 + z * z / n), (middle + reach) / (1 + z * z / n)
        return max(0.0, min(p, low)), min(1.0, max(p, high))  # exact at 0 and 1, despite rounding

    def to_dict(self) -> dict[str, Any]:
        """The score in plain values, for JSON."""
        return {"right": self.right, "total": self.total, "accuracy": self.accuracy, "interval": list(self.interval)}

    def __str__(self) -> str:
        return f"正确率: {self.right}/{self.total} = {self.accuracy:.4f}"


@dataclasses.dataclass(frozen=True)
class TokenizedQuestion:
    """A question's token ids, as the model reads them."""

    ids: list[int]
    record: Mapping[str, Any]
    """The first fields of its line in the predictions file."""


def prepare(
    tokenizer: Tokenizer, questions: Sequence[Question], chat: ChatMode | None = None
) -> list[TokenizedQuestion]:
    """Tokenizes the questions: their prompts unchanged, or with `chat` as a user's turn of the chat template."""
    asked = []
    for index, question in enumerate(questions):
        text = question.prompt
        if chat is not None:
            thinking = {} if chat == "auto" else {"enable_thinking": chat == "on"}
            turn = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turn, tokenize=False, **thinking)
        ids = tokenizer.encode(text, add_special_tokens=chat is None)
        digest = hashlib.sha256(text.encode()).hexdigest()
        asked.append(TokenizedQuestion(ids, {"index": index, "prompt_sha256": digest, "expected": question.answer}))
    return asked


def evaluate(
    engine: Server,
    asked: Sequence[TokenizedQuestion],
    parse: Parser,
    out: str | os.PathLike[str],
    *,
    params: SamplingParams | None = None,
    settings: Mapping[str, Any] | None = None,
    limit: int | None = None,
    on_start: Callable[[Score, int], None] | None = None,
    on_answer: Callable[[Score, int], None] | None = None,
) -> Score:
    """Asks the questions for which the file `out` has no line yet, and scores all.

    An answer is right if `parse` finds the expected one in it, and wrong if its request ended in `error`. By default,
    sampling is greedy, up to `MAX_TOKENS` tokens or the context's end. Question i has the seed of `params` plus i. To
    resume a run, `settings`, such as `fingerprint(model)`, must be the same, as must the sampling and the engine's
    settings outside `SCHEDULE`. `limit` takes only the first questions. `on_start` and `on_answer` are called with the
    score so far and the number of questions.

    Raises ValueError, before any question is asked, for a prompt without room for an answer and for seeds that are too
    large, and the errors of Predictions.
    """
    params = SamplingParams(max_tokens=MAX_TOKENS) if params is None else params
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, expected at least 1")
    taken = asked[:limit]
    if not taken:
        raise ValueError("no question to ask, expected at least one")
    for question in taken:
        name = f"the prompt of question {question.record['index']}"
        length = len(check_prompt(question.ids, 2**31, name))
        if length >= engine.max_model_len:
            raise ValueError(
                f"{name} has {length} tokens, which leaves none for an answer: with it there is room for "
                f"{engine.max_model_len} (the model's max_position_embeddings, or a smaller max_model_len); shorten "
                "the prompt, or show fewer examples in it"
            )
    check_seeds(params.seed, len(taken))
    settings = _settings(engine, params, parse, settings)
    schedule = {name: getattr(engine.settings, name) for name in SCHEDULE}
    with Predictions(out, [question.record for question in asked], settings) as file:
        known = [file.lines[index]["right"] for index in range(len(taken)) if index in file.lines]
        score = Score(sum(known), len(known))
        coming = [index for index in range(len(taken)) if index not in file.lines]
        if coming:
            engine.warmup()  # so that the first timings have no compilation in them
        if on_start is not None:
            on_start(score, len(taken))
        own = [dataclasses.replace(params, seed=(params.seed or 0) + index) for index in coming]
        prompts = [taken[index].ids for index in coming]
        with contextlib.closing(engine.stream_all(prompts, own, truncate="output")) as deltas:
            for index, output in ((coming[place], delta.output) for place, delta in deltas):
                if output is not None:
                    answer = _answer(output, parse, taken[index].record["expected"])
                    file.append(index, {**answer, "schedule": schedule})
                    score = Score(score.right + answer["right"], score.total + 1)
                    if on_answer is not None:
                        on_answer(score, len(taken))
    return score


def check_seeds(seed: int | None, count: int) -> None:
    """Raises ValueError if seed + i is too large a seed for the last of `count` questions."""
    if (seed or 0) + count - 1 > MAX_SEED:
        raise ValueError(
            f"seed is {seed}, and question i has seed + i: expected at most {MAX_SEED - count + 1} with {count} "
            "questions"
        )


def _settings(
    engine: Server, params: SamplingParams, parse: Parser, others: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The settings that must be the same for a run to be resumed."""
    return {
        **(others or {}),
        "parser": parse.__name__,
        "sampling": {"temperature": params.temperature, "max_tokens": params.max_tokens, **_changed(params)},
        "engine": {name: value for name, value in dataclasses.asdict(engine.settings).items() if name not in SCHEDULE},
        "device": engine.device_kind,
        "ling3": __version__,
    }


def _changed(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults; for an intervention, its kind and a hash of its numbers."""
    default = dataclasses.asdict(SamplingParams())
    fields = dataclasses.asdict(dataclasses.replace(params, interventions=()))
    changed = {name: value for name, value in fields.items() if value != default[name]}
    if params.interventions:
        changed["interventions"] = [_intervention(each) for each in params.interventions]
    return changed


def _intervention(each: Intervention) -> dict[str, Any]:
    numbers = (each.value, each.start, each.positions, each.part)
    written = b" ".join(b"" if x is None else np.asarray(x).tobytes() for x in numbers)
    return {
        "layer": each.layer,
        "site": each.site,
        "adds": each.adds,
        "numbers_sha256": hashlib.sha256(written).hexdigest(),
    }


def _answer(output: RequestOutput, parse: Parser, expected: str) -> dict[str, Any]:
    """The fields of a question's line that its answer gives."""
    completion = output.outputs[0]
    parsed = parse(completion.text) if completion.finish_reason != "error" else None
    return {
        "text": completion.text,
        "parsed": parsed,
        "right": parsed == expected,
        "finish_reason": completion.finish_reason,
        "error": completion.error,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(completion.token_ids),
        # How many prompt tokens were cached depends on the schedule too, and explains the time to the first token.
        "timings": {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in dataclasses.asdict(completion.timings).items()
        }
        | {"cached_tokens": completion.cached_tokens},
    }
