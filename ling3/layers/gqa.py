"""Grouped-query attention: full attention in which several query heads share a key and a value head."""

import dataclasses
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, DTypeLike, Float, Int32, PRNGKeyArray

from ling3.cache import CacheSpec, Paged, Span
from ling3.execution import PLAIN, Execution
from ling3.layers.draw import Draw
from ling3.layers.linear import Matrix
from ling3.layers.norm import RMSNorm
from ling3.layers.rope import Rope
from ling3.ops.attention import BLOCK, PerHead
from ling3.ops.precision import Wide, wide


@dataclasses.dataclass(frozen=True)
class GQAConfig:
    """The sizes of a `GQA` layer. `heads` is a multiple of `kv_heads`; all heads have `head_dim` channels."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    std: float
    """Standard deviation of random matrices."""
    rope: Rope | None = None
    """None for no rotation."""
    window: int | None = None
    """Tokens that a query attends to, its own included; None for all up to its own."""
    norm_eps: float | None = None
    """Epsilon of the query and key norms, per head and before the rotation; None for no norms."""
    bias: bool = False
    """Whether queries, keys and values have biases."""
    output_bias: bool = False
    zero_centered: bool = False
    """Whether the norms multiply by 1 + w."""
    gated: bool = False
    """Whether `q_proj` computes an output gate too."""


class GQA(eqx.Module):
    """Grouped-query attention (Ainslie et al., arXiv 2305.13245); multi-head attention if `kv_heads` = `heads`.

        q = rope(q_norm(q_proj(x)));  k = rope(k_norm(k_proj(x)));  v = v_proj(x)         [heads | kv_heads, head_dim]
        o = softmax(q·k / sqrt(head_dim)) v       query head h with key head h // (heads / kv_heads)
        y = o_proj(o)

    The norms (Qwen3) and the rotation may be absent. Keys and values are cached in pages. With a `window` W, a query
    attends to its own token and the W - 1 before it (Mistral 7B, arXiv 2310.06825, §2).

    A rotation of fewer channels than head_dim turns the first ones of each head. A `gated` layer's `q_proj` has the
    rows [query | gate] of each head, and y = o_proj(sigmoid(gate) · o), element by element (Qwen3-Next).
    """

    q_proj: Annotated[Matrix, "heads·head_dim hidden"]  # 2·head_dim rows a head if it is gated
    k_proj: Annotated[Matrix, "kv_heads·head_dim hidden"]
    v_proj: Annotated[Matrix, "kv_heads·head_dim hidden"]
    o_proj: Annotated[Matrix, "hidden heads·head_dim"]
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    head_dim: int = eqx.field(static=True)
    rotation: Rope | None = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    gated: bool = eqx.field(static=True, default=False)

    @staticmethod
    def init(config: GQAConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> "GQA":
        """Random weights, and zero biases if there are any."""
        keys, eps = iter(jax.random.split(key, 4)), config.norm_eps
        draw = Draw(GQA, vars(config), keys, dtype, config.std)
        doubled = vars(config) | {"heads": 2 * config.heads} if config.gated else vars(config)
        draw_queries = Draw(GQA, doubled, keys, dtype, config.std)

        def norm() -> RMSNorm | None:
            return None if eps is None else RMSNorm.init(config.head_dim, eps, config.zero_centered)

        return GQA(
            q_proj=draw_queries("q_proj", bias=config.bias),
            k_proj=draw("k_proj", bias=config.bias),
            v_proj=draw("v_proj", bias=config.bias),
            o_proj=draw("o_proj", bias=config.output_bias),
            q_norm=norm(),
            k_norm=norm(),
            head_dim=config.head_dim,
            rotation=config.rope,
            window=config.window,
            gated=config.gated,
        )

    @property
    def hidden(self) -> int:
        """The number of channels in the residual stream."""
        return self.q_proj.in_features

    @property
    def heads(self) -> int:
        """The number of query heads on this device."""
        return self.q_proj.out_features // ((1 + self.gated) * self.head_dim)

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads on this device."""
        return self.k_proj.out_features // self.head_dim

    @property
    def entry(self) -> int:
        """The size of a token's cache entry: the keys and values of all heads on this device."""
        return 2 * self.k_proj.out_features

    def empty_state(self, spec: CacheSpec) -> Paged:
        """Pages of keys and values, and nothing per slot."""
        return Paged.empty(spec, (self.entry,), window=self.window, shared=2)

    def __call__(
        self, x: Float[Array, "batch seq {self.hidden}"], state: Paged | None, span: Span
    ) -> tuple[Float[Array, "batch seq {self.hidden}"], Paged | None]:
        """The layer's output for each token, and the cache with the span's tokens in it.

        Without a cache, tokens attend causally within the span only, and the result is differentiable.
        """
        positions = span.positions(x.shape[1])
        q, gate = self.queries(x, positions, span.execution)
        entries = self.entries(x, positions, span.execution)
        state = None if state is None else state.append(entries, span)
        o = span.cleared(self._attended(q, positions, entries if state is None else state, span).astype(x.dtype))
        if gate is not None:
            o = o * span.site("gate", gate).astype(o.dtype)
        span.recorder(q=q, entries=entries)
        heads = span.site("heads", o)
        return self.o_proj(rearrange(heads, "b s h v -> b s (h v)"), span.execution), state

    def queries(
        self,
        x: Float[Array, "batch seq {self.hidden}"],
        positions: Int32[Array, "batch seq"],
        execution: Execution = PLAIN,
    ) -> tuple[
        Float[Array, "batch seq {self.heads} {self.head_dim}"],
        Wide[Array, "batch seq {self.heads} {self.head_dim}"] | None,
    ]:
        """The normed and rotated queries, times the softmax scale head_dim^-0.5, and the output gate, if any."""
        q, gate = rearrange(self.q_proj(x, execution), "b s (h d) -> b s h d", h=self.heads), None
        if self.gated:
            q, gate = q[..., : self.head_dim], jax.nn.sigmoid(q[..., self.head_dim :].astype(wide(x.dtype)))
        q = q if self.q_norm is None else self.q_norm(q)
        return self._rotated(q, positions) * self.head_dim**-0.5, gate

    def _rotated(
        self, x: Float[Array, "batch seq _ {self.head_dim}"], positions: Int32[Array, "batch seq"]
    ) -> Float[Array, "batch seq _ {self.head_dim}"]:
        """Rotates the first channels of each head, as many as the rotation has."""
        if self.rotation is None:
            return x
        turned = 2 * len(self.rotation.frequencies)
        if turned == self.head_dim:
            return self.rotation(x, positions)
        return jnp.concatenate([self.rotation(x[..., :turned], positions), x[..., turned:]], axis=-1)

    def entries(
        self,
        x: Float[Array, "batch seq {self.hidden}"],
        positions: Int32[Array, "batch seq"],
        execution: Execution = PLAIN,
    ) -> Float[Array, "batch seq {self.entry}"]:
        """The cache entry of each token: [normed and rotated keys of all heads | values of all heads]."""
        k = rearrange(self.k_proj(x, execution), "b s (h d) -> b s h d", h=self.kv_heads)
        k = k if self.k_norm is None else self.k_norm(k)
        k = self._rotated(k, positions)
        return jnp.concatenate([rearrange(k, "b s h d -> b s (h d)"), self.v_proj(x, execution)], axis=-1)

    def _attended(
        self,
        q: Float[Array, "batch seq {self.heads} {self.head_dim}"],
        positions: Int32[Array, "batch seq"],
        held: Paged | Float[Array, "batch seq {self.entry}"],
        span: Span,
    ) -> Wide[Array, "batch seq {self.heads} {self.head_dim}"]:
        """The attention of each group of query heads, which become further rows of the key head that they share."""
        groups, seq = self.heads // self.kv_heads, q.shape[1]
        rows = rearrange(q, "b s (h g) d -> b h (s g) d", g=groups)
        per_head = PerHead(self.kv_heads, self.head_dim)
        if isinstance(held, Paged):
            assert span.table is not None, "a span over a paged array has a table"
            at, where = jnp.repeat(positions, groups, axis=1), (held.entries, span.table, span.seen)
            o = span.execution.paged_attention(rows, at, *where, per_head, self.window)
        else:
            blocks = jnp.pad(held, ((0, 0), (0, -seq % BLOCK), (0, 0)))
            at, oldest = jnp.repeat(span.columns(positions), groups, axis=1), span.oldest(seq, self.window)
            oldest = None if oldest is None else jnp.repeat(oldest, groups, axis=1)
            o = span.execution.block_attention(rows, at, blocks, span.length, per_head, oldest)
        return rearrange(o, "b h (s g) v -> b s (h g) v", g=groups)
