"""Traces of a forward pass: gates, decays, states, attention maps, routing, norms and hidden states.

A recorder collects intermediate arrays during the model's forward pass; `trace` computes the rest from them.
"""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from ling3.cache import Span
from ling3.execution import Execution
from ling3.intervention import Intervention, recorder, takes_interventions
from ling3.layers.gated_deltanet import GatedDeltaNet
from ling3.layers.kda import KDA
from ling3.layers.mla import MLA
from ling3.layers.moe import MoE
from ling3.model import CausalLM, Mixer
from ling3.ops.kda import kda_step
from ling3.ops.precision import exact, wide
from ling3.runtime.entry_checks import checks_ids


class KDATrace(eqx.Module):
    """The inner arrays of one layer of KDA, or of Gated DeltaNet, whose decay has one channel."""

    decay: Float[Array, "batch seq heads #key"]  # g, nats per token and key channel, at most 0
    beta: Float[Array, "batch seq heads"]  # writing strength
    gate: Float[Array, "batch seq heads value"] | None  # output gate; None without one
    attention_map: Float[Array, "batch heads seq seq"]  # the weights a of o_t = Σ_j a_tj v_j: signed, 0 for j > t
    write_norm: Float[Array, "batch seq heads"]  # Frobenius norm of k uᵀ, which the token adds to exp(g) S
    state_norm: Float[Array, "batch seq heads"]  # Frobenius norm of S after the token
    state: Float[Array, "batch heads key value"]  # S after the last token


class MLATrace(eqx.Module):
    """The inner arrays of one MLA layer."""

    gate: Float[Array, "batch seq heads"] | None  # output gate; None without one
    attention_map: Float[Array, "batch heads seq seq"]  # softmax weights: each row sums to 1, 0 for j > t
    entries: Float[Array, "batch seq entry"]  # what the cache would hold: [latent | rotated key]


class MoETrace(eqx.Module):
    """The routing of one mixture of experts."""

    scores: Float[Array, "batch seq experts"]  # s = sigmoid(x Wᵀ), before any bias
    chosen: Int32[Array, "batch seq top_k"]  # best first
    weights: Float[Array, "batch seq top_k"]  # with the routed scaling factor
    load: Float[Array, " experts"]  # each expert's share of all choices; 1 / experts would be even


class LayerTrace(eqx.Module):
    """One decoder layer: its parts, what they add to the residual stream, and the stream after it.

    For an attention of another kind than these, `attention` is a dict of the arrays that it gave to `span.recorder`,
    by name.
    """

    attention: KDATrace | MLATrace | dict[str, Array | None] | None
    moe: MoETrace | None
    attended: Float[Array, "batch seq hidden"]  # the attention's output, which is added to the stream
    added: Float[Array, "batch seq hidden"]  # the feed-forward's output, which is added to it too
    residual: Float[Array, "batch seq *streams hidden"]  # the hidden states after the layer
    logits: Float32[Array, "batch seq vocab"] | None  # the logit lens: the head applied to `residual`

    @property
    def attention_norm(self) -> Float[Array, "batch seq"]:
        """The Euclidean norm of `attended`, for each token."""
        return _norm(self.attended)

    @property
    def mlp_norm(self) -> Float[Array, "batch seq"]:
        """The Euclidean norm of `added`, for each token."""
        return _norm(self.added)

    @property
    def residual_norm(self) -> Float[Array, "batch seq"]:
        """The Euclidean norm of `residual`, for each token, over all streams together."""
        return _norm(self.residual)


class Trace(eqx.Module):
    """A traced forward pass: every layer, and the logits."""

    tokens: Int[Array, "batch seq"]
    embedding_norm: Float[Array, "batch seq"]
    layers: tuple[LayerTrace, ...]
    logits: Float32[Array, "batch seq vocab"]

    @property
    def kda(self) -> dict[int, KDATrace]:
        """The traces of KDA and Gated DeltaNet layers, by 0-based layer."""
        return {i: x.attention for i, x in enumerate(self.layers) if isinstance(x.attention, KDATrace)}

    @property
    def mla(self) -> dict[int, MLATrace]:
        """The traces of MLA layers, by 0-based layer."""
        return {i: x.attention for i, x in enumerate(self.layers) if isinstance(x.attention, MLATrace)}

    @property
    def moe(self) -> dict[int, MoETrace]:
        """The traces of mixtures of experts, by 0-based layer."""
        return {i: x.moe for i, x in enumerate(self.layers) if x.moe is not None}


@checks_ids
@takes_interventions
@eqx.filter_jit
def trace(
    model: CausalLM,
    tokens: Int[Array, "batch seq"],
    *,
    logit_lens: bool = True,
    interventions: Sequence[Intervention] = (),
) -> Trace:
    """Runs one forward pass and returns everything that is worth plotting. Compiled once per shape.

    The model may be of any family. `trace(model, tokens).logits` are `model(tokens)`, up to rounding. Attention maps
    take batch · heads · seq² numbers per layer, the logit lens (nostalgebraist, "interpreting GPT: the logit lens",
    2020) batch · seq · vocab: leave it out with `logit_lens=False` if the vocabulary is large. `interventions` apply
    during the pass. Raises ValueError for an empty batch or empty sequences, for ids outside the vocabulary, and for
    interventions that do not fit the model.
    """
    batch, seq = tokens.shape
    if 0 in (batch, seq):
        raise ValueError(f"tokens has the shape {tokens.shape}, expected at least one row and one column")
    seen = recorder(interventions, watch=True)
    logits = model.watched(tokens, Span.whole(batch, seq, Execution.default(), seen))
    layers = []
    for i, layer in enumerate(model.model.layers):
        own = seen.of(f"layers.{i}")
        attended = own.get("attended", jnp.zeros_like(own["added"]))
        lens = model.logits(model.model.normed(own["residual"])) if logit_lens else None
        layers.append(
            LayerTrace(
                attention=_attention(layer.attention, seen.of(f"layers.{i}.attention")),
                moe=_moe(seen.of(f"layers.{i}.mlp"), batch, seq) if isinstance(layer.mlp, MoE) else None,
                attended=attended,
                added=own["added"],
                residual=own["residual"],
                logits=lens,
            )
        )
    return Trace(tokens, _norm(seen.values["embeddings"]), tuple(layers), logits)


def _attention(
    attention: Mixer | None, seen: dict[str, Array | None]
) -> KDATrace | MLATrace | dict[str, Array | None] | None:
    match attention:
        case KDA() | GatedDeltaNet():
            return _kda(seen)
        case MLA():
            return _mla(attention, seen)
    return None if attention is None else seen


def _kda(seen: dict[str, Any]) -> KDATrace:
    """Runs the recurrence token by token, with unit vectors appended to the values: their outputs are the map."""
    q, k, v, g, beta = (seen[name] for name in ("q", "k", "v", "decay", "beta"))
    g = g if g.ndim == k.ndim else g[..., None]
    batch, seq, heads, value = v.shape
    units = jnp.broadcast_to(jnp.eye(seq, dtype=v.dtype)[None, :, None], (batch, seq, heads, seq))
    both = jnp.concatenate([v, units], axis=-1)
    state = jnp.zeros((batch, heads, k.shape[-1], value + seq), v.dtype)

    def one(state, token):
        q, k, v, g, beta = token
        kept = jnp.exp(g)[..., None] * state[..., :value]
        o, state = kda_step(q, k, v, g, beta, state)
        after = state[..., :value]
        norms = (jnp.linalg.norm(x, axis=(-2, -1)) for x in (after - kept, after))
        return state, (o[..., value:], *norms)

    state, (rows, writes, norms) = lax.scan(one, state, tuple(jnp.moveaxis(y, 1, 0) for y in (q, k, both, g, beta)))
    return KDATrace(
        decay=g,
        beta=beta,
        gate=seen["gate"],
        attention_map=jnp.moveaxis(rows, 0, 2),
        write_norm=jnp.moveaxis(writes, 0, 1),
        state_norm=jnp.moveaxis(norms, 0, 1),
        state=state[..., :value],
    )


def _mla(attention: MLA, seen: dict[str, Any]) -> MLATrace:
    """Computes the softmax weights from the keys of the expanded form."""
    entries = seen["entries"]
    dtype, (batch, seq) = wide(entries.dtype), entries.shape[:2]
    q_nope, q_rope = (seen[name].astype(dtype) for name in ("q_nope", "q_rope"))
    latent, k_rope = entries[..., : -attention.rope], entries[..., -attention.rope :].astype(dtype)
    heads = q_nope.shape[2]
    k_nope = attention.kv_b_proj(latent, dtype=dtype).reshape(batch, seq, heads, -1)[..., : attention.nope]
    scores = jnp.einsum("bihn,bjhn->bhij", q_nope, k_nope, precision=exact(entries.dtype))
    scores += jnp.einsum("bihr,bjr->bhij", q_rope, k_rope, precision=exact(entries.dtype))
    scores = jnp.where(_causal(seq)[None, None], scores, -jnp.inf)
    return MLATrace(seen["gate"], jax.nn.softmax(scores, axis=-1), entries)


def _moe(seen: dict[str, Any], batch: int, seq: int) -> MoETrace:
    scores, (chosen, weights) = seen["scores"], seen["router"]
    load = jnp.zeros(scores.shape[-1], jnp.float32).at[chosen].add(1.0) / chosen.size
    scores, chosen, weights = (y.reshape(batch, seq, -1) for y in (scores, chosen, weights))
    return MoETrace(scores, chosen, weights, load)


def _causal(seq: int) -> Bool[Array, "seq seq"]:
    return jnp.tril(jnp.ones((seq, seq), bool))


def _norm(x: Float[Array, "batch seq *streams hidden"]) -> Float[Array, "batch seq"]:
    return jnp.linalg.norm(x.astype(wide(x.dtype)).reshape(*x.shape[:2], -1), axis=-1)
