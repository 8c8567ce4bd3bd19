"""GRPO: a policy learns from the rewards of its own answers, which the engine samples.

Group Relative Policy Optimization is that of DeepSeekMath (arXiv 2402.03300, §4.1); `"unbiased"` is Dr. GRPO
(arXiv 2503.20783, §3). A batch is G answers o to each of some questions, with rewards r. For token t of an answer,

    Â = (r - mean r) / std r                       over the G answers to a question; unbiased: r - mean r
    ρ = p(o_t) / p_old(o_t)                        p_old: as sampled
    k3 = p_ref / p - log(p_ref / p) - 1            p_ref: the model at the start; its mean is the KL divergence
    gain = min(ρ Â, clip(ρ, 1 - ε, 1 + ε) Â) - β k3

and the objective is the mean over answers of the mean gain of their tokens; unbiased: of its sum / `max_tokens`.

In most systems the sampler and the trainer round differently, so ρ is not 1 even before the first update, and what is
called on-policy is not. Here `ling3.score` has the sampler's bits: on the first step of each batch ρ is exactly 1.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, PyTree, Scalar

from ling3.adapters.adapter import scales
from ling3.engine.outputs import Completion, RequestOutput
from ling3.engine.sampling_params import SamplingParams
from ling3.layers.adapted import AdaptedMatrix
from ling3.model import CausalLM
from ling3.runtime.progress import progress
from ling3.score import score
from ling3.serve import Engine

try:
    import optax
except ImportError as error:
    raise ImportError("training needs optax, which is not installed: pip install 'ling3[train]'") from error


class Question(NamedTuple):
    """A prompt, and the checker that gives an answer its reward."""

    prompt: Any
    """A text, token ids or a chat, as `Engine.submit` takes it."""
    check: Callable[[Completion], float]


@dataclasses.dataclass(frozen=True)
class Grpo:
    """How much is sampled and how far each update goes. Raises ValueError for values out of range."""

    steps: int
    """Batches of answers, each sampled from the newest weights."""
    questions: int = 8
    """Questions in a batch."""
    group: int = 8
    """Answers to each question, G."""
    inner: int = 1
    """Updates per batch; from the second on, the batch was sampled from older weights, and the clip matters."""
    max_tokens: int = 64
    """The most tokens of an answer; one that is cut off there is checked as it is."""
    learning_rate: float = 1e-4
    weight_decay: float = 0.0
    gradient_norm: float = 1.0
    """The largest norm of a gradient; larger ones are scaled down."""
    clip: float = 0.2
    """ε."""
    kl: float = 0.04
    """β; 0 skips the start model's log-probabilities, and the KL divergence is then not recorded (NaN)."""
    advantages: Literal["normalized", "unbiased"] = "normalized"
    """Whether advantages and the mean over tokens are GRPO's or Dr. GRPO's."""
    seed: int = 0
    """Of the answers: completion g to question q of batch s has the seed `seed + (s · questions + q) · group + g`."""

    def __post_init__(self) -> None:
        least = {"steps": 1, "questions": 1, "group": 2, "inner": 1, "max_tokens": 1, "clip": 0, "kl": 0}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least {smallest}")


@dataclasses.dataclass(frozen=True)
class Point:
    """The record of one batch. Means are over answers (reward) or over their tokens."""

    step: int
    reward: float
    """The mean reward of the batch, which was sampled before the update."""
    kl: float
    """The mean of k3 in nats: an estimate of KL(policy, start) per token, before the update."""
    entropy: float
    """The mean of -log p of the sampled tokens in nats: an estimate of the policy's entropy per token."""
    deviation: float
    """The largest |ρ - 1| before the batch's first update: 0 if the sampler runs the policy's weights."""
    drift: float
    """The largest |ρ - 1| in the batch's last inner step."""
    length: float
    """The mean number of tokens of an answer."""
    tokens: int
    """Tokens sampled so far."""
    seconds: float
    """Seconds so far."""
    processor_seconds: float
    """Seconds of processor time so far, of all cores together."""


class Answers(eqx.Module):
    """What the objective needs to know of a batch, but for the policy's log-probabilities."""

    advantages: Float32[Array, " answers"]
    old: Float32[Array, "answers tokens"]
    """Log-probabilities when they were sampled."""
    start: Float32[Array, "answers tokens"] | None
    """Log-probabilities by the model at the start; None for no penalty."""
    valid: Bool[Array, "answers tokens"]


def advantages(
    rewards: Float64[np.ndarray, "questions group"], kind: Literal["normalized", "unbiased"] = "normalized"
) -> Float64[np.ndarray, "questions group"]:
    """Each answer's reward minus its group's mean, divided by the group's standard deviation (+ 1e-6) if normalized."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return centred if kind == "unbiased" else centred / (rewards.std(axis=1, keepdims=True) + 1e-6)


def divergence(
    logprobs: Float32[Array, "answers tokens"], start: Float32[Array, "answers tokens"]
) -> Float32[Array, "answers tokens"]:
    """k3 = p_start / p - log(p_start / p) - 1 ≥ 0 of each token (Schulman 2020, http://joschu.net/blog/kl-approx.html).

    Its mean over tokens drawn from p is KL(p, p_start).
    """
    return jnp.expm1(start - logprobs) - (start - logprobs)


def objective(logprobs: Float32[Array, "answers tokens"], answers: Answers, settings: Grpo) -> Float[Scalar, ""]:
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
    questions: Iterable[Question],
    settings: Grpo,
    *,
    sampler: Callable[[CausalLM], CausalLM] | None = None,
    report: Callable[[Point, CausalLM], None] = lambda point, model: None,
) -> tuple[CausalLM, list[Point]]:
    """Trains a model by GRPO with AdamW; returns it, and a record of each batch. Deterministic.

    `engine` is one of a model of the same structure; its weights are replaced before each batch (`Engine.update`), and
    it keeps the last ones. Answers are drawn at temperature 1, from the distribution whose log-probabilities `score`
    gives. Every floating array is trained, in its dtype (load it in float32, where small updates do not round away), or
    of a model with an adapter (`with_adapter`) the adapter alone.

    `sampler` makes the weights that the engine samples with, such as rounded ones. Then ρ is the ratio to *their*
    log-probabilities, and the training is off-policy from the first step. Without it ρ is exactly 1 there, and
    AssertionError says so if not.

    `report` gets the record of each batch, and the model after it. Raises ValueError if `questions` runs out, if an
    answer ended in an error and if a reward is not finite; FloatingPointError if the objective's gradient is not.
    """
    policy = _Policy.of(model, settings)
    stream, points, tokens, clock = iter(questions), [], 0, (time.monotonic(), time.process_time())
    with progress("learning (the first step compiles)", settings.steps) as advance:
        for step in range(settings.steps):
            asked = list(itertools.islice(stream, settings.questions))
            if len(asked) < settings.questions:
                raise ValueError(f"the questions ran out after {step} of {settings.steps} batches")
            engine.update(policy.model if sampler is None else sampler(policy.model))
            batch = _Batch.sampled(engine, asked, settings, step)
            policy, deviation, drift, kl = policy.updated(batch, model, settings, exact=sampler is None)
            lengths = batch.valid.sum(axis=1)
            tokens += int(lengths.sum())
            entropy, now = -float(batch.logprobs[batch.valid].mean()), (time.monotonic(), time.process_time())
            seconds = [round(b - a, 2) for a, b in zip(clock, now, strict=True)]
            reward, length = float(batch.rewards.mean()), float(lengths.mean())
            points.append(Point(step, reward, kl, entropy, deviation, drift, length, tokens, *seconds))
            advance(1, f"learning, reward {reward:.3f}")
            report(points[-1], policy.model)
    return policy.model, points


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Sampled answers, question by question, with the log-probabilities that the engine reported."""

    sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
    rewards: Float64[np.ndarray, "questions group"]
    logprobs: Float32[np.ndarray, "answers tokens"]
    valid: Bool[np.ndarray, "answers tokens"]
    engine: Engine

    @staticmethod
    def sampled(engine: Engine, asked: Sequence[Question], settings: Grpo, step: int) -> "_Batch":
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=settings.max_tokens,
                logprobs=0,
                n=settings.group,
                seed=settings.seed + (step * settings.questions + i) * settings.group,
            )
            for i in range(settings.questions)
        ]
        outputs = engine.generate([question.prompt for question in asked], params)
        rewards = np.asarray([_rewards(*pair) for pair in zip(asked, outputs, strict=True)], np.float64)
        answers = [(output.prompt_token_ids, one) for output in outputs for one in output.outputs]
        shape = len(answers), max(len(one.token_ids) for _, one in answers)
        logprobs, valid = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for row, here, (_, one) in zip(logprobs, valid, answers, strict=True):
            own = [each.logprob for each in one.logprobs or ()]
            row[: len(own)], here[: len(own)] = own, True
        return _Batch([(prompt, one.token_ids) for prompt, one in answers], rewards, logprobs, valid, engine)

    def scores(self, model: CausalLM) -> Float32[Array, "answers tokens"]:
        """The log-probabilities by a model, with the engine's bits."""
        runner = self.engine.loop.runner
        return score(model, self.sequences, self.engine.settings, execution=runner.execution)


def _rewards(question: Question, output: RequestOutput) -> list[float]:
    """The rewards of all answers to a question."""
    if (error := next((one.error for one in output.outputs if one.error is not None), None)) is not None:
        raise ValueError(f"an answer ended in an error: {error}")
    rewards = [float(question.check(one)) for one in output.outputs]
    if not np.isfinite(rewards).all():
        raise ValueError(f"the checker gave the rewards {rewards}, expected finite numbers")
    return rewards


class _Policy(NamedTuple):
    """The model that learns, and its optimizer."""

    model: CausalLM
    trained: PyTree
    """True for the leaves that are trained."""
    optimizer: optax.GradientTransformation
    state: PyTree

    @staticmethod
    def of(model: CausalLM, settings: Grpo) -> "_Policy":
        rate, decay = settings.learning_rate, settings.weight_decay
        optimizer = optax.chain(
            optax.clip_by_global_norm(settings.gradient_norm), optax.adamw(rate, weight_decay=decay)
        )
        trained = _trained(model)
        return _Policy(model, trained, optimizer, optimizer.init(eqx.filter(model, trained)))

    def updated(
        self, batch: _Batch, start: CausalLM, settings: Grpo, exact: bool
    ) -> tuple["_Policy", float, float, float]:
        """The policy after a batch's inner steps; the largest |ρ - 1| in the first and the last; the KL before them."""
        gains = jnp.asarray(advantages(batch.rewards, settings.advantages).reshape(-1), jnp.float32)
        reference = batch.scores(start) if settings.kl else None
        answers = Answers(gains, jnp.asarray(batch.logprobs), reference, jnp.asarray(batch.valid))
        policy, found, kl = self, [], float("nan")
        for inner in range(settings.inner):
            weights, fixed = eqx.partition(policy.model, self.trained)

            def loss(
                weights: PyTree, fixed: PyTree = fixed
            ) -> tuple[Float[Scalar, ""], Float32[Array, "answers tokens"]]:
                logprobs = batch.scores(eqx.combine(weights, fixed))
                return -objective(logprobs, answers, settings), logprobs

            (_, logprobs), gradient = eqx.filter_value_and_grad(loss, has_aux=True)(weights)
            if inner == 0:
                same = np.array_equal(logprobs, batch.logprobs)
                assert same or not exact, "the policy's log-probabilities are not those of its sampler"
                if reference is not None:
                    kl = float(jnp.mean(divergence(logprobs, reference)[answers.valid]))
            found.append(float(jnp.max(jnp.abs(jnp.exp(logprobs - answers.old) - 1.0))))
            model, state, norm = _stepped(self.optimizer, weights, policy.state, gradient)
            if not jnp.isfinite(norm):
                raise FloatingPointError(f"the gradient's norm is {norm}: lower the learning rate, or the rewards")
            policy = policy._replace(model=eqx.combine(model, fixed), state=state)
        return policy, found[0], found[-1], kl


@eqx.filter_jit
def _stepped(
    optimizer: optax.GradientTransformation, weights: PyTree, state: PyTree, gradient: PyTree
) -> tuple[PyTree, PyTree, Float[Scalar, ""]]:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax assumes both
        updates, state = optimizer.update(gradient, state, weights)
        return eqx.apply_updates(weights, updates), state, optax.tree.norm(gradient)


def _trained(model: CausalLM) -> PyTree:
    """True for each leaf that is trained: those of the adapter if there is one, else every floating array."""
    if not scales(model):
        return jax.tree.map(eqx.is_inexact_array, model)

    def of_adapter(node: Any) -> PyTree:
        fixed = jax.tree.map(lambda _: False, node)
        if not isinstance(node, AdaptedMatrix):
            return fixed
        return eqx.tree_at(lambda matrix: (matrix.lora_A, matrix.lora_B), fixed, (True, True))

    return jax.tree.map(of_adapter, model, is_leaf=lambda node: isinstance(node, AdaptedMatrix))
