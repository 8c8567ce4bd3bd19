"""The loss of fine-tuning, with as little memory as a layer: activations are recomputed, and logits exist in parts."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Scalar

from ling3.cache import Span, State
from ling3.execution import Execution
from ling3.model import CausalLM, DecoderLayer, Mixer
from ling3.train.loop import Batch

LOGITS = 512
"""The number of tokens whose logits exist at once: of 150,000 tokens in float32 these are 0.3 GB."""


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
        """The layer's output and its new state."""
        return eqx.filter_checkpoint(lambda layer, *given: layer(*given))(self.layer, x, state, span)


def recomputed(model: CausalLM) -> CausalLM:
    """The same model, whose layers are recomputed in the backward pass."""
    return eqx.tree_at(lambda m: m.model.layers, model, tuple(map(Recomputed, model.model.layers)))


def summed_loss(model: CausalLM, batch: Batch, execution: Execution | None = None) -> Float[Scalar, ""]:
    """Σ weight · -log p(token | previous tokens) in nats, over all tokens but the first of each row.

    Tokens after a row's last target change nothing in it, but routers count them in their loads, so they should be
    text. The logits are computed for LOGITS tokens at a time, and again in the backward pass, so that memory does not
    grow with tokens times vocabulary.
    """
    execution = Execution.default() if execution is None else execution
    rows, seq = batch.tokens.shape
    hidden, _ = model.model(batch.tokens, (None,) * len(model.model.attentions), batch.span(execution))
    targets, weights = jnp.roll(batch.tokens, -1, axis=1), jnp.roll(batch.weights, -1, axis=1)
    weights = weights.at[:, -1].set(0.0)
    width = math.gcd(seq, max(1, LOGITS // rows))

    def parts(x: Array) -> Array:
        return jnp.moveaxis(x.reshape(rows, seq // width, width, *x.shape[2:]), 1, 0)

    @jax.checkpoint
    def of_part(total: Array, part: tuple[Array, Array, Array]) -> tuple[Array, None]:
        hidden, targets, weights = part
        logits = model.logits(hidden, execution)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return total + jnp.sum(losses * weights), None

    return lax.scan(of_part, jnp.zeros((), jnp.float32), (parts(hidden), parts(targets), parts(weights)))[0]
