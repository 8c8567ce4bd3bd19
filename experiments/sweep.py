"""One run: a variant trained from scratch at a learning rate with a seed, measured on held-out examples."""

import dataclasses
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree, Scalar

import ling3
from experiments.design import Experiment
from experiments.tasks import Task
from ling3.train import balanced, plain
from ling3.train.balance import expert_biases

HELD_OUT = 2**31
"""The seed of held-out examples; no run is trained with it."""


class Batches(eqx.Module):
    """The examples of consecutive steps, stacked."""

    tokens: Int[Array, "steps batch seq"]
    targets: Int[Array, "steps batch seq"]
    mask: Bool[Array, "steps batch seq"]


FINAL = 8
"""The final measurement has this many times the rows of a point."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A measurement on held-out examples: the mean loss in nats, and the share of wrong answers.

    Both are over the places where an answer is expected; for a mixture they are the means over its `parts`.
    """

    step: int
    loss: float
    error: float
    parts: dict[str, "Point"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run, as it is stored."""

    task: str
    variant: str
    learning_rate: float
    seed: int
    steps: int
    rows: int
    layers: int
    parameters: int
    seconds: float
    steps_to_90: int | None  # the first point with at most a tenth of the answers wrong
    curve: tuple[Point, ...]
    final: Point | None  # the last point again, on FINAL times as many other rows; only of reported runs


# The updates are multiplied by the learning rate afterwards, so that one program serves all rates.
_ADAM = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.scale_by_adam(b1=0.9, b2=0.98),
    optax.add_decayed_weights(0.01, mask=lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
)

BIAS_RATE = 1e-3
"""The change of a router's biases in a step, towards balanced loads."""


def schedule(peak: float, warmup: int, steps: int) -> Float[np.ndarray, " steps"]:
    """The learning rate of each step: a linear warm-up to `peak`, then a cosine decay to 0."""
    step = np.arange(1, steps + 1)
    falling = 0.5 * (1.0 + np.cos(np.pi * (step - warmup) / (steps + 1 - warmup)))
    return (peak * np.where(step <= warmup, step / warmup, falling)).astype(np.float32)


def stream(task: Task, seed: int, steps: range, rows: int) -> Batches:
    """The batches of these steps, the same for every variant trained with `seed`."""
    drawn = [task.batch(seed, step, rows) for step in steps]

    def stacked(name: str) -> Array:
        return jnp.asarray(np.stack([getattr(batch, name) for batch in drawn]))

    return Batches(stacked("tokens"), stacked("targets"), stacked("mask"))


def answer_loss(
    model: ling3.CausalLM,
    tokens: Int[Array, "batch seq"],
    targets: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
) -> tuple[Float[Scalar, ""], Float[Scalar, ""]]:
    """The mean of -log p(target) in nats and the share of wrong answers, over the places where one is expected."""
    logits = model(tokens)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    wrong = jnp.argmax(logits, axis=-1) != targets
    asked = jnp.sum(mask, dtype=jnp.float32)
    return jnp.sum(jnp.where(mask, losses, 0.0)) / asked, jnp.sum(mask & wrong, dtype=jnp.float32) / asked


@eqx.filter_jit
def _descend(
    model: ling3.CausalLM, state: PyTree, batches: Batches, rates: Float[Array, " steps"]
) -> tuple[ling3.CausalLM, PyTree]:
    """Trains one step on each of `batches`. If experts have biases, `model` must be `balanced`."""
    weights, rest = eqx.partition(model, eqx.is_inexact_array)

    def step(carry, xs):
        weights, state = carry
        batch, rate = xs
        gradient, _ = jax.grad(lambda w: answer_loss(eqx.combine(w, rest), *batch), has_aux=True)(weights)
        loads = expert_biases(gradient)
        if loads:
            gradient = eqx.tree_at(expert_biases, gradient, [jnp.zeros_like(load) for load in loads])
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # what optax is written for
            updates, state = _ADAM.update(gradient, state, weights)
        weights = jax.tree.map(lambda w, u: w - rate * u, weights, updates)
        if loads:
            biases = [bias - BIAS_RATE * jnp.sign(load) for bias, load in zip(expert_biases(weights), loads)]
            weights = eqx.tree_at(expert_biases, weights, biases)
        return (weights, state), None

    xs = ((batches.tokens, batches.targets, batches.mask), rates)
    (weights, state), _ = lax.scan(step, (weights, state), xs)
    return eqx.combine(weights, rest), state


_answer_loss = eqx.filter_jit(answer_loss)


def _unseen(experiment: Experiment, steps: range) -> dict[str, Batches]:
    """Held-out batches of the task, or of each of its parts."""
    parts = experiment.task.parts or (experiment.task,)
    return {part.name: stream(part, HELD_OUT, steps, experiment.held_out) for part in parts}


def _measured(model: ling3.CausalLM, unseen: dict[str, Batches], step: int) -> Point:
    def point(values: Float[np.ndarray, " 2"], **parts: Point) -> Point:
        loss, error = values
        return Point(step, round(float(loss), 7), round(float(error), 7), parts)

    means = {}
    for name, part in unseen.items():
        batches = zip(part.tokens, part.targets, part.mask, strict=True)
        means[name] = np.mean([[float(x) for x in _answer_loss(model, *batch)] for batch in batches], axis=0)
    parts = {name: point(mean) for name, mean in means.items()} if len(means) > 1 else {}
    return point(np.mean(list(means.values()), axis=0), **parts)


def training(
    experiment: Experiment, variant: str, learning_rate: float, seed: int
) -> Iterator[tuple[ling3.CausalLM, Point]]:
    """Trains `variant` from scratch, and yields the model and its measurement `experiment.points` times, evenly.

    The seed determines the initial weights and the stream; equal arguments give equal bits. A program is compiled once
    per variant. Raises FloatingPointError if a measured loss is not finite.
    """
    task, steps, every = experiment.task, experiment.steps, experiment.steps // experiment.points
    model = balanced(experiment.model(variant, jax.random.key(seed)))
    state = _ADAM.init(eqx.filter(model, eqx.is_inexact_array))
    rates = jnp.asarray(schedule(learning_rate, experiment.warmup, steps))
    unseen = _unseen(experiment, range(1))
    for first in range(0, steps, every):
        batches = stream(task, seed, range(first, first + every), experiment.rows)
        model, state = _descend(model, state, batches, rates[first : first + every])
        point = _measured(model, unseen, first + every)
        if not math.isfinite(point.loss):
            raise FloatingPointError(
                f"{task.name}, {variant}: the loss is {point.loss} by step {point.step} at the learning rate "
                f"{learning_rate:g}: lower it"
            )
        yield plain(model), point


def run(experiment: Experiment, variant: str, learning_rate: float, seed: int) -> Run:
    """Runs `training` to its end and returns the record."""
    begin = time.perf_counter()
    models, curve = zip(*training(experiment, variant, learning_rate, seed), strict=True)
    final = None
    if seed != experiment.sweep_seed:
        # On other rows than the points, so that the choice of the reported learning rate does not depend on them.
        final = _measured(models[-1], _unseen(experiment, range(1, 1 + FINAL)), experiment.steps)
    return Run(
        task=experiment.task.name,
        variant=variant,
        learning_rate=learning_rate,
        seed=seed,
        steps=experiment.steps,
        rows=experiment.rows,
        layers=experiment.layers,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(models[-1], eqx.is_inexact_array))),
        seconds=round(time.perf_counter() - begin, 1),
        steps_to_90=next((point.step for point in curve if point.error <= 0.1), None),
        curve=curve,
        final=final,
    )


def read(file: Path) -> list[Run]:
    """The stored runs of a task, in the order they were made; empty if there is no such file."""
    if not file.exists():
        return []
    names, runs = {field.name for field in dataclasses.fields(Run)}, []
    for line in file.read_text(encoding="utf-8").splitlines():
        values: dict[str, Any] = {name: value for name, value in json.loads(line).items() if name in names}
        values["curve"] = tuple(_point(point) for point in values["curve"])
        values["final"] = None if values["final"] is None else _point(values["final"])
        runs.append(Run(**values))
    return runs


def _point(values: dict[str, Any]) -> Point:
    parts = {name: _point(part) for name, part in values.get("parts", {}).items()}
    with_parts: dict[str, Any] = values | {"parts": parts}
    return Point(**with_parts)


def best_rate(runs: Sequence[Run], experiment: Experiment, variant: str) -> float:
    """The swept learning rate with the least last measured loss. Raises ValueError if the sweep is not complete."""
    swept = [run for run in runs if (run.variant, run.seed) == (variant, experiment.sweep_seed)]
    if missing := set(experiment.rates(variant)) - {run.learning_rate for run in swept}:
        raise ValueError(f"{experiment.task.name}, {variant}: no run yet at the learning rates {sorted(missing)}")
    return min(swept, key=lambda run: run.curve[-1].loss).learning_rate
