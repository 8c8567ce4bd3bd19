"""Mixers that take one mechanism of Kimi Delta Attention away after the other.

Each has the projections, convolutions, norms and output gate of KDA, and KDA's initial weights where it has the part:

    KDA               S <- e^g S,  one g per key channel;   S <- S + k (b (v - Sᵀ k))ᵀ;   o = Sᵀ q
    Gated DeltaNet    one g per head                                (Yang, Kautz & Hatamizadeh, arXiv 2412.06464)
    Mamba-2           S <- e^g S + b k vᵀ: no delta rule            (Dao & Gu, arXiv 2405.21060)
    lightning         g is a constant of the head, and b is 1       (Qin et al., arXiv 2401.04658)
"""

import dataclasses
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ling3.cache import CacheSpec, KDAState, Span
from ling3.layers.draw import Draw
from ling3.layers.kda import KDA, KDAConfig, bias_of_rate
from ling3.layers.linear import Linear


def decayed_attention(
    q: Float[Array, "batch seq heads key"],
    k: Float[Array, "batch seq heads key"],
    v: Float[Array, "batch seq heads value"],
    g: Float[Array, "batch seq heads"],
    beta: Float[Array, "batch seq heads"],
    state: Float[Array, "batch heads key value"],
) -> tuple[Float[Array, "batch seq heads value"], Float[Array, "batch heads key value"]]:
    """S <- e^g S + b k vᵀ, o = Sᵀ q for all tokens at once: outputs and the last state, in products over the sequence.

    With G_t the sum of g up to t:   o_t = e^{G_t} Sᵀ q_t + Σ_{i ≤ t} e^{G_t - G_i} b_i (q_t·k_i) v_i.
    """
    total = jnp.cumsum(g, axis=1)
    until = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))[None, :, :, None]
    decays = jnp.exp(jnp.where(until, total[:, :, None] - total[:, None], -jnp.inf))
    scores = jnp.einsum("bthk,bihk->btih", q, k) * decays * beta[:, None]
    read = jnp.einsum("bthk,bhkv->bthv", q * jnp.exp(total)[..., None], state)
    left = jnp.exp(total[:, -1:] - total) * beta
    after = jnp.exp(total[:, -1])[..., None, None] * state + jnp.einsum("bth,bthk,bthv->bhkv", left, k, v)
    return read + jnp.einsum("btih,bihv->bthv", scores, v), after


class HeadDecay(eqx.Module):
    """KDA with one log decay per head: g = -exp(A_log) · softplus(a_proj(x) + dt_bias); see the module's table.

    `kda` is the layer without decays of its own. Without `a_proj` g is the constant -exp(A_log), which is not trained,
    and b is 1. Without `delta` nothing is taken out of the state before a write.
    """

    kda: KDA
    a_proj: Annotated[Linear | None, "heads hidden"]
    A_log: Float[Array, " heads"]
    dt_bias: Float[Array, " heads"] | None
    delta: bool = eqx.field(static=True)

    @staticmethod
    def init(config: KDAConfig, *, key: PRNGKeyArray, delta: bool = True, fixed: bool = False) -> "HeadDecay":
        """Random weights in float32. Initial rates are KDA's, 0.001 to 0.1 nats per token, geometric if they are fixed.

        Raises ValueError for a delta rule with fixed decays, of which there is no model here.
        """
        if delta and fixed:
            raise ValueError("delta is True and fixed is True: expected a fixed decay without the delta rule")
        first, second, third = jax.random.split(key, 3)
        own = dataclasses.replace(config, decays=False, lower_bound=None, beta=1.0 if fixed else None)
        kda = KDA.init(own, key=first, dtype=jnp.float32)
        if fixed:
            share = jnp.linspace(0.0, 1.0, config.heads)
            return HeadDecay(kda, None, jnp.log(0.1 * 100.0**-share), None, delta)
        rate = 0.1 * 100.0 ** -jax.random.uniform(second, (config.heads,), jnp.float32)
        ones = jnp.ones(config.heads, jnp.float32)
        a_proj = Draw(HeadDecay, vars(config), iter([third]), jnp.float32, config.std)("a_proj")
        return HeadDecay(kda, a_proj, jnp.log(ones), bias_of_rate(rate, ones, None), delta)

    def empty_state(self, spec: CacheSpec) -> KDAState:
        """The state before the first token, as KDA's."""
        return self.kda.empty_state(spec)

    def decay(self, x: Float[Array, "batch seq hidden"], span: Span) -> Float[Array, "batch seq heads"]:
        """The log decay g of each head in nats; 0 for padding."""
        if self.a_proj is None or self.dt_bias is None:
            g = -jnp.exp(jax.lax.stop_gradient(self.A_log))[None, None]
        else:
            rates = jax.nn.softplus(self.a_proj(x, span.execution) + self.dt_bias[None, None])
            g = -jnp.exp(self.A_log)[None, None] * rates
        return jnp.where(span.valid(x.shape[1])[..., None], g, 0.0)

    def __call__(
        self, x: Float[Array, "batch seq hidden"], state: KDAState | None, span: Span
    ) -> tuple[Float[Array, "batch seq hidden"], KDAState]:
        """The layer's output for each token, and its state after the span. Without a `state` it starts from zeros."""
        kda, execution = self.kda, span.execution
        state = self.empty_state(CacheSpec(x.shape[0], 0, 1, x.dtype)) if state is None else state
        q, k, v, conv = kda.convolved(x, state.conv, span)
        g, (_, beta) = self.decay(x, span), kda.gates(x, span)
        if self.delta:
            how = {"lower_bound": None, "chunk_size": execution.chunk_size}
            o, recurrent = execution.chunk_kda(q, k, v, g[..., None], beta, state.recurrent, **how)
        else:
            o, recurrent = decayed_attention(q, k, v, g, beta, state.recurrent)
        heads = kda.gated(o, kda.output_gate(x, execution), x.dtype)
        return kda.projected(heads, execution), KDAState(recurrent, conv)
