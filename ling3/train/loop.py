"""Trains a model of any family on a stream of token batches: loss, optimizer, step and loop."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Literal

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


LOSSES: dict[str, Callable[..., Float[Scalar, ""]]] = {
    "decoder": next_token_loss,
    "mtp": mtp_loss,
    "all": both_losses,
}
"""The loss with which each part of a model is trained."""


def loss_and_gradient(
    model: CausalLM, batch: Batch, fsdp: Fsdp | None = None, part: str = "decoder"
) -> tuple[Float[Scalar, ""], PyTree]:
    """The part's loss and its gradient; with `fsdp`, call it inside jit on a sharded model and batch."""
    loss_of = LOSSES[part]
    if fsdp is None:
        return eqx.filter_value_and_grad(loss_of)(model, batch)

    def on_mesh(model: CausalLM) -> Float[Scalar, ""]:
        return loss_of(fsdp.gathering(model), batch, DIVISIBLE)

    loss, gradient = eqx.filter_value_and_grad(on_mesh)(model)
    return loss, fsdp.settled(gradient)


@eqx.filter_jit(donate="all-except-first")
def _step(
    fixed: tuple[optax.GradientTransformation, Batch, Fsdp | None, str], model: CausalLM, state: PyTree
) -> tuple[CausalLM, PyTree, Float[Scalar, ""], Float[Scalar, ""]]:
    optimizer, batch, fsdp, part = fixed
    loss, gradient = loss_and_gradient(model, batch, fsdp, part)
    loads = [jnp.max(jnp.abs(load)) for load in expert_biases(gradient)]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax assumes both
        updates, state = optimizer.update(gradient, state, eqx.filter(model, eqx.is_inexact_array))
    imbalance = jnp.max(jnp.stack(loads)) if loads else jnp.zeros(())
    model = eqx.apply_updates(model, updates)
    if fsdp is not None:
        model, state = fsdp.settled((model, state))
    return model, state, loss, imbalance


def first_state(optimizer: optax.GradientTransformation, model: PyTree, fsdp: Fsdp | None = None) -> PyTree:
    """The optimizer's state before the first step; with `fsdp` it is sharded from the start."""
    weights = eqx.filter(model, eqx.is_inexact_array)
    if fsdp is None:
        return optimizer.init(weights)
    return eqx.filter_jit(lambda weights: fsdp.settled(optimizer.init(weights)))(weights)


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

    On a terminal a bar shows the steps and the loss. `report` is called every `every` steps and after the last, with a
    `Progress` and the current model, whose buffers the next step donates. Each new batch shape compiles a step.
    Raises ValueError if `batches` runs out, the devices do not divide the rows of one, or the part "mtp" is not one
    layer, and FloatingPointError if the loss is not finite at a report.
    """
    if optimization.part == "mtp" and len(model.mtp) != 1:
        raise ValueError(
            f"part is 'mtp', and the model has {len(model.mtp)} multi-token-prediction layers, expected 1: load or "
            "initialize it with mtp=True"
        )
    fsdp, origin = None if mesh is None else Fsdp(mesh), model.origin
    # A copy, because the steps donate their arguments.
    model = balanced(jax.tree.map(lambda leaf: leaf.copy(), model) if fsdp is None else fsdp.place(model))
    optimizer = optimization.transformation(model)
    state = first_state(optimizer, model, fsdp)
    stream, losses, tokens, start, imbalance = iter(batches), [], 0, time.monotonic(), jnp.zeros(())
    with progress("training (the first step compiles)", optimization.steps) as advance:
        for step in range(1, optimization.steps + 1):
            batch = next(stream, None)
            if batch is None:
                raise ValueError(f"the batches ran out after {step - 1} of {optimization.steps} steps")
            batch = batch if fsdp is None else fsdp.rows(batch)
            model, state, loss, imbalance = _step((optimizer, batch, fsdp, optimization.part), model, state)
            losses.append(loss)
            tokens += batch.tokens.size
            if step % every == 0 or step == optimization.steps:
                mean = float(jnp.mean(jnp.stack(losses)))
                if not jnp.isfinite(mean):
                    raise FloatingPointError(f"the loss is {mean} by step {step}: lower the learning rate")
                advance(len(losses), f"training, loss {mean:.4f}")
                losses.clear()
                report(Progress(step, tokens, time.monotonic() - start, mean, float(imbalance)), plain(model))
    return dataclasses.replace(plain(model), origin=origin)  # a compiled step may be one of another model
