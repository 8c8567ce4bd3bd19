"""Trains a model of any family by gradient descent: losses, optimizer, step and loop."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Int32, PyTree, Scalar

from ling3.cache import Span
from ling3.execution import Execution
from ling3.model import CausalLM
from ling3.mtp import hidden_ahead
from ling3.runtime.progress import progress
from ling3.train.balance import balanced, expert_biases, plain
from ling3.train.fsdp import DIVISIBLE, Fsdp

try:
    import optax
    import optax.contrib
except ImportError as error:
    raise ImportError("training needs optax, which is not installed: pip install 'ling3[train]'") from error


class Batch(eqx.Module):
    """Token sequences, with the weight of each token in the loss as a prediction target.

    A row with several texts has `text_starts`, the column where each token's text begins (`Span.text_starts`).
    """

    tokens: Int[Array, "batch seq"]
    weights: Float[Array, "batch seq"]  # 0: not a target; the first token of a text never is one
    text_starts: Int32[Array, "batch seq"] | None = None

    def span(self, execution: Execution) -> Span:
        """The span of all its tokens, which keeps the texts of a row apart."""
        rows, seq = self.tokens.shape
        return dataclasses.replace(Span.whole(rows, seq, execution), text_starts=self.text_starts)


@dataclasses.dataclass(frozen=True)
class Optimization:
    """The optimizer: Muon or AdamW, with a warm-up and a cosine decay to zero, and a separate rate for expert biases.

    Muon (Jordan 2024; with the update size of Adam, arXiv 2502.16982) updates the matrices inside the layers, Adam the
    rest. `weight_decay` applies to Muon's matrices, or to all matrices with AdamW; `clip` bounds the gradient's norm.
    """

    steps: int
    method: Literal["muon", "adamw"] = "muon"
    learning_rate: float = 6e-3
    warmup: int = 100
    weight_decay: float = 0.1
    clip: float = 1.0
    b2: float = 0.98
    bias_rate: float = 1e-3
    part: Literal["decoder", "mtp", "all"] = "decoder"
    """The trained part: the decoder, the model's only multi-token-prediction layer with `mtp_loss`, or both."""

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"warmup must be at least 0 and less than steps ({self.steps}), got {self.warmup}")

    def schedule(self) -> optax.Schedule:
        """The learning rate as a function of the step."""
        return optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, self.warmup, self.steps)

    def descent(self) -> optax.GradientTransformation:
        """Clips the gradient and applies `method` to weights."""
        rate, decay = self.schedule(), self.weight_decay
        if self.method == "muon":
            descent = optax.contrib.muon(
                rate,
                weight_decay=decay,
                adam_b2=self.b2,
                muon_weight_dimension_numbers=_inner_matrices,
                consistent_rms=0.2,
            )
        else:
            descent = optax.adamw(
                rate, b2=self.b2, weight_decay=decay, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
            )
        return optax.chain(optax.clip_by_global_norm(self.clip), descent)

    def transformation(self, model: CausalLM) -> optax.GradientTransformation:
        """Applies `descent` to weights, and sign descent to expert biases, whose gradient is a load (see `balance`).

        With `part` "decoder" the multi-token-prediction layers stay as they are, with "mtp" all else.
        """
        labels = eqx.tree_at(
            expert_biases,
            jax.tree.map(lambda _: "weight", eqx.filter(model, eqx.is_inexact_array)),
            replace_fn=lambda _: "expert_bias",
        )
        if self.part != "all":
            still = jax.tree.map(lambda _: "fixed", labels)
            one, other = (labels, still) if self.part == "decoder" else (still, labels)
            labels = dataclasses.replace(one, mtp=other.mtp)
        biases, fixed = optax.sign_sgd(self.bias_rate), optax.set_to_zero()
        return optax.partition({"weight": self.descent(), "expert_bias": biases, "fixed": fixed}, lambda _: labels)


def adam(rate: float, clip: float) -> optax.GradientTransformation:
    """Adam at the same rate in each step, after clipping the gradient's norm."""
    return optax.chain(optax.clip_by_global_norm(clip), optax.adam(rate))


def _inner_matrices(weights: PyTree) -> PyTree:
    """Muon's axes [out, in] for matrices inside layers; None for embeddings, the head, convolutions and vectors."""

    def axes(path: tuple, weight: Float[Array, "..."]) -> optax.contrib.MuonDimensionNumbers | None:
        name = jax.tree_util.keystr(path)
        outer = any(part in name for part in ("word_embeddings", "lm_head", "conv1d"))
        return None if outer or weight.ndim < 2 else optax.contrib.MuonDimensionNumbers(-1, -2)

    return jax.tree_util.tree_map_with_path(axes, weights)


@dataclasses.dataclass(frozen=True)
class Progress:
    """One point of the log: `tokens` counts all tokens so far, `loss` is the mean since the previous point.

    `imbalance` is the largest |load - mean load| of any expert in the last step.
    """

    step: int
    tokens: int
    seconds: float
    loss: float
    imbalance: float


def token_losses(model: CausalLM, batch: Batch, execution: Execution | None = None) -> Float[Array, "batch rest"]:
    """-log p(token | previous tokens) in nats, for all tokens but the first of each row."""
    if batch.text_starts is None:
        logits = model(batch.tokens, execution)
    else:
        logits = model.watched(batch.tokens, batch.span(Execution.default() if execution is None else execution))
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch.tokens[:, 1:])


def next_token_loss(model: CausalLM, batch: Batch, execution: Execution | None = None) -> Float[Scalar, ""]:
    """The mean of `token_losses`, weighted by the batch's weights."""
    losses = token_losses(model, batch, execution)
    weights = batch.weights[:, 1:]
    return jnp.sum(losses * weights) / jnp.maximum(jnp.sum(weights), 1.0)


DRAFTS = 3
"""The number of tokens that a multi-token-prediction layer learns to predict in a row, each from its own state."""


def mtp_loss(model: CausalLM, batch: Batch, execution: Execution | None = None) -> Float[Scalar, ""]:
    """-log p(token t + 1 + i | tokens up to t + i) of the first multi-token-prediction layer, in nats, i = 1 to DRAFTS.

    The layer takes its own hidden states beyond i = 1, as where it drafts. It is the mean over i and tokens, weighted
    by the batch's weights; targets that another text begins with have none. The decoder, and embedding and head, have
    no gradient.
    """
    execution = Execution.default() if execution is None else execution
    fixed = jax.tree.map(lambda leaf: lax.stop_gradient(leaf) if eqx.is_inexact_array(leaf) else leaf, model)
    span, scored, losses = batch.span(execution), batch.weights, []
    for i, hidden in enumerate(hidden_ahead(fixed, batch.tokens, model.mtp[:1] * DRAFTS, span), 2):
        logits = fixed.logits(hidden[:, :-1], execution)
        own = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens[:, i:])
        if batch.text_starts is not None:
            scored = jnp.where(span.positions(scored.shape[1]) >= i, scored, 0.0)
        weights = scored[:, i:]
        losses.append(jnp.sum(own * weights) / jnp.maximum(jnp.sum(weights), 1.0))
    return jnp.mean(jnp.stack(losses))


def both_losses(model: CausalLM, batch: Batch, execution: Execution | None = None) -> Float[Scalar, ""]:
    """The sum of `next_token_loss` and, if there is a multi-token-prediction layer, of `mtp_loss`.

    No weight stands between them, since no array has a gradient of both.
    """
    loss = next_token_loss(model, batch, execution)
    return loss + mtp_loss(model, batch, execution) if model.mtp else loss


LOSSES = {"decoder": next_token_loss, "mtp": mtp_loss, "all": both_losses}
"""The loss with which each part of a model is trained."""


Loss = Callable[..., Float[Scalar, ""]]
"""The loss of the trained arrays on a batch, and by an `Execution` if one is given: a function or a module."""


def loss_of(trained: Any, batch: Batch, fsdp: Fsdp | None = None, loss: Loss = next_token_loss) -> Float[Scalar, ""]:
    """The loss on a batch; with `fsdp`, call it inside jit on a sharded model and batch."""
    return loss(trained, batch) if fsdp is None else loss(fsdp.gathering(trained), batch, DIVISIBLE)


def loss_and_gradient(
    trained: Any, batch: Batch, fsdp: Fsdp | None = None, loss: Loss = next_token_loss
) -> tuple[Float[Scalar, ""], PyTree]:
    """The loss on a batch and its gradient, as `loss_of` takes them."""
    found, gradient = eqx.filter_value_and_grad(loss_of)(trained, batch, fsdp, loss)
    return found, gradient if fsdp is None else fsdp.settled(gradient)


class TrainState(eqx.Module):
    """Arrays that are trained and what their optimizer keeps of past gradients; with `fsdp` both are sharded."""

    trained: Any
    moments: PyTree
    optimizer: optax.GradientTransformation = eqx.field(static=True)
    fsdp: Fsdp | None = eqx.field(static=True)

    @classmethod
    def first(cls, trained: Any, optimizer: optax.GradientTransformation, fsdp: Fsdp | None = None) -> "TrainState":
        """The state before the first step."""
        init = optimizer.init if fsdp is None else eqx.filter_jit(lambda tree: fsdp.settled(optimizer.init(tree)))
        return cls(trained, init(eqx.filter(trained, eqx.is_inexact_array)), optimizer, fsdp)

    @classmethod
    def of_weights(cls, model: CausalLM, optimization: Optimization, fsdp: Fsdp | None = None) -> "TrainState":
        """The state of a copy of all weights, which its steps donate; the routers are balanced."""
        trained = balanced(jax.tree.map(lambda leaf: leaf.copy(), model) if fsdp is None else fsdp.place(model))
        return cls.first(trained, optimization.transformation(trained), fsdp)

    def model(self, origin: CausalLM) -> CausalLM:
        """The model with all trained weights; a compiled step may be one of another model than its `origin`."""
        return dataclasses.replace(plain(self.trained), origin=origin.origin)

    def zeros(self) -> PyTree:
        """A gradient of the trained arrays that is all zeros."""
        return jax.tree.map(jnp.zeros_like, eqx.filter(self.trained, eqx.is_inexact_array))

    def rows(self, batch: Batch) -> Batch:
        """The batch, whose rows are sharded if the trained arrays are."""
        return batch if self.fsdp is None else self.fsdp.rows(batch)


def accumulate(
    given: tuple[Loss, TrainState, Batch], sums: tuple[Float[Scalar, ""], PyTree]
) -> tuple[Float[Scalar, ""], PyTree]:
    """The sums of losses and gradients, with those of one more batch."""
    loss, state, batch = given
    return jax.tree.map(jnp.add, sums, loss_and_gradient(state.trained, batch, state.fsdp, loss))


def update(gradient: PyTree, state: TrainState) -> TrainState:
    """The state after a step with a gradient."""
    weights = eqx.filter(state.trained, eqx.is_inexact_array)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax assumes both
        updates, moments = state.optimizer.update(gradient, state.moments, weights)
    updated = dataclasses.replace(state, trained=eqx.apply_updates(state.trained, updates), moments=moments)
    return updated if state.fsdp is None else state.fsdp.settled(updated)


_accumulated = eqx.filter_jit(accumulate, donate="all-except-first")
_updated = eqx.filter_jit(update, donate="all-except-first")


def descend(
    state: TrainState,
    objective: Callable[[int], tuple[Loss, Sequence[Batch]]],
    steps: range,
    report: Callable[[int, float, TrainState, PyTree], None],
    *,
    title: str,
    every: int = 1,
) -> TrainState:
    """Trains for some steps, counted from 1, by gradient descent; deterministic. On a terminal, a bar shows them.

    The loss of a step is the sum of those of its micro-batches: `objective` gives both for a step. `report` is called
    every `every` steps and after the last, with the step, the mean loss since the previous report, the state, whose
    buffers the next step donates, and the gradient. Each new shape of a batch compiles a pass. Raises
    FloatingPointError if the loss is not finite at a report.
    """
    losses, last = [], steps.stop - 1
    with progress(f"{title} (the first step compiles)", last) as advance:
        advance(steps.start - 1)
        for step in steps:
            (loss, batches), sums = objective(step), (jnp.zeros((), jnp.float32), state.zeros())
            for batch in batches:
                sums = _accumulated((loss, state, state.rows(batch)), sums)
            state = _updated(sums[1], state)
            losses.append(sums[0])
            if step % every == 0 or step == last:
                mean = float(jnp.mean(jnp.stack(losses)))
                if not math.isfinite(mean):
                    raise FloatingPointError(f"the loss is {mean} by step {step}: lower the learning rate")
                advance(len(losses), f"{title}, loss {mean:.4f}")
                losses.clear()
                report(step, mean, state, sums[1])
    return state


def train(
    model: CausalLM,
    batches: Iterable[Batch],
    optimization: Optimization,
    *,
    every: int = 20,
    report: Callable[[Progress, CausalLM], None] = lambda progress, model: None,
    mesh: Mesh | None = None,
) -> CausalLM:
    """Trains a copy of `model`, in the model's dtype, for `optimization.steps` batches; deterministic.

    With a `mesh`, weights, optimizer state and the rows of each batch are sharded along its axis `data` (see `fsdp`).
    The result is sharded too; `save` and `ling3.mesh.place` accept it.

    `report` is called every `every` steps and after the last, with a `Progress` and the current model, whose buffers
    the next step donates. Raises ValueError if `batches` runs out, the devices do not divide the rows of one, or the
    part "mtp" is not one layer, and FloatingPointError if the loss is not finite at a report.
    """
    if optimization.part == "mtp" and len(model.mtp) != 1:
        raise ValueError(
            f"part is 'mtp', and the model has {len(model.mtp)} multi-token-prediction layers, expected 1: load or "
            "initialize it with mtp=True"
        )
    stream, tokens, start, last = iter(batches), 0, time.monotonic(), optimization.steps

    def objective(step: int) -> tuple[Loss, list[Batch]]:
        nonlocal tokens
        batch = next(stream, None)
        if batch is None:
            raise ValueError(f"the batches ran out after {step - 1} of {last} steps")
        tokens += batch.tokens.size
        return LOSSES[optimization.part], [batch]

    def reported(step: int, loss: float, state: TrainState, gradient: PyTree) -> None:
        imbalance = max((float(jnp.max(jnp.abs(load))) for load in expert_biases(gradient)), default=0.0)
        report(Progress(step, tokens, time.monotonic() - start, loss, imbalance), plain(state.trained))

    state = TrainState.of_weights(model, optimization, None if mesh is None else Fsdp(mesh))
    state = descend(state, objective, range(1, last + 1), reported, title="training", every=every)
    return state.model(model)
