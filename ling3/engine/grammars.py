"""Grammars on the host, by llguidance: which tokens may follow a text, and which must.

llguidance (the extra `structured`) computes a mask when it is needed, from the derivatives of the grammar's regular
expressions and an Earley parser, so a new schema is ready within milliseconds. The alternative, xgrammar, first
compiles tables over the vocabulary, needs torch, and does not limit what a hostile grammar may cost. llguidance's
limits count states and items, not seconds: a grammar fails at the same token in every process, whatever else runs.

Grammars are untrusted input, on which llguidance may crash, or spend minutes or gigabytes. So each is first tried in a
process with limits (`grammar_worker.py`), which dies in place of the engine's.

A `Constraint` depends only on its grammar and on the tokens that it has consumed. Where the grammar leaves no choice of
text, the tokens that the tokenizer makes of this text are forced: they are the answer by definition, even where the
model would have tokenized the same text differently.
"""

# pyright: reportMissingImports=false
# llguidance is an extra, and types are checked without it too.

import collections
import functools
import itertools
import json
import pathlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt32

from ling3.engine import grammar_bounds
from ling3.engine.masks import WORD, words
from ling3.engine.outputs import FinishReason
from ling3.engine.plans import StepPlan
from ling3.engine.structured import Choice, Grammar, JSONObject, JSONSchema, Regex, Structured
from ling3.runtime.limited_process import LimitedProcess, LimitExceeded
from ling3.text.tokenizer import Tokenizer

KEPT = 16
"""The most compiled grammars that an engine keeps."""
SECONDS = 3
"""The time limit for compiling one grammar; one of 3,000 properties takes about half a second."""
MEBIBYTES = 128
"""The address space limit for compiling one grammar; one of 3,000 properties takes about 40 MiB."""
TRIES = pathlib.Path(__file__).with_name("grammar_worker.py")
LIMITS = {
    "max_items_in_row": 1_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
}
"""llguidance's limits for one grammar: about 20 ms to build its lexer and 15 ms for a mask, and 100 MB of states."""
LONGEST_MESSAGE = 500
"""The most characters that our error messages quote from one of llguidance's."""


class Constraint:
    """The state of a sequence's grammar after the tokens so far.

    `forced` are the tokens that must follow the text so far, and `mask` has a bit for each token that may follow these:
    bit i of word w is for token 32·w + i. Special tokens are not text: the mask has only those that the grammar names,
    and `ends` where the text may end. `whole` is True if the text can only end after the forced tokens, and `complete`
    if it can only end now. `error` says what was wrong if llguidance gave up or failed.
    """

    def __init__(self, matcher: Any, ends: Sequence[int], vocab: int, eos: Sequence[int]):
        self._matcher = matcher
        # llguidance lets a text end with the model's `eos` ids, which need not be among this sequence's `ends`.
        self._ends, self._eos, self._end_ids = _bits(ends, vocab), _bits(eos, vocab), frozenset(ends)
        self.forced: collections.deque[int] = collections.deque()
        self.complete, self.error = False, None
        self._look()

    def copy(self) -> "Constraint":
        """A copy in the same state, for another sequence."""
        other = object.__new__(Constraint)
        other.__dict__.update(self.__dict__)
        other._matcher, other.forced = self._matcher.deep_copy(), self.forced.copy()
        return other

    def advance(self, token: int) -> None:
        """Advances the grammar by the token that was chosen."""
        if self.forced:
            expected = self.forced.popleft()
            assert token == expected, f"token {token} was chosen where {expected} was forced"
            self.complete = not self.forced and self.whole
        elif self._matcher.consume_token(token):
            self._look()
        else:
            self.error = _message(self._matcher.get_error())

    def plan(self, most: int) -> StepPlan:
        """Plans a decode call of at most `most` steps: the forced tokens, then one more that the mask allows."""
        forced = list(itertools.islice(self.forced, most))
        sampled = len(forced) < most and len(forced) == len(self.forced) and not self.whole
        return StepPlan(len(forced) + sampled, forced, self.mask)

    def take(
        self, token: int, count: int, least: int, reason: FinishReason | None
    ) -> tuple[FinishReason | None, str | None]:
        """Advances by the last of `count` tokens; returns (why the sequence ends with it or None, an error or None)."""
        try:
            self.advance(token)
            if self.complete:
                return "stop", None
            error = None if reason is not None else self.blocked(count, least)
        except BaseException as fault:  # a panic in llguidance is a BaseException
            error = f"the grammar failed after {count} tokens of the output: {fault!r}"
        return (reason, None) if error is None else ("error", error)

    def blocked(self, count: int, least: int) -> str | None:
        """The reason why no token can follow the output's `count` tokens, or None if one can.

        End ids are excluded until the output has `least` tokens (`min_tokens`).
        """
        if self.error is not None:
            return f"the grammar failed after {count} tokens of the output: {self.error}"
        early = [i for i, token in enumerate(self.forced) if token in self._end_ids and count + i < least]
        at = count + len(self.forced)
        left = self.mask & ~self._ends if at < least else self.mask
        if early or not (left.any() or self.whole):
            at = count + early[0] if early else at
            ends = f" that is not an end, and min_tokens is {least}" if at < least else ""
            return f"after {at} tokens of the output the grammar leaves no token{ends}"
        return None

    def _look(self) -> None:
        """Updates `forced`, `mask`, `whole` and `complete` after a token was consumed."""
        matcher, self.whole, mask = self._matcher, False, np.zeros_like(self._ends)
        while True:
            follow = matcher.compute_ff_tokens()
            if not follow:
                mask = self._computed()
                alone = _only(mask)
                if alone is None or matcher.is_accepting() or matcher.is_stopped():
                    break
                follow = [alone]
            if matcher.is_error() or not matcher.consume_tokens(follow):
                break
            self.forced.extend(follow)
        if matcher.is_error():
            self.error = _message(matcher.get_error())
            return
        if matcher.is_accepting():
            mask = mask & ~self._eos
            self.whole, mask = not mask.any(), mask | self._ends
        elif matcher.is_stopped():
            mask = np.zeros_like(mask)
        self.mask, self.complete = mask, self.whole and not self.forced

    def _computed(self) -> UInt32[np.ndarray, " words"]:
        """The mask of the next token, cut to the words of the vocabulary.

        llguidance's mask has one bit more than there are tokens: one word more if the tokens fill the last word.
        """
        mask, expected = np.frombuffer(self._matcher.compute_bitmask(), np.uint32), len(self._ends)
        if len(mask) < expected:
            raise ValueError(f"a mask of {len(mask)} words, expected {expected}")
        return mask[:expected]


class Grammars:
    """Compiles and caches grammars over a tokenizer's vocabulary of `vocab` tokens, of which the `ends` end a text.

    With `tried` False it skips the process with limits, because another process's engine has tried each grammar.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, ends: Sequence[int], tried: bool = True):
        self._tokenizer, self._vocab, self._ends, self._tried = tokenizer, vocab, tuple(ends), tried
        self._kept: collections.OrderedDict[Any, Constraint] = collections.OrderedDict()
        self._lock = threading.Lock()

    def constraint(self, structured: Structured, ends: Sequence[int]) -> Constraint:
        """A sequence's constraint before its first token; `ends` are the ids that end the sequence.

        Raises ValueError for a grammar that does not compile, that is beyond the limits, or that no text or only the
        empty text satisfies, and if llguidance is not installed.
        """
        key = (structured, tuple(ends))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key].copy()
        constraint = self._compiled(structured, ends)
        with self._lock:
            self._kept[key] = constraint
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return constraint.copy()

    def _compiled(self, structured: Structured, ends: Sequence[int]) -> Constraint:
        guidance, (tokenizer, limits) = _guidance(), self._tools
        name = f"structured: the {type(structured).__name__}"
        try:
            grammar_bounds.check(structured)
            source = json.dumps({"grammars": _sources(guidance.LLMatcher, structured, "start")})
        except ValueError as error:
            raise ValueError(f"{name} does not compile: {_short(str(error))}") from None
        if self._tried:
            self._try(source, name)
        matcher = guidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(f"{name} does not compile: {_message(matcher.get_error())}")
        constraint = Constraint(matcher, ends, self._vocab, self._ends)
        if constraint.error is not None:
            raise ValueError(f"{name} cannot be used: {constraint.error}")
        if constraint.complete:
            raise ValueError(f"{name} allows no text but the empty one")
        if not constraint.forced and not constraint.mask.any():
            raise ValueError(f"{name} leaves no token to begin with: nothing that the tokenizer can write satisfies it")
        return constraint

    def _try(self, source: str, name: str) -> None:
        """Compiles a grammar in the process with limits; raises ValueError, with its `name`, if that fails."""
        try:
            found = self._process.ask(SECONDS, source=source)
        except LimitExceeded as error:
            raise ValueError(f"{name} cannot be used: {error}") from None
        if found["error"] is not None:
            wrong = "cannot be used" if found["compiles"] else "does not compile"
            raise ValueError(f"{name} {wrong}: {_message(found['error'])}")

    @functools.cached_property
    def _process(self) -> LimitedProcess:
        """The process with limits in which grammars are tried."""
        fields = {"vocab": self._vocab, "ends": list(self._ends), "limits": LIMITS}
        backend = self._tokenizer.backend
        process = LimitedProcess(TRIES, MEBIBYTES, lambda: {"tokenizer": backend.to_str(), **fields})
        weakref.finalize(self, process.stop)
        return process

    @functools.cached_property
    def _tools(self) -> tuple[Any, Any]:
        """The tokenizer in llguidance's form, and llguidance's limits."""
        guidance = _guidance()
        try:
            tokenizer = guidance.LLTokenizer(
                self._tokenizer.backend.to_str(), n_vocab=self._vocab, eos_token=list(self._ends) or None
            )
        except ValueError as error:
            raise ValueError(f"structured: llguidance cannot read this tokenizer: {_short(str(error))}") from error
        return tokenizer, guidance.LLParserLimits(**LIMITS, verbose_errors=False)


def _guidance() -> Any:
    try:
        import llguidance  # noqa: PLC0415
    except ImportError:
        raise ValueError("structured: llguidance is missing: pip install 'ling3[structured]'") from None
    return llguidance


def _sources(matcher: Any, structured: Structured, name: str) -> list[dict[str, Any]]:
    """llguidance's grammar for a constraint, under this name, and its parts'; raises ValueError for invalid ones."""
    if isinstance(structured, Grammar):
        parts = [each for part, inner in dict(structured.parts).items() for each in _sources(matcher, inner, part)]
        if repeated := [part for part, count in collections.Counter(x["name"] for x in parts).items() if count > 1]:
            raise ValueError(f"several parts have the name {repeated[0]}")
        return [{"name": name, "lark_grammar": structured.lark}, *parts]
    if isinstance(structured, Choice):
        strings = sorted(set(structured.strings))
        lark = "start: " + " | ".join(json.dumps(x, ensure_ascii=False) for x in strings)
        return [{"name": name, "lark_grammar": lark}]
    if isinstance(structured, Regex):
        source = matcher.grammar_from_regex(structured.pattern)
    else:
        source = _json(matcher, structured)
    (grammar,) = json.loads(source)["grammars"]
    return [{**grammar, "name": name}]


def _json(matcher: Any, structured: JSONSchema | JSONObject) -> str:
    schema = structured.schema if isinstance(structured, JSONSchema) else '{"type": "object"}'
    comma, colon = (",", ":") if structured.compact else (", ?", ": ?")
    overrides = {
        "whitespace_flexible": False,
        "item_separator": comma,
        "key_separator": colon,
        "json_allow_general_unicode_escapes": False,  # these include surrogates
        "coerce_one_of": True,  # `one_of.py` has checked that the options exclude each other
        "lenient": False,
    }
    return matcher.grammar_from_json_schema(schema, overrides=overrides)


def _bits(ids: Sequence[int], vocab: int) -> UInt32[np.ndarray, " words"]:
    """A mask with the bits of the given tokens."""
    mask = np.zeros(words(vocab), np.uint32)
    for token in ids:
        mask[token // WORD] |= np.uint32(1 << token % WORD)
    return mask


def _only(mask: UInt32[np.ndarray, " words"]) -> int | None:
    """The only token of a mask; None if the mask has none or several."""
    (used,) = np.nonzero(mask)
    if len(used) != 1 or int(mask[used[0]]).bit_count() != 1:
        return None
    return int(used[0]) * WORD + int(mask[used[0]]).bit_length() - 1


def _message(error: str) -> str:
    """One of llguidance's errors, in one line."""
    text = error.replace("<non-verbose/>", "")
    return "no token can follow" if text.startswith("NoExtension") else _short(text)


def _short(text: str) -> str:
    """A text in one line of at most `LONGEST_MESSAGE` characters."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + "…"
