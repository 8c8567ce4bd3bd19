"""Prompts and answers in, log-probabilities out: the engine's bits, and the gradient of the training forward pass.

The tokens of an answer are known, so they are drafts that are all right: `engine/verification.py` runs several of them
in one pass, with the bits of single decode steps. Where it cannot, each token takes a decode step. Both are programs of
the engine, which are compiled one by one: inside a larger program XLA might round differently.
"""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float32, Int32

from ling3.cache import Span, State
from ling3.engine.calls import block_table, prompt_batch
from ling3.engine.forward import Batch
from ling3.engine.masks import words
from ling3.engine.request import Request, TokenSequence
from ling3.engine.runner import Runner
from ling3.engine.sampling import Choice
from ling3.engine.sampling_params import SamplingParams, check_prompt
from ling3.engine.settings import DECODE_STEPS, EngineSettings, changed
from ling3.engine.shapes import Shapes, buckets_of, call_sizes, smallest
from ling3.engine.speculation import check_drafts, fitting
from ling3.engine.verification import Drafts, Verified
from ling3.execution import Execution
from ling3.generate import SMALLEST_CHUNK, not_finite, round_up
from ling3.mesh.sharded import Sharded
from ling3.model import CausalLM
from ling3.runtime import compilation_cache
from ling3.runtime.entry_checks import refuse_fork
from ling3.runtime.parameters import ParameterError
from ling3.runtime.quoting import shown
from ling3.text.detokenizer import StopStrings


def score(
    model: CausalLM,
    sequences: Iterable[Any],
    settings: EngineSettings | None = None,
    *,
    execution: Execution | None = None,
    **changes: Any,
) -> Float32[Array, "sequences tokens"]:
    """The log-probability of each token of some answers, with the bits that an engine reports when it samples them.

    `sequences` are pairs of a prompt's and an answer's token ids, such as `(output.prompt_token_ids, output.token_ids)`
    of a `RequestOutput`. Row i has, for token t of answer i,

        log p(token t | prompt, tokens before t) = z_token - log Σ e^z

    of the model's unchanged logits z, before temperature, penalties, filters and grammars, as in `Logprob.logprob`.
    The columns are as many as the longest answer has tokens; those after the end of an answer are 0.

    Float for float the values are those of an `Engine` with the same `settings`, given as there, as one object or by
    name. Of these only the fields matter of which `EngineSettings` says that last bits may depend on them, and
    `cache_dtype`. Interventions, and tokens behind a snapshot that was continued, are not covered. A prompt of several
    answers is prefilled once.

    Differentiable in reverse mode: the gradient is that of the same log-probabilities in the training forward pass,
    `model(tokens)`, which agrees with the engine up to rounding, in the dtype of the weights. Call it outside of
    `jax.jit`: it runs programs of the engine, which are compiled already, and so is its gradient's.

        eqx.filter_grad(lambda model: -jnp.mean(weights * ling3.score(model, sequences)))(model)

    Before any work, raises ParameterError, which is a ValueError, for no sequences, an empty prompt or answer, ids
    outside the vocabulary, sequences longer than the model's context and `batch_invariant=False`; ValueError for a
    model on a mesh, and TypeError inside `jax.jit`. Raises FloatingPointError if the model's logits are NaN.
    """
    refuse_fork()
    compilation_cache.switch_on()
    if isinstance(model, Sharded):
        raise ValueError("the model is on a mesh, and ling3.score runs on one device: give it the model as loaded")
    execution = Execution.default() if execution is None else execution
    settings = changed(settings, changes)
    if not settings.batch_invariant:
        raise ParameterError(
            "batch_invariant", "batch_invariant is False, expected True: without it, bits depend on company"
        )
    answers = _checked(sequences, model.config.vocab_size, model.config.max_position_embeddings)
    return _scores(model, _Scoring(answers, settings, execution))


class KnownAnswer(NamedTuple):
    """The ids of a prompt, and of the tokens that follow it."""

    prompt: list[int]
    tokens: list[int]

    @property
    def length(self) -> int:
        """The number of tokens of both together."""
        return len(self.prompt) + len(self.tokens)


def _checked(sequences: Iterable[Any], vocab: int, context: int) -> list[KnownAnswer]:
    answers = []
    for i, pair in enumerate(sequences):
        name = f"sequence {i}"
        if not isinstance(pair, Sequence) or len(pair) != 2:
            wanted = "a pair of the token ids of a prompt and of an answer"
            raise ParameterError(name, f"{name} is {shown(pair)}, expected {wanted}")
        parts = zip(pair, ("prompt", "answer"), strict=True)
        answers.append(KnownAnswer(*(check_prompt(ids, vocab, f"{name}, its {part}") for ids, part in parts)))
        if (length := answers[-1].length) > context:
            raise ParameterError(
                name,
                f"{name} has {length} tokens, prompt and answer together, but there is room for {context} (the model's "
                "max_position_embeddings); shorten one or the other",
            )
    if not answers:
        raise ParameterError("sequences", "sequences is empty, expected at least one pair of a prompt and an answer")
    return answers


@dataclasses.dataclass(frozen=True, eq=False)
class _Scoring:
    """One call of `score`: what it scores, and how."""

    answers: list[KnownAnswer]
    settings: EngineSettings
    execution: Execution

    @property
    def width(self) -> int:
        """Tokens of the longest answer, padded to few shapes."""
        return round_up(max(len(each.tokens) for each in self.answers), SMALLEST_CHUNK)


@eqx.filter_custom_vjp
def _scores(model: CausalLM, scoring: _Scoring) -> Float32[Array, "sequences tokens"]:
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(model)):
        raise TypeError(
            "ling3.score is called inside jax.jit or another transformation that traces the model: call it outside, "
            "since it runs programs that are compiled already; eqx.filter_grad and jax.grad are fine outside of jit"
        )
    found = _Scorer(model, scoring).results()
    longest = max(len(each.tokens) for each in scoring.answers)
    values = np.zeros((len(scoring.answers), longest), np.float32)
    broken = []
    for i, (each, (tokens, logprobs)) in enumerate(zip(scoring.answers, found, strict=True)):
        values[i, : len(each.tokens)] = logprobs
        broken += [i] if tokens.tolist() != each.tokens else []
    if broken:
        raise not_finite(f"sequence {', '.join(map(str, broken))}")
    return jnp.asarray(values)


@_scores.def_fwd
def _forward(_: Any, model: CausalLM, scoring: _Scoring) -> tuple[Float32[Array, "sequences tokens"], None]:
    return _scores.fn(model, scoring), None


@_scores.def_bwd
def _backward(
    _: None, cotangent: Float32[Array, "sequences tokens"], __: Any, model: CausalLM, scoring: _Scoring
) -> CausalLM:
    answers, width = scoring.answers, scoring.width
    tokens = np.zeros((len(answers), round_up(max(each.length - 1 for each in answers), SMALLEST_CHUNK)), np.int32)
    known = np.full((len(answers), width), -1, np.int32)
    for row, following, each in zip(tokens, known, answers, strict=True):
        row[: each.length - 1] = [*each.prompt, *each.tokens][:-1]
        following[: len(each.tokens)] = each.tokens
    prompts = np.asarray([len(each.prompt) for each in answers], np.int32)
    cotangent = jnp.pad(cotangent, ((0, 0), (0, width - cotangent.shape[1])))
    given = _Padded(jnp.asarray(tokens), jnp.asarray(prompts), jnp.asarray(known))
    return _pulled_back(model, given, cotangent, scoring.execution)


class _Padded(eqx.Module):
    """Sequences in arrays of few shapes."""

    tokens: Int32[Array, "sequences seq"]  # all but the last
    prompts: Int32[Array, " sequences"]  # tokens of each prompt
    known: Int32[Array, "sequences tokens"]  # those of the answers; -1 after the last


@eqx.filter_jit
def _pulled_back(
    model: CausalLM, given: _Padded, cotangent: Float32[Array, "sequences tokens"], execution: Execution
) -> CausalLM:
    """The gradient of Σ cotangent · log p(known) in the training forward pass."""
    tokens, prompts, known = given.tokens, given.prompts, given.known
    weights, others = eqx.partition(model, eqx.is_inexact_array)
    seq, width, valid = tokens.shape[1], known.shape[1], known >= 0
    span = Span(jnp.zeros_like(prompts), prompts + valid.sum(axis=1, dtype=jnp.int32) - 1, None, execution)
    places = jnp.minimum(prompts[:, None] - 1 + jnp.arange(width, dtype=jnp.int32)[None], seq - 1)

    def logprobs(weights: CausalLM) -> Float32[Array, "sequences tokens"]:
        model = eqx.combine(weights, others)
        hidden, _ = model.model(tokens, (None,) * len(model.model.attentions), span)
        # Only the logits that are asked for: those of all prompt tokens would take gigabytes.
        logits = model.logits(jnp.take_along_axis(hidden, places[..., None], axis=1), execution)
        own = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(known, 0)[..., None], axis=-1)
        return jnp.where(valid, own[..., 0], 0.0)

    return jax.vjp(logprobs, weights)[1](cotangent)[0]


class _Scorer:
    """A runner that scores groups of at most `count` answers, and the prompt that it prefilled last."""

    def __init__(self, model: CausalLM, scoring: _Scoring):
        settings, execution = scoring.settings, scoring.execution
        rows, widths = call_sizes(settings, model, execution)
        try:
            check_drafts(model, execution, mtp=False)
            self.drafts = fitting(settings.draft_tokens, rows)  # known tokens in a pass, after each answer's newest
        except ValueError:
            self.drafts = 0  # decode steps in place of passes
        self.count, self.scoring = rows // (self.drafts + 1), scoring
        longest = max(each.length for each in scoring.answers)
        columns = round_up(-(-longest // settings.page_size), 1)
        buckets, pages = buckets_of(settings, widths), self.count * columns
        sizes = (self.count, pages, settings.page_size, columns, buckets, (self.count,))
        self.shapes = Shapes(*sizes, cache_dtype=settings.cache_dtype)
        self.runner = Runner(model, self.shapes, execution)
        self.newest: TokenSequence | None = None  # of which more answers may follow
        self.states: tuple[State, ...] = ()  # those of `newest` after its prompt

    def results(self) -> list[tuple[Int32[np.ndarray, " tokens"], Float32[np.ndarray, " tokens"]]]:
        """Each answer's tokens and their log-probabilities; other tokens where the logits are NaN."""
        answers, longest = self.scoring.answers, collections.Counter[tuple[int, ...]]()
        prompts = [tuple(each.prompt) for each in answers]
        for prompt, each in zip(prompts, answers, strict=True):
            longest[prompt] = max(longest[prompt], len(each.tokens))
        # Answers to a prompt follow each other, and few calls wait for a longer answer.
        order = sorted(range(len(answers)), key=lambda i: (longest[prompts[i]], prompts[i], len(answers[i].tokens)))
        found: dict[int, tuple[Any, Any]] = {}
        for start in range(0, len(order), self.count):
            some = order[start : start + self.count]
            choices = [jax.device_get((x.token, x.logprob)) for x in self.of_group([answers[i] for i in some])]
            tokens, logprobs = (np.concatenate(parts, axis=1) for parts in zip(*choices, strict=True))
            for row, i in enumerate(some):
                length = len(answers[i].tokens)
                found[i] = tokens[row, :length], logprobs[row, :length]
        return [found[i] for i in range(len(answers))]

    def of_group(self, answers: Sequence[KnownAnswer]) -> list[Choice]:
        """Puts prompts into the caches as the engine does, and then takes the answers' tokens."""
        sequences, count, width = (
            list(map(self.prefilled, range(len(answers)), answers)),
            self.count,
            self.scoring.width,
        )
        where, rows = block_table(sequences, count, self.shapes)
        known, lengths = np.full((count, width), -1, np.int32), np.zeros(count, np.int32)
        for row, each in enumerate(answers):
            known[row, : len(each.tokens)], lengths[row] = each.tokens, len(each.tokens)
        # Grammars force tokens too, and as there, only the mask of the known token is not empty.
        masks, found = np.zeros((count, words(self.runner.model.config.vocab_size)), np.uint32), []
        if self.drafts:
            depth = np.full(count, self.drafts, np.int32)
            drafts = Drafts(known, passes=np.full(count, width, np.int32), depth=depth, each=self.drafts, mtp=False)
            results = self.runner.decode(Batch(where, known, lengths, masks, drafts=drafts), rows, sequences)
            assert isinstance(results, Verified)
            return [results.choice]
        for start in range(0, int(lengths.max()), DECODE_STEPS):
            steps = np.clip(lengths - start, 0, DECODE_STEPS)
            call = Batch(where, known[:, start : start + DECODE_STEPS], steps, masks)
            found.append(self.runner.decode(call, rows, sequences))
        return found

    def prefilled(self, slot: int, answer: KnownAnswer) -> TokenSequence:
        """The sequence of an answer in a slot, with its prompt in the caches: prefilled, or copied from `newest`."""
        request = Request(slot, None, answer.prompt, SamplingParams(max_tokens=len(answer.tokens)))
        sequence = TokenSequence(request, 0, slot, 0, (), None, StopStrings(()), prefill_end=len(answer.prompt) - 1)
        columns, memory = self.shapes.columns, sequence.memory
        memory.slot, memory.pages = slot, list(range(slot * columns, (slot + 1) * columns))
        if (same := self.newest) is not None and same.prompt == sequence.prompt:
            sequence.prefilled = sequence.prefill_end
            held = -(-sequence.prefilled // self.shapes.page_size)
            memory.states, memory.copied = self.states, same.memory.pages[:held]
        self.runner.swap_in(sequence)
        where, rows = block_table([sequence], 1, self.shapes)
        while not sequence.decoding:
            chunk = answer.prompt[sequence.prefilled : -1][: self.scoring.settings.chunked_prefill_size]
            call = prompt_batch(where, rows, [chunk], smallest(self.shapes.buckets, len(chunk)))
            self.runner.extend(call, rows, [sequence])
            sequence.prefilled += len(chunk)
        self.newest, self.states = sequence, self.runner.state_of(sequence)
        return sequence
