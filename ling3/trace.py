"""What a model does inside, by name and shaped for plotting: gates, decays, states, attention maps, routing, norms.

The forward pass knows nothing of this: `trace` walks the same modules once more and keeps what passes by.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from ling3.cache import Span
from ling3.entry_checks import checks_ids
from ling3.layers.kda import KDA
from ling3.layers.mla import MLA
from ling3.layers.moe import MoE
from ling3.model import DecoderLayer, Ling3ForCausalLM
from ling3.ops.kda import kda_step
from ling3.ops.precision import exact, wide


class KDATrace(eqx.Module):
    """Inside one KDA layer, for each token."""

    decay: Float[Array, "batch seq heads key"]  # g, nats per token and key channel, at most 0
    beta: Float[Array, "batch seq heads"]  # writing strength
    gate: Float[Array, "batch seq heads value"] | None  # output gate; None without one
    attention_map: Float[Array, "batch heads seq seq"]  # the weights a of o_t = Σ_j a_tj v_j: signed, 0 for j > t
    state_norm: Float[Array, "batch seq heads"]  # Frobenius norm of S after the token
    state: Float[Array, "batch heads key value"]  # S after the last token


class MLATrace(eqx.Module):
    """Inside one MLA layer, for each token."""

    gate: Float[Array, "batch seq heads"] | None  # output gate; None without one
    attention_map: Float[Array, "batch heads seq seq"]  # softmax weights: each row sums to 1, 0 for j > t
    entries: Float[Array, "batch seq entry"]  # what the cache would hold: [latent | rotated key]


class MoETrace(eqx.Module):
    """Inside one mixture of experts, for each token."""

    scores: Float[Array, "batch seq experts"]  # s = sigmoid(x Wᵀ), before any bias
    chosen: Int32[Array, "batch seq top_k"]  # best first
    weights: Float[Array, "batch seq top_k"]  # with the routed scaling factor
    load: Float[Array, " experts"]  # each expert's share of all choices; 1 / experts would be even


class LayerTrace(eqx.Module):
    """One decoder layer: its parts, and the Euclidean norms of what they add to the residual stream."""

    attention: KDATrace | MLATrace | None
    moe: MoETrace | None
    attention_norm: Float[Array, "batch seq"]  # of what the attention adds
    mlp_norm: Float[Array, "batch seq"]  # of what the feed-forward adds
    residual_norm: Float[Array, "batch seq"]  # of the stream after the layer
    logits: Float32[Array, "batch seq vocab"] | None  # the logit lens: lm_head(norm(stream after the layer))


class Trace(eqx.Module):
    """A whole forward pass, as `trace` returns it."""

    tokens: Int[Array, "batch seq"]
    embedding_norm: Float[Array, "batch seq"]
    layers: tuple[LayerTrace, ...]
    logits: Float32[Array, "batch seq vocab"]

    @property
    def kda(self) -> dict[int, KDATrace]:
        """The KDA layers, by 0-based number."""
        return {i: x.attention for i, x in enumerate(self.layers) if isinstance(x.attention, KDATrace)}

    @property
    def mla(self) -> dict[int, MLATrace]:
        """The MLA layers, by 0-based number."""
        return {i: x.attention for i, x in enumerate(self.layers) if isinstance(x.attention, MLATrace)}

    @property
    def moe(self) -> dict[int, MoETrace]:
        """The layers with experts, by 0-based number."""
        return {i: x.moe for i, x in enumerate(self.layers) if x.moe is not None}


@checks_ids
@eqx.filter_jit
def trace(model: Ling3ForCausalLM, tokens: Int[Array, "batch seq"], *, logit_lens: bool = True) -> Trace:
    """One forward pass over whole sequences, with everything that is worth a plot. Compiled once per shape.

    `trace(model, tokens).logits` are `model(tokens)`, to rounding. Attention maps take batch · heads · seq² numbers per
    layer, the logit lens (nostalgebraist, "interpreting GPT: the logit lens", 2020) batch · seq · vocab: leave it out
    with `logit_lens=False` where the vocabulary is large. Raises ValueError for no tokens, and for ids outside the
    vocabulary.
    """
    batch, seq = tokens.shape
    if 0 in (batch, seq):
        raise ValueError(f"tokens has the shape {tokens.shape}, expected at least one row and one column")
    span = Span(jnp.zeros(batch, jnp.int32), jnp.full(batch, seq, jnp.int32))
    x = model.model.word_embeddings(tokens)
    embedding_norm, layers = _norm(x), []
    for layer in model.model.layers:
        x, seen = _layer(layer, x, span)
        lens = model.lm_head(model.model.norm(x), jnp.float32) if logit_lens else None
        layers.append(eqx.tree_at(lambda s: s.logits, seen, lens, is_leaf=lambda s: s is None))
    return Trace(tokens, embedding_norm, tuple(layers), model.lm_head(model.model.norm(x), jnp.float32))


def _layer(
    layer: DecoderLayer, x: Float[Array, "batch seq hidden"], span: Span
) -> tuple[Float[Array, "batch seq hidden"], LayerTrace]:
    attention, attended = None, jnp.zeros_like(x)
    if layer.attention is not None:
        normed = layer.input_layernorm(x)
        attended, _ = layer.attention(normed, None, span)
        attention = (_kda if isinstance(layer.attention, KDA) else _mla)(layer.attention, normed, span)  # pyright: ignore[reportArgumentType]
    h = x + attended
    normed = layer.post_attention_layernorm(h)
    moe = _moe(layer.mlp, normed) if isinstance(layer.mlp, MoE) else None
    added = layer.mlp(normed)
    y = h + added
    return y, LayerTrace(attention, moe, _norm(attended), _norm(added), _norm(y), None)


def _kda(attention: KDA, x: Float[Array, "batch seq hidden"], span: Span) -> KDATrace:
    """The recurrence token by token, over the true values and, beside them, unit vectors: their outputs are the map."""
    batch, seq = x.shape[:2]
    empty = attention.init_state(batch, x.dtype)
    q, k, v, _ = attention.convolved(x, empty.conv, span)
    g, beta = attention.gates(x, span)
    units = jnp.broadcast_to(jnp.eye(seq, dtype=v.dtype)[None, :, None], (batch, seq, attention.heads, seq))
    both = jnp.concatenate([v, units], axis=-1)
    value = v.shape[-1]
    state = jnp.zeros((*empty.recurrent.shape[:-1], value + seq), empty.recurrent.dtype)

    def one(state, token):
        q, k, v, g, beta = token
        o, state = kda_step(q, k, v, g, beta, state)
        return state, (o[..., value:], jnp.linalg.norm(state[..., :value], axis=(-2, -1)))

    state, (rows, norms) = lax.scan(one, state, tuple(jnp.moveaxis(y, 1, 0) for y in (q, k, both, g, beta)))
    return KDATrace(
        decay=g,
        beta=beta,
        gate=attention.output_gate(x),
        attention_map=jnp.moveaxis(rows, 0, 2),
        state_norm=jnp.moveaxis(norms, 0, 1),
        state=state[..., :value],
    )


def _mla(attention: MLA, x: Float[Array, "batch seq hidden"], span: Span) -> MLATrace:
    """The softmax's weights, from the keys of the expanded form."""
    seq = x.shape[1]
    positions, dtype = span.positions(seq), wide(x.dtype)
    q_nope, q_rope = (q.astype(dtype) for q in attention.queries(x, positions))
    entries = attention.entries(x, positions)
    latent, k_rope = entries[..., : -attention.rope], entries[..., -attention.rope :].astype(dtype)
    heads = q_nope.shape[2]
    k_nope = attention.kv_b_proj(latent, dtype).reshape(*x.shape[:2], heads, -1)[..., : attention.nope]
    scores = jnp.einsum("bihn,bjhn->bhij", q_nope, k_nope, precision=exact(x.dtype))
    scores += jnp.einsum("bihr,bjr->bhij", q_rope, k_rope, precision=exact(x.dtype))
    scores = jnp.where(_causal(seq)[None, None], scores, -jnp.inf)
    return MLATrace(attention.output_gate(x), jax.nn.softmax(scores, axis=-1), entries)


def _moe(moe: MoE, x: Float[Array, "batch seq hidden"]) -> MoETrace:
    tokens = x.reshape(-1, x.shape[-1])
    scores, (chosen, weights) = moe.gate.scores(tokens), moe.gate(tokens)
    load = jnp.zeros(scores.shape[-1], jnp.float32).at[chosen].add(1.0) / chosen.size
    scores, chosen, weights = (y.reshape(*x.shape[:2], -1) for y in (scores, chosen, weights))
    return MoETrace(scores, chosen, weights, load)


def _causal(seq: int) -> Bool[Array, "seq seq"]:
    return jnp.tril(jnp.ones((seq, seq), bool))


def _norm(x: Float[Array, "batch seq hidden"]) -> Float[Array, "batch seq"]:
    return jnp.linalg.norm(x.astype(wide(x.dtype)), axis=-1)
