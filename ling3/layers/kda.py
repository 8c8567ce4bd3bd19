"""Kimi Delta Attention: linear attention whose memory is one matrix per head."""

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray

from ling3.cache import KDAState, Span
from ling3.config import Ling3Config
from ling3.layers.conv import ShortConv
from ling3.layers.linear import Linear
from ling3.layers.norm import GatedRMSNorm
from ling3.ops.kda import chunk_kda, kda_gate, kda_step, l2_normalize
from ling3.ops.precision import wide


class KDA(eqx.Module):
    """Kimi Delta Attention with Ling-3's bounded decay (Kimi Linear, arXiv 2510.26692, §3; the bound: Ling-3's config).

        q, k, v = silu(conv(W x));   q = q / |q| / sqrt(key);   k = k / |k|         per head
        g = lower_bound · sigmoid(exp(A_log) · (f_proj(x) + dt_bias))               log decay, nats per key channel
        b = sigmoid(b_proj(x))                                                      writing strength, per head
        S <- exp(g) S;   S <- S + k (b (v - Sᵀ k))ᵀ;   o = Sᵀ q                       the recurrence
        y = o_proj( RMSNorm(o) · o_norm.weight · sigmoid(g_proj(x)) )               output gate, per element

    With `lower_bound` None the decay is Kimi-Linear's g = -exp(A_log) · softplus(f_proj(x) + dt_bias).
    Everything between the projections is float32.
    """

    q_proj: Linear  # [heads·key, hidden]
    k_proj: Linear  # [heads·key, hidden]
    v_proj: Linear  # [heads·value, hidden]
    q_conv1d: ShortConv
    k_conv1d: ShortConv
    v_conv1d: ShortConv
    A_log: Float[Array, " heads"]
    dt_bias: Float[Array, " channels"]  # heads·key
    f_proj: Linear  # decay gate, [heads·key, hidden]
    b_proj: Linear  # writing strength, [heads, hidden]
    g_proj: Linear  # output gate, [heads·value, hidden]
    o_norm: GatedRMSNorm
    o_proj: Linear  # [hidden, heads·value]
    lower_bound: float | None = eqx.field(static=True)

    @staticmethod
    def init(config: Ling3Config, *, key: PRNGKeyArray, dtype: DTypeLike) -> "KDA":
        """Random weights; initial decay rates -g are log-uniform in [0.001, 0.1] nats a token under either law.

        Where the bound is below 0.2, the fastest rate is half of it instead, and the slowest a hundredth of that.
        """
        heads, hidden, inner = (
            config.num_attention_heads,
            config.hidden_size,
            config.num_attention_heads * config.head_dim,
        )
        bound = config.kda_lower_bound
        keys = iter(jax.random.split(key, 12))

        def linear(rows: int, columns: int) -> Linear:
            return Linear.init(rows, columns, key=next(keys), dtype=dtype, std=config.initializer_range)

        def conv() -> ShortConv:
            return ShortConv.init(inner, config.short_conv_kernel_size, key=next(keys))

        fastest = 0.1 if bound is None else min(0.1, -bound / 2)
        rate = fastest * 100.0 ** -jax.random.uniform(next(keys), (inner,), jnp.float32)
        if bound is None:
            scale = jax.random.uniform(next(keys), (heads,), jnp.float32, minval=1.0, maxval=16.0)
            dt_bias = jnp.log(jnp.expm1(rate / jnp.repeat(scale, config.head_dim)))
        else:
            scale = jnp.ones(heads, jnp.float32)
            dt_bias = jnp.log(rate / (-bound - rate))
        return KDA(
            q_proj=linear(inner, hidden),
            k_proj=linear(inner, hidden),
            v_proj=linear(inner, hidden),
            q_conv1d=conv(),
            k_conv1d=conv(),
            v_conv1d=conv(),
            A_log=jnp.log(scale),
            dt_bias=dt_bias,
            f_proj=linear(inner, hidden),
            b_proj=linear(heads, hidden),
            g_proj=linear(inner, hidden),
            o_norm=GatedRMSNorm.init(config.head_dim, config.rms_norm_eps),
            o_proj=linear(hidden, inner),
            lower_bound=bound,
        )

    def init_state(self, batch: int, dtype: DTypeLike) -> KDAState:
        """The memory before the first token: zeros."""
        heads, inner = self.A_log.shape[0], self.dt_bias.shape[0]
        taps = self.q_conv1d.weight.shape[1]
        recurrent = jnp.zeros((batch, heads, inner // heads, inner // heads), wide(dtype))
        return KDAState(recurrent, jnp.zeros((batch, taps - 1, 3 * inner), dtype))

    def __call__(
        self, x: Float[Array, "batch seq hidden"], state: KDAState | None, span: Span
    ) -> tuple[Float[Array, "batch seq hidden"], KDAState]:
        """The layer's output for each token, and its memory after the span's last. No state means the zero state."""
        state = self.init_state(x.shape[0], x.dtype) if state is None else state
        q, k, v, conv = self._convolved(x, state.conv, span)
        g, beta = self._gates(x, span)
        if x.shape[1] == 1:
            o, recurrent = kda_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state.recurrent)
            o = o[:, None]
        else:
            o, recurrent = chunk_kda(q, k, v, g, beta, state.recurrent, lower_bound=self.lower_bound)
        return self._output(o, x), KDAState(recurrent, conv)

    def _convolved(
        self, x: Float[Array, "batch seq hidden"], tail: Float[Array, "batch tail channels"], span: Span
    ) -> tuple[
        Float[Array, "batch seq heads key"],
        Float[Array, "batch seq heads key"],
        Float[Array, "batch seq heads value"],
        Float[Array, "batch tail channels"],
    ]:
        """q (scaled), k (both of unit length), v, and the convolutions' new tail."""
        tails = jnp.split(tail, 3, axis=-1)
        projections = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        outputs, new = zip(
            *(conv(p, t, span) for conv, p, t in zip(convs, projections, tails, strict=True)), strict=True
        )
        q, k, v = (self._heads(y) for y in outputs)
        return l2_normalize(q) * q.shape[-1] ** -0.5, l2_normalize(k), v, jnp.concatenate(new, axis=-1)

    def _gates(
        self, x: Float[Array, "batch seq hidden"], span: Span
    ) -> tuple[Float[Array, "batch seq heads key"], Float[Array, "batch seq heads"]]:
        """The log decay g and the writing strength beta; both 0 on padding, which leaves the state as it was."""
        dtype = wide(x.dtype)
        f = self._heads(self.f_proj(x, dtype))
        dt_bias = self.dt_bias.astype(dtype).reshape(self.A_log.shape[0], -1)
        g = kda_gate(f, self.A_log.astype(dtype), dt_bias, self.lower_bound)
        beta = jax.nn.sigmoid(self.b_proj(x, dtype))
        valid = span.valid(x.shape[1])[:, :, None]
        return jnp.where(valid[..., None], g, 0.0), jnp.where(valid, beta, 0.0)

    def _output(
        self, o: Float[Array, "batch seq heads value"], x: Float[Array, "batch seq hidden"]
    ) -> Float[Array, "batch seq hidden"]:
        """Norm, output gate and output projection."""
        gated = self.o_norm(o, self._heads(self.g_proj(x)))
        return self.o_proj(rearrange(gated, "b s h v -> b s (h v)").astype(x.dtype))

    def _heads(self, y: Float[Array, "batch seq channels"]) -> Float[Array, "batch seq heads key"]:
        return rearrange(y, "b s (h k) -> b s h k", h=self.A_log.shape[0])
