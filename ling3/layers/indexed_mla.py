"""GLM-5.3-Flash's sparse attention: MLA over the tokens of the pools that an indexer chooses."""

import dataclasses
from typing import Annotated

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int32, PRNGKeyArray

from ling3.cache import CacheSpec, Paged, Span
from ling3.layers.csa import CompressorState, over_compressed
from ling3.layers.draw import Draw
from ling3.layers.linear import Matrix, normal
from ling3.layers.mla import MLA, MLAConfig
from ling3.layers.norm import LayerNorm
from ling3.ops import compressed_attention as ops
from ling3.ops.attention import finish
from ling3.ops.precision import Wide, wide
from ling3.ops.tails import continued

KEY_EPS = 1e-6
"""The eps of the indexer's layer norm, whatever `rms_norm_eps` is."""


@dataclasses.dataclass(frozen=True)
class PoolIndexerConfig:
    """The numbers of channels, heads and tokens of a `PoolIndexer`."""

    hidden: int
    q_rank: int
    index_heads: int
    index_dim: int
    pool: int
    """Tokens in a pool."""
    top: int
    """The number of complete pools that are chosen for a query."""
    std: float
    """Standard deviation of random matrices."""


class PoolIndexer(eqx.Module):
    """Scores pools of consecutive tokens for each query, with separate query heads and one key per pool.

        k_t = LayerNorm(wk x_t);   s_t = index_kpool_compress_gate x_t                                 [index_dim]
        key_w = Σ softmax(s + index_kpool_compress_ape) · k         over the tokens of pool w, per channel
        q = wq_b(qa)  [index_heads, index_dim];   a = weights_proj(x) · index_heads^-1/2
        score(w) = Σ_h a_h · relu(q_h · key_w) · index_dim^-1/2

    `index_kpool_compress_ape` is indexed by a token's place in its pool. Keys are float32 or wider until they are
    pooled. Source: GLM-5.3-Flash's published files, as transformers reads them.
    """

    wq_b: Annotated[Matrix, "index_heads·index_dim q_rank"]
    wk: Annotated[Matrix, "index_dim hidden"]
    k_norm: LayerNorm
    weights_proj: Annotated[Matrix, "index_heads hidden"]
    index_kpool_compress_gate: Float[Array, "channels hidden"]
    index_kpool_compress_ape: Float[Array, "ratio channels"]
    top: int = eqx.field(static=True)

    @staticmethod
    def init(config: PoolIndexerConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> "PoolIndexer":
        """Random weights from N(0, std²), and a position bias `index_kpool_compress_ape` of 0."""
        *keys, own = jax.random.split(key, 4)
        draw = Draw(PoolIndexer, vars(config), iter(keys), dtype, config.std)
        return PoolIndexer(
            wq_b=draw("wq_b"),
            wk=draw("wk"),
            k_norm=LayerNorm.init(config.index_dim, KEY_EPS),
            weights_proj=draw("weights_proj"),
            index_kpool_compress_gate=normal(own, (config.index_dim, config.hidden), dtype, config.std),
            index_kpool_compress_ape=jnp.zeros((config.pool, config.index_dim), jnp.float32),
            top=config.top,
        )

    @property
    def pool(self) -> int:
        """The number of tokens in a pool."""
        return self.index_kpool_compress_ape.shape[0]

    @property
    def width(self) -> int:
        """The number of channels in a key."""
        return self.index_kpool_compress_ape.shape[1]

    @property
    def heads(self) -> int:
        """The number of the indexer's query heads."""
        return self.weights_proj.out_features

    def empty_state(self, spec: CacheSpec) -> CompressorState:
        """The state before the first token: no key, and a tail of zeros."""
        keys = Paged.empty(spec, (self.width,), tokens=self.pool)
        return CompressorState(self._empty_tail(spec.slots, spec.dtype), keys)

    def _empty_tail(self, slots: int, dtype: DTypeLike) -> Wide[Array, "slots {self.pool-1} {2*self.width}"]:
        return jnp.zeros((slots, self.pool - 1, 2 * self.width), wide(dtype))

    def keys(
        self, x: Float[Array, "batch seq hidden"], state: CompressorState | None, span: Span
    ) -> tuple[Float[Array, "batch completed {self.width}"], CompressorState | None]:
        """The keys of the pools that the span completes, in the first columns of each row, and the state after it."""
        execution, sums = span.execution, wide(x.dtype)
        gate = execution.times(x.reshape(-1, x.shape[-1]), self.index_kpool_compress_gate).astype(sums)
        new = jnp.concatenate([self.k_norm(self.wk(x, execution, sums)), gate.reshape(*x.shape[:2], -1)], axis=-1)
        tail = self._empty_tail(x.shape[0], x.dtype) if state is None else state.tail
        joined, tail = continued(tail, new, span.length)
        keys = ops.pooled(joined, span.start, self.index_kpool_compress_ape)[0].astype(x.dtype)
        return keys, None if state is None else CompressorState(tail, state.entries.append(keys, span))

    def scores(
        self,
        x: Float[Array, "batch seq hidden"],
        qa: Float[Array, "batch seq q_rank"],
        keys: Paged | Float[Array, "batch completed {self.width}"],
        complete: Int32[Array, "batch seq"],
        span: Span,
    ) -> Wide[Array, "batch seq entries"]:
        """Each query's scores of its first `complete` pools, and -inf for the others."""
        q = rearrange(self.wq_b(qa, span.execution), "b s (h c) -> b s h c", h=self.heads)
        weights = self.weights_proj(x, span.execution, wide(x.dtype)) * (self.heads * self.width) ** -0.5
        if not isinstance(keys, Paged):
            return ops.index_scores(q, weights, keys, complete)
        assert span.table is not None, "a span over a paged array has a table"
        return ops.index_scores_of_pages(q, weights, keys.entries, span.table, complete)

    def chosen(
        self, scores: Wide[Array, "batch seq entries"], complete: Int32[Array, "batch seq"], listed: bool
    ) -> Bool[Array, "batch seq tokens"] | Int32[Array, "batch tokens"]:
        """The tokens of each query's best pools and of its incomplete one: a mask, or if `listed`, of one query a list.

        Tokens that a query does not see, such as those after it in the incomplete pool, are still to be left out.
        """
        count, size = scores.shape[2] + 1, self.pool
        incomplete = jnp.arange(count, dtype=jnp.int32)[None, None] == complete[..., None]
        scores = jnp.pad(scores, ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)
        scores = jnp.where(incomplete, jnp.inf, scores)
        if not listed:
            return jnp.repeat(ops.highest(scores, self.top + 1), size, axis=2)
        pools = lax.top_k(scores[:, 0], self.top + 1)[1].astype(jnp.int32)
        return (size * pools[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None]).reshape(pools.shape[0], -1)


class IndexedMLAState(eqx.Module):
    """One layer's state: MLA's latents, and the keys of pools with the last tokens' inputs to the next one."""

    latents: Paged
    indexer: CompressorState


class IndexedMLA(eqx.Module):
    """MLA in which each query attends to few tokens, chosen by an indexer in pools (GLM-5.3-Flash).

    A query at position t sees the tokens of the `top` best pools among those complete at t, and the tokens up to t of
    the incomplete pool. So a query that completes a pool sees itself only if this pool is chosen. Equal scores choose
    the earlier pool. Attention is computed on the latents, with `kv_b_proj` absorbed into query and output.

    Where there is room for no more than `top` pools, a query sees all tokens, and this is plain MLA.
    """

    mla: MLA
    indexer: PoolIndexer

    @staticmethod
    def init(config: MLAConfig, index: PoolIndexerConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> "IndexedMLA":
        """A layer with random weights from N(0, std²)."""
        first, second = jax.random.split(key)
        return IndexedMLA(MLA.init(config, key=first, dtype=dtype), PoolIndexer.init(index, key=second, dtype=dtype))

    def empty_state(self, spec: CacheSpec) -> IndexedMLAState:
        """The state before the first token. Raises ValueError for packed pages, which latents have no format for."""
        return IndexedMLAState(self.mla.empty_state(spec), self.indexer.empty_state(spec))

    def __call__(
        self, x: Float[Array, "batch seq hidden"], state: IndexedMLAState | None, span: Span
    ) -> tuple[Float[Array, "batch seq hidden"], IndexedMLAState | None]:
        """The layer's output for each token, and its state after the span.

        Without a state, tokens attend only within the span, and the result is differentiable.
        """
        if span.rows_each > 1:
            raise ValueError("indexed MLA keeps no state to go back to behind drafts")
        if span.text_starts is not None:
            raise ValueError("indexed MLA pools a row's tokens together, so a row holds only one text")
        keys, pools = self.indexer.keys(x, None if state is None else state.indexer, span)
        if self._room(x.shape[1], state, span) <= self.indexer.top * self.indexer.pool:
            y, latents = self.mla(x, None if state is None else state.latents, span)
            return y, None if pools is None or latents is None else IndexedMLAState(latents, pools)

        mla, execution, positions = self.mla, span.execution, span.positions(x.shape[1])
        qa = mla.query_input(x, execution)
        q_nope, q_rope = mla.queries(qa, positions, execution)
        entries = mla.entries(x, positions, execution)
        # Padding has positions past the last token, where there is nothing to see.
        seen = jnp.minimum(positions + 1, (span.start + span.length)[:, None])
        complete = seen // self.indexer.pool
        scores = self.indexer.scores(x, qa, keys if pools is None else pools.entries, complete, span)
        chosen = self.indexer.chosen(scores, complete, listed=pools is not None and x.shape[1] == 1)
        state = None if state is None or pools is None else IndexedMLAState(state.latents.append(entries, span), pools)
        o = self._attended(q_nope, q_rope, entries if state is None else state.latents, seen, chosen, span)
        o = span.cleared(o.astype(x.dtype))
        span.recorder(q_nope=q_nope, q_rope=q_rope, entries=entries, index_scores=scores, o=o)
        return mla.projected(span.site("heads", o), execution), state

    def _room(self, seq: int, state: IndexedMLAState | None, span: Span) -> int:
        """The most tokens that a query of the span can see: those of the span, or of a row's pages."""
        if state is None or span.table is None:
            return seq
        return span.table.shape[1] * state.latents.page_size

    def _attended(
        self,
        q_nope: Float[Array, "batch seq heads nope"],
        q_rope: Float[Array, "batch seq heads rope"],
        held: Paged | Float[Array, "batch seq entry"],
        seen: Int32[Array, "batch seq"],
        chosen: Bool[Array, "batch seq tokens"] | Int32[Array, "batch tokens"],
        span: Span,
    ) -> Wide[Array, "batch seq heads value"]:
        """Attention over the latents of those tokens among the first `seen` that are chosen."""
        batch, seq = q_nope.shape[:2]
        chosen = chosen if isinstance(held, Paged) else chosen[:, :, :seq]

        def attend(q: Array) -> Array:
            q = rearrange(q, "(b s) h c -> b s h c", b=batch)
            sums = over_compressed(ops.sink(q, None), q, held, seen, chosen, span)
            return rearrange(finish(sums), "b 1 (s h) c -> (b s) h c", s=seq)

        q_nope, q_rope = (rearrange(q, "b s h c -> (b s) 1 h c") for q in (q_nope, q_rope))
        o = self.mla.over_latents(q_nope, q_rope, attend, span.execution)
        return rearrange(o, "(b s) 1 h v -> b s h v", b=batch)
