"""A conversation with a model, independent of a terminal: its turns, and how the next answer is sampled."""

import dataclasses
import shlex
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ling3.cli.options import Thinking, chat_ids
from ling3.engine.sampling_params import SamplingParams
from ling3.runtime.parameters import parameters

if TYPE_CHECKING:
    from ling3.engine.outputs import Delta, FinishReason
    from ling3.serve import Engine
    from ling3.text.tokenizer import Tokenizer

# The token that ends the model's thoughts.
THOUGHTS_END = "</think>"
# Parameters that may change between answers, in the order in which they are shown, with the kind of value of each.
SETTABLE = {
    **{
        name: each.noun
        for name, each in parameters(SamplingParams).items()
        if each.common or name in ("max_tokens", "seed")
    },
    "stop": "a text",
}
READ: dict[str, Callable[[str], Any]] = {
    "a number": float,
    "a whole number": int,
    "true or false": {"true": True, "false": False}.__getitem__,
    "a text": lambda text: [text.replace("\\n", "\n")] if text else [],
}


class Unanswered(ValueError):
    """Raised by `Conversation.ask` for a question that could not be answered."""


@dataclasses.dataclass
class Conversation:
    """The turns so far, questions and answers, and the engine and parameters for the next one."""

    engine: "Engine"
    tokenizer: "Tokenizer"
    params: SamplingParams
    system: str | None = None
    thinking: Thinking = "auto"
    turns: list[dict[str, str]] = dataclasses.field(default_factory=list)
    tokens: int = 0
    """Tokens of the last prompt and its answer."""

    @property
    def full(self) -> bool:
        """True if the last answer filled the context."""
        return self.tokens >= self.engine.max_model_len

    def ask(self, question: str) -> Generator["Delta", None, None]:
        """Yields the deltas of the answer to a question.

        The turn is kept once the answer has ended, without its thoughts. If the caller leaves early, or Ctrl-C is
        pressed, the text so far is kept; if there is none, the question is dropped too.
        Raises Unanswered, and keeps nothing, if the context has no room, the template refuses the messages, or the
        model or the engine fails.
        """
        from jax.errors import JaxRuntimeError

        asked = [*self.turns, {"role": "user", "content": question}]
        ids = self._prompt(asked)
        text, answer = "", []
        reason: FinishReason | None = None
        try:
            deltas = self.engine.stream(ids, self.params, truncate="output")
        except ValueError as error:
            raise Unanswered(str(error)) from error
        try:
            for delta in deltas:
                text, reason = text + delta.text, delta.finish_reason
                answer.extend(delta.token_ids)
                if reason == "error" and delta.output is not None:
                    raise Unanswered(delta.output.error or "the engine gave up")
                yield delta
        except JaxRuntimeError as error:
            reason = "error"
            raise Unanswered(f"the engine failed: {error}") from error
        finally:
            self.tokens = len(ids) + len(answer)
            if reason in ("stop", "length") or (reason is None and text):
                self.turns = [*asked, {"role": "assistant", "content": self._without_thoughts(text, answer)}]

    def reset(self) -> None:
        """Forgets the turns, but not the system message."""
        self.turns, self.tokens = [], 0

    def _prompt(self, turns: list[dict[str, str]]) -> list[int]:
        """The token ids of the system message and the turns. Raises Unanswered if they leave no room for an answer."""
        room = self.engine.max_model_len
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        try:
            ids = chat_ids(self.tokenizer, [*system, *turns], self.thinking)
        except ValueError as error:
            raise Unanswered(str(error)) from error
        if len(ids) >= room:
            if len(turns) > 1:
                what, remedy = "with this question the conversation has", "/reset forgets what was said"
            else:
                what, remedy = "this question has, with what the template puts around it,", "ask a shorter one"
            raise Unanswered(f"the context is full: {what} {len(ids):,} tokens, and {room:,} is all; {remedy}")
        return ids

    def _without_thoughts(self, text: str, answer: Sequence[int]) -> str:
        end = self.tokenizer.backend.token_to_id(THOUGHTS_END)
        if end not in answer:
            return text
        thoughts = self.tokenizer.decode(answer[: answer.index(end) + 1])
        return text.removeprefix(thoughts).lstrip("\n")


def with_settings(params: SamplingParams, words: str) -> SamplingParams:
    r"""Changes the parameters by the `name=value` pairs of a line.

    `stop` may be given several times, with \n for a newline, and `stop=` clears it. Raises ValueError for names that
    cannot be set and for invalid values.
    """
    values: dict[str, Any] = {}
    stops: list[str] = []
    for word in _words(words):
        name, equals, value = word.partition("=")
        if not equals or name not in SETTABLE:
            raise ValueError(f"{word!r} is not name=value with one of the names {', '.join(SETTABLE)}")
        try:
            noun = SETTABLE[name].removesuffix(" or none")
            values[name] = None if value == "none" and noun != SETTABLE[name] else READ[noun](value)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{name} is {value!r}, expected {SETTABLE[name]}") from error
        if name == "stop":
            stops += values[name]
            values[name] = tuple(stops)
    return dataclasses.replace(params, **values)


def settings_line(params: SamplingParams) -> str:
    """The line from which `with_settings` makes these parameters."""
    words = []
    for name in SETTABLE:
        value = getattr(params, name)
        if name == "stop":
            words += [shlex.quote(f"stop={stop}").replace("\n", "\\n") for stop in value]
        else:
            words.append(f"{name}={'none' if value is None else str(value).lower()}")
    return " ".join(words)


def _words(line: str) -> Iterator[str]:
    """Splits a line into words as a shell does, except that a backslash escapes nothing."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""
    return iter(lexer)
