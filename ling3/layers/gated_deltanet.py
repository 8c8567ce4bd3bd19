"""Gated DeltaNet: linear attention whose memory decays by one number per head and token."""

import dataclasses
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray

from ling3.cache import CacheSpec, KDAState, Span
from ling3.execution import PLAIN, Execution
from ling3.layers.conv import ShortConv
from ling3.layers.draw import Draw
from ling3.layers.kda import DraftedKDA, advanced, bias_of_rate, drafted_tails
from ling3.layers.linear import Matrix
from ling3.layers.norm import GatedRMSNorm
from ling3.ops.kda import l2_normalize
from ling3.ops.precision import Wide, wide


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig:
    """The sizes of a `GatedDeltaNet` layer. `heads`, of `value` channels, is a multiple of `key_heads`, of `key`."""

    hidden: int
    heads: int
    key_heads: int
    key: int
    value: int
    eps: float
    std: float
    """Standard deviation of random matrices."""
    taps: int = 4
    grouped: bool = True
    """Whether the input projections are the two matrices with a group of rows per key head, or the four plain ones."""


class GatedDeltaNet(eqx.Module):
    """Gated DeltaNet (arXiv 2412.06464, §3; names and order of the rows from Qwen3-Next's and Qwen3.5's files).

        q, k, v = silu(conv([q | k | v]));   q = q / |q| / sqrt(key);   k = k / |k|      per key head
        g = -exp(A_log) · softplus(a + dt_bias);   b = sigmoid(b)                        per head
        S <- exp(g) S;   S <- S + k (b (v - Sᵀ k))ᵀ;   o = Sᵀ q                           the recurrence
        y = out_proj( RMSNorm(o) · norm.weight · silu(z) )                               element by element

    The state and what precedes it are KDA's, with one decay for all channels of a head. Each key head serves
    heads / key_heads consecutive heads. Everything between the projections is float32.

    q, k, v, z, b and a are products with x. Qwen3-Next has two matrices, whose rows are grouped by key head:
    [q | k | v | z] and [b | a]; Qwen3.5 has the four of [q | k | v], z, b and a, without groups.
    """

    # Either two matrices, grouped by key head,
    in_proj_qkvz: Annotated[Matrix | None, "groups·(key+key+values+values) hidden"]
    in_proj_ba: Annotated[Matrix | None, "groups·(repeats+repeats) hidden"]
    # or four plain ones.
    in_proj_qkv: Annotated[Matrix | None, "packed hidden"]
    in_proj_z: Annotated[Matrix | None, "heads·value hidden"]
    in_proj_b: Annotated[Matrix | None, "heads hidden"]
    in_proj_a: Annotated[Matrix | None, "heads hidden"]
    conv1d: ShortConv
    A_log: Float[Array, " heads"]
    dt_bias: Float[Array, " heads"]
    norm: GatedRMSNorm
    out_proj: Annotated[Matrix, "hidden heads·value"]
    repeats: int = eqx.field(static=True)
    """The number of heads that a key head serves."""
    key: int = eqx.field(static=True)

    @staticmethod
    def init(config: GatedDeltaNetConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> "GatedDeltaNet":
        """Random weights; initial decay rates -g are log-uniform in [0.001, 0.1] nats per token, as KDA's."""
        keys = iter(jax.random.split(key, 9))
        packed = 2 * config.key_heads * config.key + config.heads * config.value
        repeats = config.heads // config.key_heads
        groups = {"groups": config.key_heads, "repeats": repeats, "values": repeats * config.value, "packed": packed}
        draw = Draw(GatedDeltaNet, vars(config) | groups, keys, dtype, config.std)
        rate = 0.1 * 100.0 ** -jax.random.uniform(next(keys), (config.heads,), jnp.float32)
        scale = jax.random.uniform(next(keys), (config.heads,), jnp.float32, minval=1.0, maxval=16.0)
        grouped = ("in_proj_qkvz", "in_proj_ba")
        plain = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        drawn = {name: draw(name) for name in (grouped if config.grouped else plain)}
        return GatedDeltaNet(
            **{name: drawn.get(name) for name in (*grouped, *plain)},
            conv1d=ShortConv.init(packed, config.taps, key=next(keys), axes=("packed", "taps")),
            A_log=jnp.log(scale),
            dt_bias=bias_of_rate(rate, scale, None),
            norm=GatedRMSNorm.init(config.value, config.eps),
            out_proj=draw("out_proj"),
            repeats=repeats,
            key=config.key,
        )

    @property
    def heads(self) -> int:
        """The number of heads, which are those of the values."""
        return self.A_log.shape[0]

    @property
    def groups(self) -> int:
        """The number of key heads, each of which has a group of heads."""
        return self.heads // self.repeats

    @property
    def packing(self) -> tuple[int, int, int]:
        """The channels of all q, of all k and of all v, which follow each other in the convolution."""
        return self.groups * self.key, self.groups * self.key, self.heads * self.value

    @property
    def value(self) -> int:
        """The number of channels of a head's value."""
        return self.norm.weight.shape[0]

    def empty_state(self, spec: CacheSpec) -> KDAState:
        """The state before the first token: zeros per slot, and nothing in pages."""
        channels, taps = self.conv1d.weight.shape
        recurrent = jnp.zeros((spec.slots, self.heads, self.key, self.value), wide(spec.dtype))
        return KDAState(recurrent, jnp.zeros((spec.slots, taps - 1, channels), spec.dtype))

    def __call__(
        self, x: Float[Array, "batch seq hidden"], state: KDAState | None, span: Span
    ) -> tuple[Float[Array, "batch seq hidden"], KDAState | DraftedKDA]:
        """The layer's output for each token, and its state after the span. Without a `state` it starts from zeros."""
        state = self.empty_state(CacheSpec(x.shape[0], 0, 1, x.dtype)) if state is None else state
        inputs, z, b, a = self.projections(x, span.execution)
        tail = state.conv if span.rows_each == 1 else drafted_tails(state.conv, inputs, span)
        convolved, conv = self.conv1d(inputs, tail, span)
        g, beta = self.gates(b, a, span)
        g, beta = span.site("decay", g), span.site("beta", beta)
        tokens = (*self._split(convolved), g[..., None], beta)
        o, after = advanced(tokens, state, conv, inputs, span, None)
        gate = span.site("gate", jax.nn.silu(z.astype(wide(x.dtype))))
        heads = span.site("heads", self.norm(o, gate).astype(x.dtype))
        return self.out_proj(rearrange(heads, "b s h v -> b s (h v)"), span.execution), after

    def projections(
        self, x: Float[Array, "batch seq hidden"], execution: Execution = PLAIN
    ) -> tuple[
        Float[Array, "batch seq channels"],
        Float[Array, "batch seq {self.heads} {self.value}"],
        Wide[Array, "batch seq {self.heads}"],
        Wide[Array, "batch seq {self.heads}"],
    ]:
        """The convolution's inputs [q | k | v], z, b and a, of which the last two are float32 or wider."""
        dtype = wide(x.dtype)
        if self.in_proj_qkvz is not None and self.in_proj_ba is not None:
            by_head = {"h": self.groups}
            qkvz = rearrange(self.in_proj_qkvz(x, execution), "b s (h c) -> b s h c", **by_head)
            ba = rearrange(self.in_proj_ba(x, execution, dtype), "b s (h c) -> b s h c", **by_head)
            values = self.repeats * self.value
            q, k, v, z = jnp.split(qkvz, (self.key, 2 * self.key, 2 * self.key + values), axis=-1)
            b, a = (rearrange(part, "b s h r -> b s (h r)") for part in jnp.split(ba, 2, axis=-1))
            qkv = jnp.concatenate([rearrange(part, "b s h c -> b s (h c)") for part in (q, k, v)], axis=-1)
            return qkv, z.reshape(*x.shape[:2], self.heads, self.value), b, a
        assert self.in_proj_qkv is not None and self.in_proj_z is not None, "either two matrices or these four"
        assert self.in_proj_b is not None and self.in_proj_a is not None, "either two matrices or these four"
        z = rearrange(self.in_proj_z(x, execution), "b s (h v) -> b s h v", h=self.heads)
        return (
            self.in_proj_qkv(x, execution),
            z,
            self.in_proj_b(x, execution, dtype),
            self.in_proj_a(x, execution, dtype),
        )

    def gates(
        self, b: Wide[Array, "batch seq heads"], a: Wide[Array, "batch seq heads"], span: Span
    ) -> tuple[Wide[Array, "batch seq heads"], Wide[Array, "batch seq heads"]]:
        """The log decay g and the writing strength beta; both are 0 for padding, which leaves the state unchanged."""
        rate, dt_bias = jnp.exp(self.A_log.astype(a.dtype)), self.dt_bias.astype(a.dtype)
        g = -rate[None, None] * jax.nn.softplus(a + dt_bias[None, None])
        valid = span.valid(a.shape[1])[..., None]
        return jnp.where(valid, g, 0.0), jnp.where(valid, jax.nn.sigmoid(b), 0.0)

    def _split(
        self, y: Wide[Array, "batch seq channels"]
    ) -> tuple[
        Wide[Array, "batch seq {self.heads} {self.key}"],
        Wide[Array, "batch seq {self.heads} {self.key}"],
        Wide[Array, "batch seq {self.heads} {self.value}"],
    ]:
        """q (of length key^-0.5) and k (of length 1) of every head, which its key head repeats, and v."""
        keys, _, _ = self.packing
        q, k, v = jnp.split(y, (keys, 2 * keys), axis=-1)
        q, k = (l2_normalize(rearrange(part, "b s (h k) -> b s h k", h=self.groups)) for part in (q, k))
        q, k = (jnp.repeat(part, self.repeats, axis=2) for part in (q * self.key**-0.5, k))
        return q, k, rearrange(v, "b s (h v) -> b s h v", h=self.heads)
