"""GRPO: a policy learns from the rewards of its own answers, which the engine samples.

Group Relative Policy Optimization is that of DeepSeekMath (arXiv 2402.03300, §4.1); `"unbiased"` is Dr. GRPO
(arXiv 2503.20783, §3). A batch is G answers o to each of some questions, with rewards r. For token t of an answer,

    Â = (r - mean r) / std r                       over the G answers to a question; unbiased: r - mean r
    ρ = p(o_t) / p_old(o_t)                        p_old: as sampled
    k3 = p_start / p - log(p_start / p) - 1        its mean over sampled tokens estimates KL(p, p_start)
    gain = min(ρ Â, clip(ρ, 1 - ε, 1 + ε) Â) - β k3

and the objective is the mean over answers of the mean gain of their tokens; unbiased: of its sum / `max_tokens`.

In most systems the sampler and the trainer round differently, so ρ is not 1 even before the first update, and what is
called on-policy is not. Here `ling3.score` has the sampler's bits: on the first step of each batch ρ is exactly 1.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Float64, PyTree

from ling3.engine.outputs import Completion
from ling3.engine.sampling_params import SamplingParams
from ling3.layers.adapted import AdaptedMatrix
from ling3.model import CausalLM
from ling3.runtime.progress import progress
from ling3.score import score
from ling3.serve import Engine
from ling3.train.loop import TrainState, adam, update

_updated = eqx.filter_jit(update)  # donates nothing: the engine has the weights too


class Task(NamedTuple):
    """A question, and the checker that gives an answer its reward."""

    prompt: Any  # a text, token ids or a chat, as `Engine.submit` takes it
    check: Callable[[Completion], float]


@dataclasses.dataclass(frozen=True)
class Grpo:
    """How much is sampled and how far each update goes. Raises ValueError for values out of range."""

    steps: int  # batches of answers, each sampled from the newest weights
    questions: int = 8  # in a batch
    group: int = 8  # G, answers to each question
    inner: int = 1  # updates per batch; from the second on, ρ is not 1, and the clip matters
    max_tokens: int = 64  # of an answer; one that is cut off there is checked as it is
    learning_rate: float = 1e-4
    gradient_norm: float = 1.0  # of a gradient; a larger one is scaled down
    clip: float = 0.2  # ε
    kl: float = 0.04  # β; with 0 the KL divergence is not computed, and recorded as NaN
    advantages: Literal["normalized", "unbiased"] = "normalized"  # GRPO's or Dr. GRPO's
    seed: int = 0  # answer g to question q of batch s has the seed `seed + (s · questions + q) · group + g`

    def __post_init__(self) -> None:
        least = {"steps": 1, "questions": 1, "group": 2, "inner": 1, "max_tokens": 1, "clip": 0, "kl": 0, "seed": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {smallest}")


@dataclasses.dataclass(frozen=True)
class Point:
    """The record of one batch: means over its answers or their tokens, and counts since the start."""

    step: int  # from 0
    reward: float  # of the answers, sampled before the update
    kl: float  # the mean of k3 before the update, in nats per token
    entropy: float  # the mean of -log p of the sampled tokens, which estimates the entropy, in nats per token
    deviation: float  # the largest |ρ - 1| in the first inner step: 0 if the sampler has the policy's weights
    drift: float  # the largest |ρ - 1| in the last inner step
    length: float  # tokens of an answer
    tokens: int  # sampled so far
    seconds: float  # so far
    processor_seconds: float  # so far, of all cores together


class Answers(eqx.Module):
    """A batch as the objective needs it, without the policy's log-probabilities."""

    advantages: Float32[Array, " answers"]
    old: Float32[Array, "answers tokens"]  # log-probabilities when they were sampled
    start: Float32[Array, "answers tokens"] | None  # log-probabilities by the model at the start; None: no penalty
    valid: Bool[Array, "answers tokens"]  # False after an answer's end


def advantages(
    rewards: Float64[np.ndarray, "questions group"], kind: Literal["normalized", "unbiased"] = "normalized"
) -> Float64[np.ndarray, "questions group"]:
    """Each answer's reward minus its group's mean, divided by the group's standard deviation (+ 1e-6) if normalized."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return centred if kind == "unbiased" else centred / (rewards.std(axis=1, keepdims=True) + 1e-6)


def divergence(
    logprobs: Float32[Array, "answers tokens"], start: Float32[Array, "answers tokens"]
) -> Float32[Array, "answers tokens"]:
    """k3 = p_start / p - log(p_start / p) - 1 ≥ 0 of each token (Schulman 2020, http://joschu.net/blog/kl-approx.html)."""
    return jnp.expm1(start - logprobs) - (start - logprobs)


def objective(logprobs: Float32[Array, "answers tokens"], answers: Answers, settings: Grpo) -> Float32[Array, ""]:
    """The objective, which is maximized, as the first lines of this module state it."""
    ratio, gains = jnp.exp(logprobs - answers.old), answers.advantages[:, None]
    clipped = jnp.clip(ratio, 1 - settings.clip, 1 + settings.clip)
    gain = jnp.minimum(ratio * gains, clipped * gains)
    if answers.start is not None:
        gain -= settings.kl * divergence(logprobs, answers.start)
    own = jnp.sum(answers.valid, axis=1).astype(jnp.float32)
    lengths = own if settings.advantages == "normalized" else settings.max_tokens
    return jnp.mean(jnp.sum(jnp.where(answers.valid, gain, 0.0), axis=1) / lengths)


def grpo(
    model: CausalLM,
    engine: Engine,
    tasks: Iterable[Task],
    settings: Grpo,
    *,
    sampler: Callable[[CausalLM], CausalLM] | None = None,
    report: Callable[[Point, CausalLM], None] = lambda point, model: None,
) -> tuple[CausalLM, list[Point]]:
    """Trains a model by GRPO with Adam; returns it, and a record of each batch. Deterministic.

    `engine` runs a model of the same structure; its weights are replaced before each batch (`Engine.update`), and it
    keeps the last ones. Answers are drawn at temperature 1, from the distribution whose log-probabilities `score`
    gives. Every floating array is trained, in its dtype (load it in float32, where small updates do not round away), or
    of a model with an adapter (`with_adapter`) the adapter alone.

    `sampler` makes the weights that the engine samples with, such as rounded ones. Then p_old is *theirs*, and the
    training is off-policy from the first step. Without it ρ is exactly 1 there; AssertionError says so if not.

    `report` gets the record of each batch, and the model after it. Raises ValueError if `tasks` runs out, if an answer
    ends in an error and if a reward is not finite; FloatingPointError if a gradient is not.
    """
    start, stream, points, begin = model, iter(tasks), [], (time.monotonic(), time.process_time())
    weights, fixed = eqx.partition(model, _trained(model))
    state = TrainState.first(weights, adam(settings.learning_rate, settings.gradient_norm))
    how = {"settings": engine.settings, "execution": engine.loop.runner.execution}
    with progress("learning (the first step compiles)", settings.steps) as advance:
        for step in range(settings.steps):
            some = list(itertools.islice(stream, settings.questions))
            if len(some) < settings.questions:
                raise ValueError(f"the tasks ran out after {step} of {settings.steps} batches")
            engine.update(model if sampler is None else sampler(model))
            sequences, rewards, old = _sampled(engine, some, settings, step)
            scores = functools.partial(score, sequences=sequences, **how)
            gains = jnp.asarray(advantages(rewards, settings.advantages).reshape(-1), jnp.float32)
            valid = jnp.arange(old.shape[1])[None] < jnp.asarray([[len(tokens)] for _, tokens in sequences])
            answers = Answers(gains, old, scores(start) if settings.kl else None, valid)
            found: list[Array] = []  # the policy's log-probabilities before each update
            for _ in range(settings.inner):
                logprobs, gradient = _gradient(scores, state.trained, fixed, answers, settings)
                assert found or sampler is not None or jnp.array_equal(logprobs, old), "the engine reported other bits"
                found.append(logprobs)
                state = _updated(gradient, state)
            model = eqx.combine(state.trained, fixed)
            points.append(_point(step, points, rewards, answers, found, begin))
            advance(1, f"learning, reward {points[-1].reward:.3f}")
            report(points[-1], model)
    return model, points


def _sampled(
    engine: Engine, tasks: Sequence[Task], settings: Grpo, step: int
) -> tuple[list[Any], Float64[np.ndarray, "questions group"], Float32[Array, "answers tokens"]]:
    """Pairs of a prompt's and an answer's ids, question by question; rewards; and the reported log-probabilities."""
    first, count = settings.seed + step * settings.questions * settings.group, settings.group
    common = {"temperature": 1.0, "max_tokens": settings.max_tokens, "logprobs": 0, "n": count}
    params = [SamplingParams(seed=first + i * count, **common) for i in range(len(tasks))]
    outputs = engine.generate([task.prompt for task in tasks], params)
    answers = [(output.prompt_token_ids, one) for output in outputs for one in output.outputs]
    if failed := [one.error for _, one in answers if one.error is not None]:
        raise ValueError(f"an answer ended in an error: {failed[0]}")
    pairs = zip(tasks, outputs, strict=True)
    rewards = np.asarray([[float(task.check(one)) for one in output.outputs] for task, output in pairs])
    if not np.isfinite(rewards).all():
        raise ValueError(f"the checkers gave rewards that are not finite: {rewards.tolist()}")
    old = np.zeros((len(answers), max(len(one.token_ids) for _, one in answers)), np.float32)
    for row, (_, one) in zip(old, answers, strict=True):
        row[: len(one.token_ids)] = [each.logprob for each in one.logprobs or ()]
    return [(prompt, one.token_ids) for prompt, one in answers], rewards, jnp.asarray(old)


def _gradient(
    scores: Callable[[CausalLM], Array], weights: PyTree, fixed: PyTree, answers: Answers, settings: Grpo
) -> tuple[Float32[Array, "answers tokens"], PyTree]:
    """The log-probabilities by the model, and the gradient of minus the objective."""

    def loss(weights: PyTree) -> tuple[Array, Array]:
        logprobs = scores(eqx.combine(weights, fixed))
        return -objective(logprobs, answers, settings), logprobs

    (_, logprobs), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(weights)
    if not all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(gradient)):
        raise FloatingPointError("the gradient is not finite: lower the learning rate")
    return logprobs, gradient


def _point(
    step: int,
    before: Sequence[Point],
    rewards: Float64[np.ndarray, "questions group"],
    answers: Answers,
    found: Sequence[Array],
    begin: tuple[float, float],
) -> Point:
    """The record of a batch, of whose inner steps `found` has the log-probabilities."""
    valid, count = answers.valid, int(answers.valid.sum())
    kl = math.nan if answers.start is None else float(jnp.mean(divergence(found[0], answers.start)[valid]))
    first, last = (float(jnp.max(jnp.abs(jnp.expm1(logs - answers.old)))) for logs in (found[0], found[-1]))
    entropy, tokens = -float(jnp.mean(answers.old[valid])), count + sum(point.tokens for point in before[-1:])
    seconds, spent = round(time.monotonic() - begin[0], 2), round(time.process_time() - begin[1], 2)
    return Point(step, float(rewards.mean()), kl, entropy, first, last, count / rewards.size, tokens, seconds, spent)


def _trained(model: CausalLM) -> PyTree:
    """True for each leaf that is trained: those of the adapter if there is one, else every floating array."""
    if not (adapted := _adapted(model)):
        return jax.tree.map(eqx.is_inexact_array, model)
    fixed = jax.tree.map(lambda _: False, model)
    return eqx.tree_at(_adapted, fixed, [True] * len(adapted))


def _adapted(model: PyTree) -> list[Any]:
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, AdaptedMatrix))
    return [array for node in nodes if isinstance(node, AdaptedMatrix) for array in (node.lora_A, node.lora_B)]
