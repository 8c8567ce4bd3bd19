"""The loss of fine-tuning, with as little memory as a layer: activations are recomputed, and logits exist in parts."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PyTree, Scalar

from ling3.cache import Span, State
from ling3.execution import Execution
from ling3.layers.linear import Matrix
from ling3.model import CausalLM, DecoderLayer, Mixer
from ling3.train.loop import Batch

LOGITS = 2**25
"""About how many logits exist at once: 0.13 GB in float32."""


class Recomputed(eqx.Module):
    """A layer that keeps only its input for the backward pass, which runs the layer again (arXiv 1604.06174)."""

    layer: DecoderLayer

    @property
    def attention(self) -> Mixer | None:
        """The attention of the layer that is recomputed."""
        return self.layer.attention

    def __call__(
        self, x: Float[Array, "batch seq *streams hidden"], state: State | None, span: Span
    ) -> tuple[Float[Array, "batch seq *streams hidden"], State | None]:
        """The layer's output. Raises ValueError for a state: layers are recomputed in training alone."""
        if state is not None:
            raise ValueError("the layer is recomputed in a backward pass, and takes no state; use the model itself")
        return _run((self.layer, x), span), None


@eqx.filter_custom_vjp
def _run(
    given: tuple[DecoderLayer, Float[Array, "batch seq *streams hidden"]], span: Span
) -> Float[Array, "batch seq *streams hidden"]:
    layer, x = given
    return layer(x, None, span)[0]


@_run.def_fwd
def _forward(perturbed: PyTree, given: PyTree, span: Span) -> tuple[Array, None]:
    layer, x = given
    return layer(x, None, span)[0], None


@_run.def_bwd
def _backward(residuals: None, dy: Array, perturbed: PyTree, given: PyTree, span: Span) -> PyTree:
    """The gradient, inside a branch that dy decides on, and that is always taken.

    XLA's CPU backend drops the barriers by which `jax.checkpoint` defers this work, and would recompute many layers
    before it needs them, each with its activations.
    """
    learnt, fixed = eqx.partition(given, perturbed)

    def run(learnt: PyTree) -> Array:
        layer, x = eqx.combine(learnt, fixed)
        return layer(x, None, span)[0]

    bits = lax.bitcast_convert_type(dy.reshape(-1)[0].astype(jnp.float32), jnp.uint32)
    return lax.cond(
        (bits & 1) < 2,
        lambda dy: jax.vjp(run, learnt)[1](dy)[0],
        lambda dy: jax.tree.map(jnp.zeros_like, learnt),
        dy,
    )


def recomputed(model: CausalLM) -> CausalLM:
    """The same model, whose layers are recomputed in the backward pass."""
    return eqx.tree_at(lambda m: m.model.layers, model, tuple(map(Recomputed, model.model.layers)))


def summed_loss(model: CausalLM, batch: Batch, execution: Execution | None = None) -> Float[Scalar, ""]:
    """Σ weight · -log p(token | previous tokens) in nats, over all tokens but the first of each row.

    Tokens after a row's last target change nothing in it, but routers count them in their loads, so they should be
    text. Logits exist for so many tokens at a time that there are about LOGITS of them: memory does not grow with
    tokens times vocabulary.
    """
    execution = Execution.default() if execution is None else execution
    rows, seq = batch.tokens.shape
    hidden, _ = model.model(batch.tokens, (None,) * len(model.model.attentions), batch.span(execution))
    targets, weights = jnp.roll(batch.tokens, -1, axis=1), jnp.roll(batch.weights, -1, axis=1)
    weights = weights.at[:, -1].set(0.0)
    vocab, width = model.config.vocab_size, logits_at_once(model, batch) // rows

    def parts(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(rows, seq // width, width, *x.shape[2:]), 1, 0)

    return _summed((model.head, parts(hidden)), parts(targets), parts(weights), execution, vocab)


def logits_at_once(model: CausalLM, batch: Batch) -> int:
    """The number of the batch's tokens whose logits exist at once in `summed_loss`, which divides all of them."""
    rows, seq = batch.tokens.shape
    width = max(1, LOGITS // (model.config.vocab_size * rows))
    return rows * math.gcd(seq, 1 << (width.bit_length() - 1))


@eqx.filter_custom_vjp
def _summed(
    given: tuple[Matrix, Float[Array, "parts batch seq hidden"]],
    targets: Int[Array, "parts batch seq"],
    weights: Float[Array, "parts batch seq"],
    execution: Execution,
    vocab: int,
) -> Float[Scalar, ""]:
    """The summed loss of the parts, one after another."""
    head, hidden = given

    def of_part(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        own, *known = part
        return total + _cross_entropy(head(own, execution, jnp.float32)[..., :vocab], *known)[0], None

    return lax.scan(of_part, jnp.zeros((), jnp.float32), (hidden, targets, weights))[0]


@_summed.def_fwd
def _with_gradient(
    perturbed: PyTree, given: PyTree, targets: Array, weights: Array, execution: Execution, vocab: int
) -> tuple[Array, PyTree]:
    """The loss and its gradient at once: since the loss is a sum, no part's logits are needed again."""
    head, hidden = given
    learnt, fixed = eqx.partition(head, perturbed[0])

    def of_part(sums: tuple[Array, PyTree], part: tuple[Array, Array, Array]) -> tuple[tuple[Array, PyTree], Array]:
        def logits(learnt: PyTree, own: Array) -> Array:
            return eqx.combine(learnt, fixed)(own, execution, jnp.float32)[..., :vocab]

        own, *known = part
        found, pullback = jax.vjp(logits, learnt, own)
        loss, dlogits = _cross_entropy(found, *known)
        dlearnt, dhidden = pullback(dlogits)
        return jax.tree.map(jnp.add, sums, (loss, dlearnt)), dhidden

    first = jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, learnt)
    (loss, dlearnt), dhidden = lax.scan(of_part, first, (hidden, targets, weights))
    return loss, (dlearnt, dhidden)


@_summed.def_bwd
def _scaled(gradient: PyTree, towards: Array, *_: object) -> PyTree:
    """The gradient times that of the loss."""
    return jax.tree.map(lambda own: own * towards.astype(own.dtype), gradient)


def _cross_entropy(
    logits: Float[Array, "batch seq vocab"], targets: Int[Array, "batch seq"], weights: Float[Array, "batch seq"]
) -> tuple[Float[Scalar, ""], Float[Array, "batch seq vocab"]]:
    """Σ weight · (log Σ_i e^logit_i - logit_target), and its gradient weight · (softmax - one-hot)."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    total = top + jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)
    hits = (lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]).astype(logits.dtype)
    return jnp.sum((total - chosen)[..., 0] * weights), weights[..., None] * (jnp.exp(logits - total) - hits)
